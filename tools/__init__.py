"""In the checkout, not in the wheel: benchmarks of parts, making checkpoints."""
