"""Processes that speak HTTP: fronts, their connections and metrics, the links to engines."""
