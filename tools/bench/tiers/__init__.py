"""The time to the first token by where a prompt's beginning lies, and conversations beside no tiers."""
