"""Prefill and decode nodes for sparse-attention LLMs, and the router in front of them.

From the ground up: ``base``; ``protocol`` and ``kernels``; ``core``; ``transfer``; ``engine``; ``serving``;
``prefill_node``, ``decode_node`` and ``router``; ``commands``. Six of these are links to folders at the root
of the repository, which are no packages of their own: nothing but ``hisparse_pd`` is imported or installed.
"""
