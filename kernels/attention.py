"""Sparse MLA attention over token slots: every query reads its own list of rows of one layer of a pool.

This module has the interface, ``AttentionBackend``, and the reference in torch. ``attention_backends``
chooses between the reference, our Triton kernels and FlashMLA's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.kernels.checks import check_tensor
from hisparse_pd.kernels.kv_format import FP8_E4M3, KvFormat
from hisparse_pd.kernels.row_math import matmul_tokens

_CPU_BLOCK_BYTES: Final = 8 << 20
"""Bytes of gathered rows in one block of queries on a CPU, small enough to stay in its cache."""
_GPU_BLOCK_BYTES: Final = 256 << 20
"""Bytes of gathered rows in one block of queries on a GPU, large enough to fill it."""

AUTO: Final = "auto"
TORCH: Final = "torch"
TRITON: Final = "triton"
FLASHMLA_SPARSE: Final = "flashmla_sparse"
FLASHMLA_KV: Final = "flashmla_kv"
BACKEND_NAMES: Final = (FLASHMLA_SPARSE, FLASHMLA_KV, TRITON, TORCH)
"""All backends, in the order in which ``auto`` tries them on a GPU."""


class AttentionBackendError(StartError):
    """The requested attention backend cannot work here."""


class AttentionBackend(Protocol):
    """Sparse MLA attention for one KV format on one device.

    ``attend`` never synchronises with the device, so a CUDA graph can capture it. One call must come before
    the capture; it compiles kernels and allocates buffers that later calls reuse.
    """

    @property
    def name(self) -> str:
        """One of ``BACKEND_NAMES``."""

    @property
    def kv_format(self) -> KvFormat:
        """The format of the items that it reads."""

    @property
    def reason(self) -> str:
        """Why this backend was chosen, for a log."""

    def attend(
        self,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        num_columns: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of absorbed MLA queries over the selected items of one layer.

        ``q``: float32 or bfloat16 [num_tokens, num_heads, item_dim]; the latent part first, then RoPE.
        ``layer_pool``: uint8 [num_slots, item_bytes], one layer of a pool, contiguous.
        ``device_slots``: int32 [num_tokens, top_k], rows of ``layer_pool``; -1 in any column is masked out.
        ``num_columns``: int32 [num_tokens]; if given, the columns from this one on are all -1, which some
        backends need not look at. No bit depends on whether it is given.
        No argument is changed. Returns [num_tokens, num_heads, kv_lora_rank] of ``q``'s dtype:
        softmax(q·item * scale) over each query's items, times their latents; zeros where nothing is selected.
        """


@dataclass(frozen=True)
class TorchAttention:
    """The reference, made of torch operations, for any device."""

    kv_format: KvFormat
    reason: str = ""
    name: str = TORCH

    def attend(
        self,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        num_columns: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        check_attend(self.kv_format, q, layer_pool, device_slots)
        kv_format, kv_lora_rank = self.kv_format, self.kv_format.kv_lora_rank
        num_tokens, num_heads, item_dim = q.shape
        top_k = device_slots.shape[1]
        out = q.new_zeros((num_tokens, num_heads, kv_lora_rank))
        if num_tokens == 0 or top_k == 0:
            return out
        # fp8 items are scaled as they are gathered; other items are read in place.
        kv = None if kv_format.name == FP8_E4M3 else kv_format.load(layer_pool)
        on_cpu = q.device.type == "cpu"
        block = max(1, (_CPU_BLOCK_BYTES if on_cpu else _GPU_BLOCK_BYTES) // (4 * top_k * item_dim))
        for start in range(0, num_tokens, block):
            stop = min(start + block, num_tokens)
            slots = device_slots[start:stop]
            known = slots.clamp(min=0).long()  # an absent row is read at slot 0, and masked below
            rows = kv_format.load(layer_pool[known]) if kv is None else kv[known].float()
            scores = matmul_tokens(q[start:stop].float(), rows.transpose(1, 2)).mul_(scale)
            is_absent = slots < 0
            # On a GPU, any() would make the caller wait.
            if not on_cpu or is_absent.any():
                # An absent row may hold anything, NaN included, and 0 * NaN is NaN.
                rows.masked_fill_(is_absent[:, :, None], 0.0)
                scores.masked_fill_(is_absent[:, None, :], float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            weights.masked_fill_(is_absent.all(dim=1)[:, None, None], 0.0)
            out[start:stop] = matmul_tokens(weights, rows[:, :, :kv_lora_rank])
        return out


def check_attend(kv_format: KvFormat, q: Tensor, layer_pool: Tensor, device_slots: Tensor) -> None:
    """Raise KernelArgumentError unless these are valid arguments of ``AttentionBackend.attend``."""
    shape: tuple[int | None, ...] = (None, None, kv_format.item_dim)
    check_tensor("q", q, dtypes=(torch.float32, torch.bfloat16), shape=shape, contiguous=False)
    shape = (None, kv_format.item_bytes)
    check_tensor("layer_pool", layer_pool, dtypes=(torch.uint8,), shape=shape, device=q.device)
    # Callers on a CPU have int64 slots, which the reference takes too.
    dtypes = (torch.int32, torch.int64) if q.device.type == "cpu" else (torch.int32,)
    check_tensor("device_slots", device_slots, dtypes=dtypes, shape=(q.shape[0], None), device=q.device)
