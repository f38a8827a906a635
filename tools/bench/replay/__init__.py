"""A trace of Mooncake's format sent to a pair, and an LRU of the tiers' size over the same ids."""
