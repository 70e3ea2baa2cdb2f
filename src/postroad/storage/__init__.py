"""What a broker keeps on disk."""
