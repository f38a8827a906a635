"""Checks that the GPU kernels take the sizes of a model and of the settings, before the model is loaded.

``AttentionKernels`` of both nodes checks the indexer's sizes, and a decode node's sizing those of swap-in.
Other sizes have no bound that a model or a setting can reach: pages and items of any size, layers, heads and
dimensions of attention (``kernels.attention_backends`` passes over a backend that cannot take them), experts.
"""

from __future__ import annotations

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.kernels.cuda import MAX_CAPACITY, MAX_POSITIONS, MAX_SELECTED
from hisparse_pd.kernels.cuda import MAX_TOP_K as MAX_SWAP_IN_TOP_K
from hisparse_pd.kernels.paged_indexer import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_TOKENS_OF_A_BLOCK,
    MAX_TOP_K,
)


def check_indexer_sizes(*, num_heads: int, head_dim: int, top_k: int, context_length: int) -> None:
    """Check the sizes of the lightning indexer and its top-k. Raises StartError."""
    _check("index_n_heads", num_heads, MAX_HEADS, "indexer", _ON_CPU)
    _check("index_head_dim", head_dim, MAX_HEAD_DIM, "indexer", _ON_CPU)
    _check("index_topk", top_k, MAX_TOP_K, "top-k", _ON_CPU)
    _check("context_length", context_length, MAX_CONTEXT, "indexer", "lower --context-length")


def check_swap_in_sizes(*, top_k: int, max_running_requests: int, capacity: int, num_new: int = 1) -> None:
    """Check the sizes of the swap-in for ``max_running_requests`` with up to ``num_new`` new positions each,
    and hot buffers of up to ``capacity`` entries. Raises StartError.
    """
    _check("index_topk", top_k, MAX_SWAP_IN_TOP_K, "swap-in", _ON_CPU)
    most_new = MAX_POSITIONS // top_k  # one of them is the newest token, the others are drafts
    _check("speculative_num_steps", num_new - 1, most_new - 1, "swap-in", "lower --speculative-num-steps")
    # Each new position is a query, for which the indexer's scratch has a row; MAX_SELECTED is exclusive.
    most_requests = min(MAX_TOKENS_OF_A_BLOCK // num_new, (MAX_SELECTED - 1) // (num_new * top_k))
    remedy = "lower --max-running-requests"
    _check("max_running_requests", max_running_requests, most_requests, "swap-in", remedy)
    _check("device_buffer_size", capacity, MAX_CAPACITY, "swap-in", "lower --device-buffer-size")


_ON_CPU = "serve this checkpoint with --device cpu"


def _check(name: str, value: int, bound: int, kernel: str, remedy: str) -> None:
    if value > bound:
        raise StartError(f"{name} {value}: the GPU's {kernel} takes {bound} at most; {remedy}")
