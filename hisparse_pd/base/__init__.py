"""Words, settings, and what every process does first: under everything else."""
