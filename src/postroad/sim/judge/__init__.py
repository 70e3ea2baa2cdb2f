"""What the simulated network is judged by."""
