"""The record of one swap-in's copies, with which the index group's other layers make the same copies.

All layers of an index group attend to what its first layer selects, and so miss the same positions.
``swap_in`` and ``plan_misses`` fill a plan, and ``replay_misses`` reads it. The decode node makes their plans
once, before it captures CUDA graphs. Copies of whole pages have plans that the host makes (``of_slots``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class MissPlan:
    """The copies of one swap-in, recorded by an index group's first layer and replayed by its others.

    A missing position that got an entry appears once, however often it was selected; one that got none does
    not appear. The order is not specified.
    """

    src_host_slots: Tensor
    """int64 [max_misses]"""
    dst_device_slots: Tensor
    """int64 [max_misses]"""
    req_rows: Tensor
    """int32 [max_misses]: each item's row of the tables, for the row check."""
    positions: Tensor
    """int32 [max_misses]: each item's position, for the row check."""
    num_misses: Tensor
    """int32 [1]; entries from this index on are undefined."""

    @classmethod
    def create(cls, max_reqs: int, top_k: int, device: torch.device | str = "cpu") -> MissPlan:
        """Return a plan with room for the misses of ``max_reqs`` requests that select ``top_k`` positions
        each; each new position counts as one request.
        """
        max_misses = max_reqs * top_k
        return cls(
            src_host_slots=torch.zeros(max_misses, dtype=torch.int64, device=device),
            dst_device_slots=torch.zeros(max_misses, dtype=torch.int64, device=device),
            req_rows=torch.zeros(max_misses, dtype=torch.int32, device=device),
            positions=torch.zeros(max_misses, dtype=torch.int32, device=device),
            num_misses=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @classmethod
    def of_slots(
        cls,
        host_slots: npt.NDArray[np.int64],
        device_slots: npt.NDArray[np.int64],
        device: torch.device,
        *,
        first_position: int = 0,
        req_row: int = 0,
    ) -> MissPlan:
        """Return a plan of copies between as many slots of both pools, on ``device``; nothing waits for it.
        The items are those of adjacent positions of ``req_row`` from ``first_position`` on."""
        num, is_pinned = len(host_slots), device.type == "cuda"
        slots = torch.empty((2, num), dtype=torch.int64, pin_memory=is_pinned)
        words = torch.empty(2 * num + 1, dtype=torch.int32, pin_memory=is_pinned)
        slots.numpy()[:] = host_slots, device_slots
        rows, positions, num_copies = np.split(words.numpy(), (num, 2 * num))
        rows[:], positions[:], num_copies[:] = req_row, np.arange(first_position, first_position + num), num
        # torch keeps pinned memory alive until the copy from it is done.
        slots, words = slots.to(device, non_blocking=True), words.to(device, non_blocking=True)
        return cls(slots[0], slots[1], words[:num], words[num : 2 * num], words[2 * num :])

    @property
    def max_misses(self) -> int:
        return self.src_host_slots.shape[0]
