"""``hisparse-pd bench serve``, which puts load on any OpenAI-compatible endpoint, and what all benchmarks
share: a pair on loopback, the facts that numbers depend on, and reports.
"""
