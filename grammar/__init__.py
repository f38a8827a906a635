"""Grammars that answers are held to: llguidance is behind this room."""
