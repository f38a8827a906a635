"""The commands that one types: the command line, and ``doctor``, the check of a machine."""
