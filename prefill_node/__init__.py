"""The prefill node: computes prompts in chunks and pushes their KV into the decode nodes' memory."""
