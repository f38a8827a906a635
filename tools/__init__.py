"""In the checkout, not in the wheel: benchmarks of parts, training, making checkpoints."""
