"""Processes that speak HTTP: servers with connections and TLS, the fronts of a node with their metrics, their
links to engines, and the child processes that a node has on each of its machines.
"""
