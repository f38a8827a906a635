"""Pages of token slots: the keys they are found by, who has which, and the prefixes that requests share."""
