"""The engine's side of a node: its start, its messages to the fronts, its ranks' steps together."""
