"""A pattern in every free slot of a decode node's pools, verified before the slot is given out again.

A write to a slot that no request holds, perhaps meant for its last holder, changes the pattern. All free
slots are also verified every few seconds. Quarantined slots are not free: late bytes may land there.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hisparse_pd.decode_node.engine
from hisparse_pd.core.paging.extents import extents_to_slots, slice_extents, total_length
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.protocol.messages import Extent, Room

log = logging.getLogger(__name__)

SWEEP_INTERVAL_SECS = 5.0
KINDS = (PoolKind.HOST, PoolKind.DEVICE, PoolKind.INDEX, PoolKind.AUX)
SlotArray = np.ndarray[Any, np.dtype[np.int64]]


class Canaries:
    """Canaries of one decode node, in the pools of ``kinds``.

    The report is a JSON object, written again after each sweep and each finding.
    """

    def __init__(
        self, memory: DecodeMemory, totals: SlotCounts, report: Path, kinds: Sequence[PoolKind]
    ) -> None:
        pools = {
            PoolKind.HOST: memory.k_host,
            PoolKind.DEVICE: memory.k_dev,
            PoolKind.INDEX: memory.index,
            PoolKind.AUX: memory.aux[None],
        }
        self._pools: dict[PoolKind, Tensor] = {kind: pools[kind] for kind in kinds}
        self._patterns = {
            kind: torch.stack(
                [_pattern(layer, totals[kind], pool.shape[2]) for layer in range(len(pool))]
            ).to(pool.device)
            for kind, pool in self._pools.items()
        }
        self._path = report.with_name(f"{report.stem}-{os.getpid()}{report.suffix}")
        self._next_sweep_at = 0.0
        self.counts = {"slots_filled": 0, "slots_checked": 0, "bytes_checked": 0, "sweeps": 0}
        self.findings: list[str] = []
        for kind in self._pools:
            self.fill(kind, np.arange(totals[kind]))
        self.report()

    def fill(self, kind: PoolKind, slots: SlotArray) -> None:
        if kind not in self._pools or not slots.size:
            return
        on_device = torch.from_numpy(slots).to(self._pools[kind].device)
        for items, pattern in zip(self._pools[kind], self._patterns[kind], strict=True):
            items[on_device] = pattern[on_device]
        _wait_for(on_device)
        self.counts["slots_filled"] += slots.size

    def verify(self, kind: PoolKind, slots: SlotArray, when: str) -> None:
        if kind not in self._pools or not slots.size:
            return
        on_device = torch.from_numpy(slots).to(self._pools[kind].device)
        _wait_for(on_device)
        for layer, (items, pattern) in enumerate(zip(self._pools[kind], self._patterns[kind], strict=True)):
            differs = (items[on_device] != pattern[on_device]).any(dim=1).cpu().numpy()
            self.counts["bytes_checked"] += slots.size * items.shape[1]
            if differs.any():
                self.findings.append(f"{when}: {kind} slots {slots[differs].tolist()[:20]} of layer {layer}")
                log.error("canary dead, %s", self.findings[-1])
                self.fill(kind, slots[differs])
                self.report()
        self.counts["slots_checked"] += slots.size

    def sweep(self, free: Mapping[PoolKind, SlotArray]) -> None:
        for kind, slots in free.items():
            self.verify(kind, slots, "while free")
        self.counts["sweeps"] += 1
        self.report()

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_sweep_at:
            return False
        self._next_sweep_at = now + SWEEP_INTERVAL_SECS
        return True

    def report(self) -> None:
        """Replace the report as a whole, since this process may be killed while it writes."""
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps({**self.counts, "findings": self.findings}))
        draft.replace(self._path)


class CanaryPools(Pools):
    """Pools that tell the canaries which slots are given out and freed; integrity checks start the sweeps."""

    canaries: Canaries | None = None

    def reserve(self, room: Room, need: SlotCounts, stage: Stage = Stage.LANDING) -> Holding:
        holding = super().reserve(room, need, stage)
        for kind, extents in holding.extents.items():
            self._verify(kind, extents_to_slots(extents), f"given to room {room}")
        return holding

    def grow(self, holding: Holding, kind: PoolKind, num_slots: int) -> None:
        before = extents_to_slots(holding[kind])
        super().grow(holding, kind, num_slots)
        new = np.setdiff1d(extents_to_slots(holding[kind]), before)
        self._verify(kind, new, f"added to room {holding.room}")

    def give_up(self, holding: Holding, kinds: Iterable[PoolKind]) -> None:
        freed: dict[PoolKind, tuple[Extent, ...]] = {kind: holding[kind] for kind in kinds}
        super().give_up(holding, tuple(freed))
        self._fill(freed)

    def trim(self, holding: Holding, num_slots: int) -> None:
        freed = {
            kind: slice_extents(extents, num_slots, total_length(extents))
            for kind, extents in holding.extents.items()
        }
        super().trim(holding, num_slots)
        self._fill(freed)

    def check_integrity(self, expected: Mapping[Stage, int] | None = None) -> None:
        super().check_integrity(expected)
        if self.canaries is not None and self.canaries.is_due():
            self.canaries.sweep({kind: free_slots(self, kind) for kind in PoolKind})

    def _fill(self, freed: Mapping[PoolKind, tuple[Extent, ...]]) -> None:
        if self.canaries is not None:
            for kind, extents in freed.items():
                self.canaries.fill(kind, extents_to_slots(extents))

    def _verify(self, kind: PoolKind, slots: SlotArray, when: str) -> None:
        if self.canaries is not None:
            self.canaries.verify(kind, slots, when)


def free_slots(pools: Pools, kind: PoolKind) -> SlotArray:
    """Return the slots that nobody holds."""
    is_free = np.ones(pools.totals[kind], np.bool_)
    for holding in pools.holdings:
        is_free[extents_to_slots(holding[kind])] = False
    return np.flatnonzero(is_free)


def keep_canaries(report: Path, kinds: Sequence[PoolKind] = KINDS) -> None:
    """Give canaries to every ``DecodeEngine`` that this process makes from now on."""
    pools: list[CanaryPools] = []

    def make_pools(totals: SlotCounts, page_size: int) -> CanaryPools:
        pools.append(CanaryPools(totals, page_size))
        return pools[-1]

    def make_memory(
        spec: Any, totals: SlotCounts, page_size: int, device: Any, **options: Any
    ) -> DecodeMemory:
        memory = DecodeMemory(spec, totals, page_size, device, **options)
        pools[-1].canaries = Canaries(memory, totals, report, kinds)
        return memory

    names: Any = hisparse_pd.decode_node.engine
    names.Pools, names.DecodeMemory = make_pools, make_memory


def _wait_for(slots: Tensor) -> None:
    """Wait until all streams of the device of ``slots`` are idle."""
    if slots.device.type == "cuda":
        torch.cuda.synchronize(slots.device)


def _pattern(layer: int, num_slots: int, num_bytes: int) -> Tensor:
    """A pattern of uint8 [num_slots, num_bytes], which varies by slot and layer."""
    seeds = (torch.arange(num_slots) * 7919 + layer * 104_729 + 17) % 65_521
    return ((seeds[:, None] * 31 + torch.arange(num_bytes) * 97) >> 2).to(torch.uint8)
