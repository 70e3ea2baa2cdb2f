"""The compiled inner loops and nothing else."""
