"""Moves KV: extents and their allocator, write plans, the Mooncake engine, the sender and the aux record."""
