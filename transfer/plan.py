"""Plans writes: turns token slots on both sides into as few byte ranges as possible, as arrays of numpy.

``prefill_node/push.py`` plans each chunk with it, in three stages. ``prefill_node/decode_tier.py`` plans
reads as writes whose source is the decode node's memory. ``plan_writes`` joins slots into runs that are
contiguous in both pools, the same for every layer. ``descriptors`` turns the runs into addresses for some
layers and refuses slots outside the registered memory. ``SlicedWrites`` does that slice by slice as the
sender's threads write.

For example, the slots 8, 9, 10, 3 that go to 100, 101, 102, 103 are two runs: three slots from 8 to 100, and
one from 3 to 103. In 61 layers these are 122 byte ranges (descriptors) that cost 2 MiB together, of the 32
MiB that a slice may cost: one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hisparse_pd.core.paging.extents import SlotArray, SlotRanges, as_slots
from hisparse_pd.transfer.errors import TransferError

MAX_DESCRIPTOR_BYTES: Final = 4 << 20
"""Longest byte range; longer ones are cut, because Mooncake spreads descriptors, not bytes, over its
connections to a peer. Much shorter pieces are slower: with 512 KiB, a machine whose cores are busy gets 0.87
of the rate."""

SLICE_BYTES: Final = 32 << 20
"""Limit for the cost of one slice, and of a room's turn (``send_queue.py``), during which other rooms wait:
67 ms at 0.5 GB/s. Smaller slices would slow down a fast link: each ends with a wait for its last byte."""

DESCRIPTOR_COST_BYTES: Final = 16 << 10
"""Lowest cost of a byte range; that of a longer one is its bytes. TCP takes 35 us for any range, in which it
could move this many bytes."""

LONG_BYTES: Final = 128 << 10
"""Shortest range that a GPU's copy engine copies, each by a call, which costs 3 us; the engine moves as many
bytes in that time."""
MOST_LONG: Final = 512
"""Most ranges that a GPU's copy engine copies in one copy; where more are long, the kernel copies all. The
loop of an engine waits for the calls: these take it 1.5 ms and more."""
PIECE_BYTES: Final = 16 << 10
"""Bytes that a warp of the kernel for short ranges copies at a time."""

_BLOCK_DESCRIPTORS: Final = SLICE_BYTES // DESCRIPTOR_COST_BYTES
"""Most descriptors that are made at a time: as many as fit in one slice."""


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

    def part(self, first: int, stop: int) -> RunPlan:
        """Return the runs ``[first, stop)``, as views."""
        return RunPlan(self.src_start[first:stop], self.dst_start[first:stop], self.length[first:stop])


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

    def at(self, which: slice | NDArray[np.bool_]) -> Descriptors:
        """Return the selected descriptors."""
        return Descriptors(self.src_addrs[which], self.dst_addrs[which], self.lengths[which])


Writes: TypeAlias = tuple[ArrayLike, ArrayLike, ArrayLike]
"""The columns of ``Descriptors`` as a transport takes them: integers of any kind."""

Reads: TypeAlias = Writes
"""The same columns where the sources are the peer's and the destinations this process's."""


def plan_writes(src: SlotRanges, dst: SlotRanges) -> RunPlan:
    """Return runs, contiguous on both sides, that copy the i-th slot of ``src`` to the i-th of ``dst`` for
    every i.

    The destination slots are distinct. Raises PlanError when the numbers of slots differ.
    """
    src_ends, dst_ends = np.cumsum(src.lengths), np.cumsum(dst.lengths)
    num_src, num_dst = (int(ends[-1]) if ends.size else 0 for ends in (src_ends, dst_ends))
    if num_src != num_dst:
        raise PlanError(f"{num_src} source slots for {num_dst} destination slots")
    if num_src == 0:
        nothing = np.empty(0, np.int64)
        return RunPlan(nothing, nothing, nothing)

    # Pieces end where a range ends on either side; neighbours that continue on both sides are one run.
    ends = np.sort(np.concatenate(([0], src_ends, dst_ends)))
    stop = ends[1:][ends[1:] != ends[:-1]]
    start = np.concatenate(([0], stop[:-1]))
    src_start, dst_start = _slots_at(start, src, src_ends), _slots_at(start, dst, dst_ends)
    is_first = np.ones(start.size, np.bool_)  # of its run
    is_first[1:] = np.diff(src_start) != np.diff(start)
    is_first[1:] |= np.diff(dst_start) != np.diff(start)
    first = np.flatnonzero(is_first)
    return RunPlan(src_start[first], dst_start[first], np.add.reduceat(stop - start, first))


def _slots_at(positions: SlotArray, ranges: SlotRanges, ends: SlotArray) -> SlotArray:
    """Return the slots at ``positions``, int64 [n]. ``ends``: position behind each range, int64
    [num_ranges]."""
    which = np.searchsorted(ends, positions, side="right")
    return ranges.starts[which] + positions - (ends - ranges.lengths)[which]


def descriptors(runs: RunPlan, src: RegionView, dst: RegionView, layers: Sequence[int]) -> Descriptors:
    """Return ``len(layers) * num_runs`` descriptors: ``runs`` in each of ``layers``, layer after layer.

    Raises PlanError for item sizes that differ and for a slot or layer outside either region.
    """
    layer_array = as_slots(layers)
    _check(runs, src, dst, layer_array)
    return Descriptors(
        _addresses(src, runs.src_start, layer_array),
        _addresses(dst, runs.dst_start, layer_array),
        np.tile(runs.length * src.item_bytes, layer_array.size),
    )


def join_descriptors(parts: Sequence[Descriptors]) -> Descriptors:
    """Join ``parts``, such as the KV and the indexer keys of one chunk, in order."""
    if not parts:
        return Descriptors(*(np.empty(0, np.int64) for _ in range(3)))
    return Descriptors(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class LayerWrites:
    """``runs`` in the layers ``[first, stop)`` of both regions, before any address is computed."""

    runs: RunPlan
    src: RegionView
    dst: RegionView
    first: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.first) * self.runs.num_tokens * self.src.item_bytes

    def check(self) -> None:
        """Raise PlanError if ``descriptors`` would for any of the layers."""
        _check(self.runs, self.src, self.dst, np.arange(self.first, self.stop))

    def of_layers(self, first: int, stop: int) -> LayerWrites:
        """Return the same writes in other layers."""
        return replace(self, first=first, stop=stop)

    def blocks(self) -> Iterator[Descriptors]:
        """Yield the descriptors, layer after layer, in blocks that are made on demand."""
        num_runs = self.runs.num_runs
        num_layers = max(1, _BLOCK_DESCRIPTORS // max(1, num_runs))
        for first in range(self.first, self.stop, num_layers):
            layers = range(first, min(first + num_layers, self.stop))
            for run in range(0, num_runs, _BLOCK_DESCRIPTORS):
                runs = self.runs.part(run, run + _BLOCK_DESCRIPTORS)
                yield descriptors(runs, self.src, self.dst, layers)


@dataclass(frozen=True)
class SlicedWrites:
    """Writes to carry out in slices. Each iteration makes the slices anew, one by one."""

    parts: Sequence[LayerWrites]
    slice_bytes: int = SLICE_BYTES

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def __iter__(self) -> Iterator[Descriptors]:
        return slices(chain.from_iterable(part.blocks() for part in self.parts), self.slice_bytes)


def cost(writes: Descriptors) -> int:
    """Return the cost of a slice: the bytes that the transport could move in the time that it takes."""
    return int(np.maximum(writes.lengths, DESCRIPTOR_COST_BYTES).sum())


def slices(blocks: Iterable[Descriptors], max_cost: int) -> Iterator[Descriptors]:
    """Yield the ranges of ``blocks`` in order, in slices that cost at most ``max_cost``; a slice of one range
    may cost up to MAX_DESCRIPTOR_BYTES. The next block is made only when the present slice has room for
    more."""
    parts: list[Descriptors] = []  # of the present slice
    cost_left = max_cost
    for block in blocks:
        block = cut_long(block, MAX_DESCRIPTOR_BYTES)
        num_ranges = block.lengths.size
        cost_before = np.zeros(num_ranges + 1, np.int64)  # by the number of a range
        np.cumsum(np.maximum(block.lengths, DESCRIPTOR_COST_BYTES), out=cost_before[1:])
        first = 0  # the first range of the block that is in no slice
        while first < num_ranges:
            stop = int(np.searchsorted(cost_before, cost_before[first] + cost_left, side="right")) - 1
            if not parts:
                stop = max(stop, first + 1)  # an empty slice takes any range
            if stop > first:
                parts.append(block.at(slice(first, stop)))
                cost_left -= int(cost_before[stop] - cost_before[first])
                first = stop
            is_full = cost_left < DESCRIPTOR_COST_BYTES
            if first < num_ranges or is_full:
                yield join_descriptors(parts)
                parts, cost_left = [], max_cost
    if parts:
        yield join_descriptors(parts)


def as_descriptors(writes: Writes) -> Descriptors:
    """Return ``writes`` as descriptors. Raises TransferError when the columns' lengths differ."""
    columns = Descriptors(*map(as_slots, writes))
    if len({column.size for column in columns}) > 1:
        sizes = tuple(column.size for column in columns)
        raise TransferError("{} sources, {} destinations and {} lengths".format(*sizes))
    return columns


def cut_long(writes: Descriptors, max_bytes: int) -> Descriptors:
    """Cut byte ranges that are longer than ``max_bytes``, and keep the order."""
    lengths = writes.lengths
    if lengths.max(initial=0) <= max_bytes:
        return writes
    num_pieces = -(-lengths // max_bytes)
    # For each piece, the number of its range's first one: [0, 0, 0, 3, 4, 4] for ranges of 3, 1 and 2 pieces.
    first_piece = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offset = (np.arange(first_piece.size, dtype=np.int64) - first_piece) * max_bytes
    return Descriptors(
        np.repeat(writes.src_addrs, num_pieces) + offset,
        np.repeat(writes.dst_addrs, num_pieces) + offset,
        np.minimum(np.repeat(lengths, num_pieces) - offset, max_bytes),
    )


def for_gpu(moves: Descriptors, most_long: int = MOST_LONG) -> tuple[Descriptors, Descriptors]:
    """Return the long ranges, for a GPU's copy engine, and all others in pieces for the kernel that copies
    short ones: the arguments of ``gpu_copies.enqueue_copies``. ``most_long``: most long ranges; less than
    MOST_LONG where ``moves`` are a part of a copy."""
    is_long = moves.lengths >= LONG_BYTES
    if np.count_nonzero(is_long) > most_long:
        is_long[:] = False
    return moves.at(is_long), cut_long(moves.at(~is_long), PIECE_BYTES)


def _check(runs: RunPlan, src: RegionView, dst: RegionView, layers: SlotArray) -> None:
    if src.item_bytes != dst.item_bytes:
        raise PlanError(f"source items have {src.item_bytes} bytes, destination items {dst.item_bytes}")
    for side, region, starts in (("source", src, runs.src_start), ("destination", dst, runs.dst_start)):
        _check_bounds(side, region, starts, runs.length, layers)


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
    layer_addrs = region.base_addr + layers * region.layer_bytes
    return (layer_addrs[:, None] + starts * region.item_bytes).reshape(-1)
