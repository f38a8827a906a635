"""Benchmarks, apart from the tests: each prints a table and writes JSON to ``bench/out``."""
