"""The DSA model: configuration and weights through transformers, attention over our own pools."""
