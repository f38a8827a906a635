"""The lightning indexer in torch: scores of all positions of one request, and the top-k of each query.

``kernels.paged_indexer`` is built on it: the reference over paged keys gathers a request's keys and calls
``index_topk``, or for few queries its steps, ``index_products`` and ``weigh``.

The order of operations follows the model's published definition (scale after the dot product, ReLU, weighted
sum over heads), so that the selection agrees with other implementations up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import check_at_least, check_tensor
from hisparse_pd.kernels.row_math import matmul_keys, sum_heads
from hisparse_pd.kernels.selection import select_topk

BLOCK_BYTES = 4 << 20
"""Bytes of per-head scores in one block of queries, small enough to stay in a CPU's cache."""


def index_topk(
    q_index: Tensor,
    weights: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    top_k: int,
) -> Tensor:
    """Return the positions that each query of one request attends to.

    ``q_index``: float [num_tokens, num_index_heads, index_head_dim].
    ``weights``: float32 [num_tokens, num_index_heads], the heads' weights with their scale.
    ``keys``: float [seq_len, index_head_dim], keys of positions [0, seq_len), in position order.
    ``query_positions``: integer [num_tokens], each in [0, seq_len); a query sees positions up to its own. All
    are on one device and are not changed. Returns int32 [num_tokens, top_k]: ascending positions, then -1;
    among equal scores the lowest positions are chosen.
    """
    floats = (torch.float32, torch.bfloat16, torch.float16)
    check_tensor("q_index", q_index, dtypes=floats, shape=(None, None, None), contiguous=False)
    num_tokens, num_heads, head_dim = q_index.shape
    device = q_index.device
    check_tensor(
        "weights",
        weights,
        dtypes=(torch.float32,),
        shape=(num_tokens, num_heads),
        device=device,
        contiguous=False,
    )
    check_tensor("keys", keys, dtypes=floats, shape=(None, head_dim), device=device, contiguous=False)
    integers = (torch.int32, torch.int64)
    check_tensor("query_positions", query_positions, dtypes=integers, shape=(num_tokens,), device=device)
    check_at_least("top_k", top_k, 1)
    seq_len = keys.shape[0]
    num_seen = query_positions + 1
    if seq_len <= top_k:  # every position that a query sees is selected, whatever its score
        return select_topk(weights.new_empty((num_tokens, seq_len)), num_seen, top_k)
    selected = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    all_keys = keys.float()
    block = max(1, BLOCK_BYTES // (4 * num_heads * seq_len))
    for start in range(0, num_tokens, block):
        queries = slice(start, start + block)
        scores = index_logits(q_index[queries], weights[queries], all_keys)
        selected[queries] = select_topk(scores, num_seen[queries], top_k)
    return selected


def index_logits(q_index: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return scores, float32 [num_tokens, seq_len].

    ``q_index``: [num_tokens, heads, dim]; ``weights``: [num_tokens, heads]; ``keys``: float32 [seq_len, dim].
    """
    logits = weigh(index_products(q_index, keys), weights, q_index.shape[2])
    # From [blocks, num_tokens, BLOCK_KEYS] to one row for each token, without the zeros after the last key.
    return logits.transpose(0, 1).flatten(1)[:, : len(keys)]


def index_products(q_index: Tensor, keys: Tensor) -> Tensor:
    """Return dot products, float32 [blocks, num_tokens, heads, BLOCK_KEYS]: the keys in blocks, in order,
    with zeros after the last key (``matmul_keys``)."""
    products = matmul_keys(q_index.float().flatten(0, 1), keys)
    return products.view(len(products), *q_index.shape[:2], -1)


def weigh(products: Tensor, weights: Tensor, head_dim: int) -> Tensor:
    """Return scores [..., num_tokens, n]; overwrites ``products``, float32 [..., num_tokens, heads, n]."""
    return sum_heads(weights, products.mul_(head_dim**-0.5).relu_())


def gather_pages(pool: Tensor, page_ids: Tensor, page_size: int, num_tokens: int) -> Tensor:
    """Return the first ``num_tokens`` rows of a request's pages, [num_tokens, dim], copied by whole pages.
    On a CPU the result is a view of ``pool`` where the pages are adjacent in it, as they mostly are.

    ``pool``: [num_slots, dim], one layer; slots after the last whole page are not used. ``page_ids``: integer
    [n], in position order, at least as many as ``num_tokens`` need.
    """
    num_pages = -(-num_tokens // page_size)
    check_at_least("page_ids length", page_ids.shape[0], num_pages)
    page_ids = page_ids[:num_pages]
    if page_ids.device.type == "cpu" and num_pages:
        first, *others = page_ids.tolist()
        if others == list(range(first + 1, first + num_pages)):
            return pool[first * page_size : first * page_size + num_tokens]
    num_whole_pages = pool.shape[0] // page_size
    pages = pool[: num_whole_pages * page_size].view(num_whole_pages, page_size, pool.shape[1])
    return pages.index_select(0, page_ids).view(-1, pool.shape[1])[:num_tokens]
