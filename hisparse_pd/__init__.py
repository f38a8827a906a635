"""Prefill and decode nodes for sparse-attention LLMs: what the three services share, and the command line."""
