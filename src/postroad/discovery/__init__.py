"""Brokers that are found, not configured (spec V1 to V12)."""
