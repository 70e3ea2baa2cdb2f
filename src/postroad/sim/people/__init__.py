"""Who uses the simulated network."""
