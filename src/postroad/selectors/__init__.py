"""What people ask for: conditions, the matching index and covering."""
