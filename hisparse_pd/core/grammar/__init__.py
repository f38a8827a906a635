"""Grammars, compiled within bounds, and the masks of tokens that keep outputs to them.

No other package imports llguidance.
"""
