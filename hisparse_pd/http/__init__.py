"""Processes that speak HTTP: fronts and workers, their connections and metrics, the links to engines."""
