"""The check of a machine, and of the way between two, before a node is deployed there."""
