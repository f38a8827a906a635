"""Memory of a machine: how much is free, and host, device and peer memory that pools are made of."""
