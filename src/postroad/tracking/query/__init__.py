"""How paths are asked for (spec T6, T12)."""
