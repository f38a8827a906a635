"""Benchmarks, and commands that make checkpoints; they are in the checkout, not in the wheel."""
