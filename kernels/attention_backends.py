"""Which implementation of sparse MLA attention a node runs on: by device, KV format and the model's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import flashmla
from kernels.attention import (
    AUTO,
    BACKEND_NAMES,
    FLASHMLA_SPARSE,
    TORCH,
    TRITON,
    AttentionBackend,
    AttentionBackendError,
    TorchAttention,
)
from kernels.kv_format import KvFormat


def choose_backend(
    name: str, *, device: torch.device, kv_format: KvFormat, num_heads: int, top_k: int
) -> AttentionBackend:
    """The backend ``name``, or with ``auto`` the best that works for this device, format and model.

    On a CPU that is ``torch``; on a GPU FlashMLA where it has a kernel for the format and the sizes, else
    ``triton``, else ``torch``. Raises AttentionBackendError when ``name`` cannot work here; the message says
    why, and names those that would.
    """
    if name != AUTO and name not in BACKEND_NAMES:
        raise AttentionBackendError(
            f"attention backend: expected {AUTO} or one of {', '.join(BACKEND_NAMES)}, got {name!r}"
        )
    device = torch.device(device)
    wanted: tuple[str, ...] = (name,)
    if name == AUTO:
        wanted = BACKEND_NAMES if device.type == "cuda" else (TORCH,)
    refusals: list[str] = []
    for candidate in wanted:
        obstacle = _obstacle(candidate, device, kv_format, num_heads, top_k)
        if obstacle is None:
            how = f"auto on {device.type}" if name == AUTO else "configured"
            chosen = _create(candidate, device, kv_format, "; ".join((how, *refusals)))
            if name != AUTO or candidate != FLASHMLA_SPARSE:
                return chosen
            if _obstacle(TRITON, device, kv_format, num_heads, top_k) is not None:
                return chosen
            return SmallBatchAttention(_create(TRITON, device, kv_format, ""), chosen)
        refusals.append(f"not {candidate}: {obstacle}")
    others = [
        other for other in BACKEND_NAMES if _obstacle(other, device, kv_format, num_heads, top_k) is None
    ]
    raise AttentionBackendError(
        f"attention backend {name}: {_obstacle(name, device, kv_format, num_heads, top_k)}; "
        f"these would work here: {', '.join(others)}"
    )


def attention_beside(backend: AttentionBackend, taken_sms: int) -> AttentionBackend:
    """``backend`` for calls while so many of the GPU's multiprocessors are taken, if it can mind that."""
    return backend.beside(taken_sms) if isinstance(backend, flashmla.FlashMlaKvAttention) else backend


MAX_SMALL_BATCH: Final = 8
"""Tokens up to which splitting a query over programs beats FlashMLA's one program a query and 64 heads."""


@dataclass(frozen=True)
class SmallBatchAttention:
    """Two backends of one format: ``small`` for up to MAX_SMALL_BATCH tokens, ``large`` for more."""

    small: AttentionBackend
    large: AttentionBackend

    @property
    def name(self) -> str:
        """Of the one that prefill and full batches run on."""
        return self.large.name

    @property
    def reason(self) -> str:
        return f"{self.large.reason}; {self.small.name} for up to {MAX_SMALL_BATCH} tokens"

    def attend(self, q: Tensor, layer_pool: Tensor, device_slots: Tensor, scale: float) -> Tensor:
        """See ``AttentionBackend.attend``."""
        backend = self.small if q.shape[0] <= MAX_SMALL_BATCH else self.large
        return backend.attend(q, layer_pool, device_slots, scale)


def _obstacle(name: str, device: torch.device, kv_format: KvFormat, num_heads: int, top_k: int) -> str | None:
    """Why the backend ``name`` cannot work here; None when it can."""
    if name == TORCH:
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if name == TRITON:
        try:
            from kernels import triton_attention
        except ImportError as error:
            return f"triton cannot be imported ({error})"
        return triton_attention.obstacle(device, kv_format)
    return flashmla.obstacle(name, device, kv_format, num_heads, top_k)


def _create(name: str, device: torch.device, kv_format: KvFormat, reason: str) -> AttentionBackend:
    if name == TORCH:
        return TorchAttention(kv_format, reason)
    if name == TRITON:
        from kernels.triton_attention import TritonAttention

        return TritonAttention(kv_format, reason)
    return flashmla.create(name, kv_format, reason)
