"""The copies of one swap-in: what a group's first layer found missing, for those that share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MissPlan:
    """The copies of one swap-in, recorded by a group's first layer and replayed by its shared layers.

    A missing position that got an entry is there once, however often it was selected; one that got none is
    not there. The order is not specified.
    """

    src_host_slots: Tensor
    """int64 [max_misses]"""
    dst_device_slots: Tensor
    """int64 [max_misses]"""
    req_rows: Tensor
    """int32 [max_misses]: whose item it is, and so ``positions``: by these it is verified."""
    positions: Tensor
    num_misses: Tensor
    """int32 [1]; entries from this index on are undefined."""

    @classmethod
    def create(cls, max_reqs: int, top_k: int, device: torch.device | str = "cpu") -> MissPlan:
        """Room for the misses of ``max_reqs`` requests that select ``top_k`` positions each; of several new
        positions a request each counts as one.
        """
        max_misses = max_reqs * top_k
        return cls(
            src_host_slots=torch.zeros(max_misses, dtype=torch.int64, device=device),
            dst_device_slots=torch.zeros(max_misses, dtype=torch.int64, device=device),
            req_rows=torch.zeros(max_misses, dtype=torch.int32, device=device),
            positions=torch.zeros(max_misses, dtype=torch.int32, device=device),
            num_misses=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @property
    def max_misses(self) -> int:
        return self.src_host_slots.shape[0]
