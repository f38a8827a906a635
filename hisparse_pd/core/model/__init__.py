"""The DSA model as it serves: families, spec, weights, forward over our own pools, the ranks that
share its experts, sampling and logprobs.
"""
