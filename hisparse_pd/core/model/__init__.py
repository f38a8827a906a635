"""The DSA model: families, spec, weights, the forward over our own pools, the ranks that share its experts,
sampling and logprobs."""
