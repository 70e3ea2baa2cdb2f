"""The publisher hosting broker, PHB (spec D1, D7, D8)."""
