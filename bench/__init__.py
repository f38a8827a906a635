"""Benchmarks, apart from the tests: each prints a table and writes JSON and a PNG to ``bench/out``."""
