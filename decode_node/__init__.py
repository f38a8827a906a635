"""The decode node: landing zones, continuous batching, hot buffers, and the HTTP server in front of them."""
