"""Grammars, compiled within bounds, and the token masks that hold outputs to them.

No other room imports llguidance.
"""
