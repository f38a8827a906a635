"""What outputs may be: grammars, compiled within bounds, and the masks that hold outputs to them.

llguidance is behind it, and no other room knows that.
"""
