"""Chooses the implementation of sparse MLA attention by device, KV format and the model's sizes.

``AttentionKernels`` (``hisparse_pd/core/model/attention_kernels.py``) calls it when a node starts; a choice
holds for the node's life. On a GPU, a query's selected slots may be cut into splits, which are computed at
the same time and then combined.
"""

from __future__ import annotations

from typing import Final

import torch

from hisparse_pd.kernels import flashmla
from hisparse_pd.kernels.attention import (
    AUTO,
    BACKEND_NAMES,
    FLASHMLA_KV,
    FLASHMLA_SPARSE,
    TORCH,
    TRITON,
    AttentionBackend,
    AttentionBackendError,
    TorchAttention,
)
from hisparse_pd.kernels.kv_format import BFLOAT16, FP8_E4M3, KvFormat

DECODE_SPLIT_SLOTS: Final = {FLASHMLA_SPARSE: 512, FLASHMLA_KV: 512, TRITON: 256}
"""Slots in one split of a query in decode steps. They do not depend on the batch, so that a request's bits do
not either. Small splits are faster for few requests and slower for many: each costs as much as 200 slots."""


def choose_backend(
    name: str,
    *,
    device: torch.device,
    kv_format: KvFormat,
    num_heads: int,
    top_k: int,
    split_slots: int | None = 0,
) -> AttentionBackend:
    """Return the backend ``name``, or for ``auto`` the best one for this device, format and model.

    On a CPU the best is ``torch``; on a GPU it is FlashMLA where it has a kernel for the format and the
    sizes, else ``triton``, else ``torch``. ``split_slots``: slots in one split of a query; 0: queries are not
    split; None: the value for decode steps. Raises AttentionBackendError when ``name`` cannot work here; its
    message says why, and names the backends that would work.
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
    for candidate in wanted:  # auto always finds one: the last candidate, torch, works everywhere
        obstacle = _obstacle(candidate, device, kv_format, num_heads, top_k)
        if obstacle is None:
            how = f"auto on {device.type}" if name == AUTO else "configured"
            return _create(candidate, kv_format, "; ".join((how, *refusals)), split_slots)
        refusals.append(f"not {candidate}: {obstacle}")

    others = [
        other for other in BACKEND_NAMES if _obstacle(other, device, kv_format, num_heads, top_k) is None
    ]
    raise AttentionBackendError(
        f"attention backend {name}: {_obstacle(name, device, kv_format, num_heads, top_k)}; "
        f"these would work here: {', '.join(others)}"
    )


def choose_prompt_backend(
    name: str, *, device: torch.device, kv_format: KvFormat, num_heads: int, top_k: int
) -> AttentionBackend:
    """Return the backend for prompts, whose queries are not split.

    It is the backend of ``choose_backend``, with one exception: for ``auto`` on fp8 items it is FlashMLA's
    kernel for bfloat16 items, where that takes the sizes. This kernel needs two thirds of the time; its
    ``kv_format``, which is not the pool's, tells the caller to unpack items for it.
    """
    unpacked = KvFormat(BFLOAT16, kv_format.kv_lora_rank, kv_format.rope_dim)
    if (
        name == AUTO
        and kv_format.name == FP8_E4M3
        and _obstacle(FLASHMLA_SPARSE, device, unpacked, num_heads, top_k) is None
    ):
        return _create(FLASHMLA_SPARSE, unpacked, f"auto on {device.type}, over unpacked items", 0)
    return choose_backend(name, device=device, kv_format=kv_format, num_heads=num_heads, top_k=top_k)


def attention_beside(backend: AttentionBackend, taken_sms: int) -> AttentionBackend:
    """Return ``backend`` for calls while other work takes ``taken_sms`` of the GPU's multiprocessors.
    Backends that cannot consider this are returned unchanged."""
    return backend.beside(taken_sms) if isinstance(backend, flashmla.FlashMlaKvAttention) else backend


def _obstacle(name: str, device: torch.device, kv_format: KvFormat, num_heads: int, top_k: int) -> str | None:
    """Return why the backend ``name`` cannot work here; None when it can."""
    if name == TORCH:
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if name == TRITON:
        try:
            from hisparse_pd.kernels import triton_attention
        except ImportError as error:
            return f"triton cannot be imported ({error})"
        return triton_attention.obstacle(device, kv_format)
    return flashmla.obstacle(name, device, kv_format, num_heads, top_k)


def _create(name: str, kv_format: KvFormat, reason: str, split_slots: int | None) -> AttentionBackend:
    if name == TORCH:
        return TorchAttention(kv_format, reason)
    if split_slots is None:
        split_slots = DECODE_SPLIT_SLOTS[name]
    if name == TRITON:
        from hisparse_pd.kernels.triton_attention import TritonAttention

        return TritonAttention(kv_format, reason, split_slots)
    return flashmla.create(name, kv_format, reason, split_slots)
