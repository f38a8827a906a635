"""Benchmarks of parts and the demo: each prints a table, and a benchmark writes JSON to ``out``."""
