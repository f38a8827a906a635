"""Swap-in, sparse attention and indexer kernels behind checked wrappers, each with a CPU reference.

``transformers`` looks for an optional package of this name and judges it by its version: ``__version__``
stays below the versions it accepts, so that it reports the package as unavailable. Nothing is imported
here, because that check may import this package.
"""

__version__ = "0"
