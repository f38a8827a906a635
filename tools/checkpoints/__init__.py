"""Makes checkpoints: tiny and synthetic ones, weights in fp8; and the oracle that answers for them."""
