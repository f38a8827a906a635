"""The lightning indexer: scores of all positions of one request, and the top-k of each query.

The order of the arithmetic follows the model's published definition (scale after the dot product, ReLU,
weighted sum over heads), so that the selection agrees with other implementations to the last rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_at_least, check_tensor

ABSENT = -1

_BLOCK_BYTES = 4 << 20
"""Per-head scores that one block of queries holds at a time: small enough to stay in a CPU's cache."""


def index_topk(
    q_index: Tensor,
    weights: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    top_k: int,
) -> Tensor:
    """Positions that each query of one request attends to.

    ``q_index``: float [num_tokens, num_index_heads, index_head_dim].
    ``weights``: float32 [num_tokens, num_index_heads], the heads' weights with their scale.
    ``keys``: float [seq_len, index_head_dim], keys of positions [0, seq_len), in position order.
    ``query_positions``: integer [num_tokens], each in [0, seq_len); a query sees positions up to its own.
    Returns int32 [num_tokens, top_k], in no particular order within a row, padded with -1 at the end.
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
    if seq_len <= top_k:
        return _all_positions(query_positions, seq_len, top_k)
    selected = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    all_keys = keys.float().t()
    scale = head_dim**-0.5
    key_positions = torch.arange(seq_len, device=device)
    block = max(1, _BLOCK_BYTES // (4 * num_heads * seq_len))
    for start in range(0, num_tokens, block):
        stop = min(start + block, num_tokens)
        per_head = torch.matmul(q_index[start:stop].float(), all_keys).mul_(scale).relu_()
        scores = torch.matmul(weights[start:stop, None, :], per_head).squeeze(1)
        # Every query of the block sees the keys before the first of them.
        first = int(query_positions[start:stop].min())
        is_future = key_positions[first:] > query_positions[start:stop, None]
        scores[:, first:].masked_fill_(is_future, float("-inf"))
        best = scores.topk(top_k, dim=-1)
        selected[start:stop] = best.indices.masked_fill_(best.values == float("-inf"), ABSENT)
    return selected


def gather_pages(pool: Tensor, page_ids: Tensor, page_size: int, num_tokens: int) -> Tensor:
    """The first ``num_tokens`` rows of a request's pages, [num_tokens, dim], copied whole pages at a time.

    ``pool``: [num_slots, dim] of one layer, num_slots a multiple of ``page_size``; ``page_ids``: integer
    [>= num_tokens / page_size], in position order.
    """
    num_pages = -(-num_tokens // page_size)
    check_at_least("page_ids length", page_ids.shape[0], num_pages)
    num_whole_pages = pool.shape[0] // page_size
    pages = pool[: num_whole_pages * page_size].view(num_whole_pages, page_size, pool.shape[1])
    return pages.index_select(0, page_ids[:num_pages]).view(-1, pool.shape[1])[:num_tokens]


def _all_positions(query_positions: Tensor, seq_len: int, top_k: int) -> Tensor:
    """The selection when everything fits: each query's own position and all before it."""
    positions = torch.arange(top_k, dtype=torch.int32, device=query_positions.device)
    is_seen = positions <= query_positions[:, None]
    return torch.where(is_seen, positions, ABSENT)
