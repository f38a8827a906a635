"""Memory of a machine: how much is free, and host, device and peer memory that pools are made of; and what
else a machine has that a transport can use.
"""
