"""The simulated world: virtual clock, network and disk from a seed."""
