"""Write plans: from token slots on both sides to byte ranges, as few as possible. Pure functions over numpy.

Two steps, because the first is the same for every layer: ``plan_writes`` coalesces the tokens to runs that
are contiguous in the source and in the destination pool; ``descriptors`` turns the runs into addresses for
a number of layers and refuses whatever lies outside the registered memory. ``take_layers`` then is a slice,
so that layers can be written one by one at no further cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from transfer.extents import SlotArray, as_slots


class PlanError(ValueError):
    """A plan that does not fit the memory: lengths differ, or a slot, layer or item lies out of bounds."""


@dataclass(frozen=True)
class RunPlan:
    """Runs of token slots, int64 [num_runs] each: ``length`` slots from ``src_start`` go to ``dst_start``."""

    src_start: SlotArray
    dst_start: SlotArray
    length: SlotArray

    @property
    def num_runs(self) -> int:
        return int(self.length.size)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True)
class RegionView:
    """Memory of ``num_bytes`` bytes at ``base_addr`` read as ``[num_layers][num_slots][item_bytes]``."""

    base_addr: int
    num_bytes: int
    num_layers: int
    num_slots: int
    item_bytes: int

    def __post_init__(self) -> None:
        if min(self.base_addr, self.num_layers, self.num_slots, self.item_bytes) < 1:
            raise PlanError(f"{self}: every field must be positive")
        num_bytes = self.num_layers * self.num_slots * self.item_bytes
        if num_bytes > self.num_bytes:
            raise PlanError(
                f"{self.num_layers} layers of {self.num_slots} slots of {self.item_bytes} bytes are "
                f"{num_bytes} bytes, the region at {self.base_addr:#x} has {self.num_bytes}"
            )

    @property
    def layer_bytes(self) -> int:
        return self.num_slots * self.item_bytes


class Descriptors(NamedTuple):
    """Byte ranges to write, int64 [num_descriptors] each: ``lengths[i]`` bytes from ``src_addrs[i]``."""

    src_addrs: SlotArray
    dst_addrs: SlotArray
    lengths: SlotArray

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


def plan_writes(src_slots: ArrayLike, dst_slots: ArrayLike) -> RunPlan:
    """Runs that copy ``src_slots[i]`` to ``dst_slots[i]`` for every i, contiguous on both sides.

    Both: integers [num_tokens]; the destination slots are distinct. Raises PlanError when the numbers of
    tokens differ.
    """
    src, dst = as_slots(src_slots), as_slots(dst_slots)
    if src.size != dst.size:
        raise PlanError(f"{src.size} source slots for {dst.size} destination slots")
    if src.size == 0:
        return RunPlan(src, dst, np.empty(0, np.int64))
    is_first = np.empty(src.size, np.bool_)
    is_first[0] = True
    np.not_equal(src[1:] - src[:-1], 1, out=is_first[1:])
    is_first[1:] |= dst[1:] - dst[:-1] != 1
    first = np.flatnonzero(is_first)
    length = np.empty_like(first)
    np.subtract(first[1:], first[:-1], out=length[:-1])
    length[-1] = src.size - first[-1]
    return RunPlan(src[first], dst[first], length)


def descriptors(runs: RunPlan, src: RegionView, dst: RegionView, layers: Sequence[int]) -> Descriptors:
    """Addresses of ``runs`` in each of ``layers``, layer after layer: ``len(layers) * num_runs`` of them.

    A layer has the same number on both sides. Raises PlanError, before anything could be sent, for an item
    size that differs and for a slot or layer outside either region.
    """
    if src.item_bytes != dst.item_bytes:
        raise PlanError(f"source items have {src.item_bytes} bytes, destination items {dst.item_bytes}")
    layer_array = as_slots(layers)
    for side, region, starts in (("source", src, runs.src_start), ("destination", dst, runs.dst_start)):
        _check_bounds(side, region, starts, runs.length, layer_array)
    return Descriptors(
        _addresses(src, runs.src_start, layer_array),
        _addresses(dst, runs.dst_start, layer_array),
        np.tile(runs.length * src.item_bytes, layer_array.size),
    )


def take_layers(writes: Descriptors, num_layers: int, first: int, stop: int) -> Descriptors:
    """Those of ``writes`` that are in the layers ``[first, stop)``, as views.

    ``writes``: what ``descriptors`` made for ``num_layers`` layers. Raises PlanError for layers outside them.
    """
    if not 0 <= first <= stop <= num_layers:
        raise PlanError(f"layers [{first}, {stop}) are not a range in [0, {num_layers})")
    num_runs = writes.lengths.size // num_layers
    return Descriptors(*(column[first * num_runs : stop * num_runs] for column in writes))


def join_descriptors(parts: Sequence[Descriptors]) -> Descriptors:
    """All ``parts`` (KV and indexer keys of one chunk, say) as one batch, in order."""
    if not parts:
        return Descriptors(*(np.empty(0, np.int64) for _ in range(3)))
    return Descriptors(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _check_bounds(
    side: str, region: RegionView, starts: SlotArray, lengths: SlotArray, layers: SlotArray
) -> None:
    if layers.size and not 0 <= layers.min() <= layers.max() < region.num_layers:
        raise PlanError(f"{side} layers {layers.tolist()} are not all in [0, {region.num_layers})")
    if starts.size == 0:
        return
    # numpy wraps around silently, so starts are bounded before an end is computed from them
    if starts.min() < 0 or starts.max() >= region.num_slots or lengths.min() < 1:
        raise PlanError(
            f"{side} runs start in [{starts.min()}, {starts.max()}] with lengths from {lengths.min()}; "
            f"the region at {region.base_addr:#x} has the slots [0, {region.num_slots})"
        )
    if lengths.max() > region.num_slots or (starts + lengths).max() > region.num_slots:
        raise PlanError(
            f"a {side} run ends past slot {region.num_slots}, the end of the region at {region.base_addr:#x}"
        )


def _addresses(region: RegionView, starts: SlotArray, layers: SlotArray) -> SlotArray:
    of_layer = region.base_addr + layers * region.layer_bytes
    return (of_layer[:, None] + starts * region.item_bytes).reshape(-1)
