"""Tracking: where did my message go? (spec T1-T13; Jun & Astley, "Low-Overhead Message Tracking".)"""
