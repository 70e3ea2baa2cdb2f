"""The experiments of the papers, run again on this system and set beside what the papers say."""
