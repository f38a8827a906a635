"""The commands that one types: the command line, and the work of ``pair`` and ``doctor``."""
