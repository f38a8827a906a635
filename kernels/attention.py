"""Sparse MLA attention over token slots: every query reads its own list of rows of one layer of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_range, check_tensor

_BLOCK_BYTES = 8 << 20
"""Gathered rows that one block of queries holds at a time: small enough to stay in a CPU's cache."""


def sparse_mla_attention(
    q: Tensor, kv: Tensor, device_slots: Tensor, kv_lora_rank: int, scale: float
) -> Tensor:
    """Attention of absorbed MLA queries over the selected rows of the latent KV.

    ``q``: float [num_tokens, num_heads, item_dim]; the latent part first, then the RoPE part.
    ``kv``: float [num_slots, item_dim], one layer of a pool; only selected rows are read.
    ``device_slots``: int32 or int64 [num_tokens, top_k], rows of ``kv``; -1 is masked out.
    Returns [num_tokens, num_heads, kv_lora_rank] of ``q``'s dtype, accumulated in float32: softmax(q·kv *
    scale) over each query's rows, times their first ``kv_lora_rank`` columns; zeros where nothing is
    selected.
    """
    floats = (torch.float32, torch.bfloat16, torch.float16)
    check_tensor("q", q, dtypes=floats, shape=(None, None, None), contiguous=False)
    num_tokens, num_heads, item_dim = q.shape
    check_tensor("kv", kv, dtypes=floats, shape=(None, item_dim), device=q.device, contiguous=False)
    integers = (torch.int32, torch.int64)
    check_tensor("device_slots", device_slots, dtypes=integers, shape=(num_tokens, None), device=q.device)
    check_range("kv_lora_rank", kv_lora_rank, 1, item_dim + 1)
    top_k = device_slots.shape[1]
    out = q.new_zeros((num_tokens, num_heads, kv_lora_rank))
    if num_tokens == 0 or top_k == 0:
        return out
    block = max(1, _BLOCK_BYTES // (4 * top_k * item_dim))
    for start in range(0, num_tokens, block):
        stop = min(start + block, num_tokens)
        slots = device_slots[start:stop]
        rows = kv[slots.clamp(min=0).long()].float()
        scores = torch.matmul(q[start:stop].float(), rows.transpose(1, 2)).mul_(scale)
        is_absent = slots < 0
        if is_absent.any():
            # An absent row may hold anything, NaN included, and 0 * NaN is NaN.
            rows.masked_fill_(is_absent[:, :, None], 0.0)
            scores.masked_fill_(is_absent[:, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        weights.masked_fill_(is_absent.all(dim=1)[:, None, None], 0.0)
        out[start:stop] = torch.matmul(weights, rows[:, :, :kv_lora_rank])
    return out
