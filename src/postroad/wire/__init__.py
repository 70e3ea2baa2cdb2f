"""Frames between nodes and their codec."""
