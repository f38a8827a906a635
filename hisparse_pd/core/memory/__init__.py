"""A machine's memory: how much is free, the host, device and peer memory of pools, NUMA placement, and what
else a transport can use."""
