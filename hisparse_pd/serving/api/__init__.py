"""The HTTP API of a node: schemas, prompts, text, answers in each dialect, and the start of a node."""
