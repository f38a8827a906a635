"""Training of the small DSA model that retrieves: its task, its network, and the run that trains it."""
