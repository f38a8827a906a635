"""Processes that speak HTTP: servers with their connections and TLS, the fronts of a node with their metrics,
their links to engines, and the children that a node has on each of its machines.
"""
