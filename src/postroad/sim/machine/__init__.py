"""The simulated machine: clock, network, disk, processes."""
