"""Makes checkpoints (tiny, synthetic, in fp8), and has the oracle that tests compare with."""
