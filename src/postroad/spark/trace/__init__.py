"""The bulk trace (spec P5)."""
