"""Pools of every layout that the wrappers accept, in poisoned memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.memory.host import CudaPinning
from tests.gpu.support import DEVICE

POISON = 0xA5
"""In every byte that nobody may read or write."""


@dataclass(frozen=True)
class Layout:
    """How the items of a pool lie in memory."""

    is_slot_major: bool = False
    """All layers of a slot side by side, instead of all slots of a layer."""
    gap: int = 0
    """Bytes between items."""
    offset: int = 0
    """Bytes before the first item."""

    def num_bytes(self, num_layers: int, num_slots: int, item_bytes: int) -> int:
        return self.offset + num_layers * num_slots * (item_bytes + self.gap)

    def items(self, flat: Tensor, num_layers: int, num_slots: int, item_bytes: int) -> Tensor:
        """[num_layers, num_slots, item_bytes] of ``flat``, which has one element a byte."""
        rows = flat[self.offset :].view(-1, item_bytes + self.gap)
        if self.is_slot_major:
            return rows.view(num_slots, num_layers, -1).transpose(0, 1)[:, :, :item_bytes]
        return rows.view(num_layers, num_slots, -1)[:, :, :item_bytes]


PLAIN = Layout()


class Pool:
    """Poisoned memory and the items in it."""

    def __init__(self, layout: Layout, shape: tuple[int, int, int], device: str, is_pinned: bool) -> None:
        num_bytes = layout.num_bytes(*shape)
        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self.flat.fill_(POISON)
        self.items = layout.items(self.flat, *shape)
        self.is_item = torch.zeros(num_bytes, dtype=torch.bool)
        layout.items(self.is_item, *shape)[:] = True

    def check_gaps(self) -> None:
        assert (self.flat.cpu()[~self.is_item] == POISON).all(), "bytes between the items changed"


@contextlib.contextmanager
def registered(flat: Tensor) -> Iterator[None]:
    """Let the GPU read ordinary memory, as memory is that was allocated for a transfer."""
    if DEVICE == "cpu":
        yield
        return
    pinning = CudaPinning()
    pinning.register(flat.data_ptr(), flat.numel())
    try:
        yield
    finally:
        pinning.unregister(flat.data_ptr())
