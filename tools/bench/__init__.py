"""The demo and the benchmarks of parts; each prints a table, and benchmarks write JSON to ``out``."""
