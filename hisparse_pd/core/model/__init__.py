"""The DSA model as it serves: spec, weights, forward over our own pools, sampling."""
