"""Main memory below pools of a device, token slot for token slot, and the copies between the two.

Both nodes keep idle pages there: the prefill node those of its prefix cache (``prefill_node/host_pages.py``),
the decode node what held prefixes have beside their KV (``decode_node/key_pages.py``). ``host_tier.py``,
``held_tier.py`` and ``dense_tier.py`` decide what is copied. Copies run beside forwards, on a stream for each
direction, behind all work that was enqueued before: a forward that has written the pages, or one that may
still read what is written to.

Copies up may bring layer after layer, for a forward that begins meanwhile (``layer_arrivals.py``), on a
stream that other such copies share.

However scattered pages are, a copy on a GPU is at most 512 calls, for long runs, and a launch for each 65,536
shorter ranges of a pool (``plan.for_gpu``, ``gpu_copies.py``). Small copies of several pools share them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hisparse_pd.core.memory.gpu_copies import compile_copies, enqueue_copies
from hisparse_pd.core.memory.host import HostPool, allocate_host
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.core.paging.extents import SlotRanges, extents_to_slots, slice_extents
from hisparse_pd.protocol.messages import Extent
from hisparse_pd.transfer.lane_copy import copy_ranges
from hisparse_pd.transfer.plan import (
    MOST_LONG,
    Descriptors,
    RegionView,
    descriptors,
    for_gpu,
    join_descriptors,
    plan_writes,
)

log = logging.getLogger(__name__)

EARLY_BYTES: Final = 16 << 20
"""Planned copies of so many bytes begin before the next pool's are planned. The link takes 0.3 ms for them,
and a plan as long."""
COMPARED_BYTES: Final = 32 << 20
"""Most device memory that ``num_same`` takes, however many slots it compares: it does so piece by piece."""


class SlotCopy(NamedTuple):
    """Token slots of some pools that go to as many slots of others, in all layers."""

    pools: Sequence[tuple[Tensor, Tensor]]
    """Sources with their destinations. Both are contiguous, [layers, slots, …], and differ in their number of
    slots alone."""
    src_slots: Sequence[Extent]
    dst_slots: Sequence[Extent]


class HostCopies:
    """``num_slots`` token slots in main memory for what each of ``pools`` has of a token, and two streams of
    copies.

    ``pools``: contiguous, [layers, slots, …] each, of one device. ``name``: for the log and errors.
    ``placement``: the NUMA node of the memory. ``arrivals``: if given, copies up bring layer after layer of
    all pools, on its stream. Raises HostMemoryError.
    """

    def __init__(
        self,
        pools: Sequence[Tensor],
        num_slots: int,
        *,
        name: str,
        placement: Placement = ANYWHERE,
        arrivals: LayerArrivals | None = None,
    ) -> None:
        self._device = pools[0].device
        self._on_device = tuple(pools)
        self._host_pools: list[HostPool] = []
        here: list[Tensor] = []
        is_cuda = self._device.type == "cuda"
        for pool in pools:
            host = allocate_host(
                pool.nbytes // pool.shape[1] * num_slots,
                pinned=is_cuda,
                touch=is_cuda,  # without a GPU, pages are allocated when they are first written
                name=name,
                placement=placement,
            )
            self._host_pools.append(host)
            here.append(host.tensor.view(pool.dtype).view(pool.shape[0], num_slots, *pool.shape[2:]))
        self.tensors = tuple(here)
        """What is here of the tokens, [layers, num_slots, …] for each pool; none once it is closed."""
        self._arrivals = arrivals
        self._down = SideStream(self._device)
        self._up = SideStream(self._device) if arrivals is None else arrivals.stream
        self._beside_copies = SideStream(self._device)
        """For what the host waits for, and which waits neither for copies under way nor for steps."""
        if is_cuda:
            compile_copies(self._device)
        log.info("%s: %d tokens, %.2f GiB", name, num_slots, sum(each.nbytes for each in here) / (1 << 30))

    def copy_down(
        self, device: Sequence[Extent], host: Sequence[Extent], *others: SlotCopy
    ) -> torch.cuda.Event | None:
        """Begin to copy the token slots ``device`` of all pools to as many slots ``host`` here, and
        ``others``. Returns the event behind it, or None where it is over. Raises CopyFailed."""
        pools = tuple(zip(self._on_device, self.tensors, strict=True))
        return self._copy(self._down, (SlotCopy(pools, device, host), *others))

    def copy_up(
        self,
        host: Sequence[Extent],
        device: Sequence[Extent],
        *others: SlotCopy,
        behind: Callable[[], object] = lambda: None,
    ) -> torch.cuda.Event | None:
        """Begin to copy the token slots ``host`` here to as many slots ``device`` of all pools; as
        ``copy_down``. What ``behind`` enqueues comes behind the copies, and is over when they are."""
        pools = tuple(zip(self.tensors, self._on_device, strict=True))
        copies = SlotCopy(pools, host, device), *others
        return self._copy(self._up, copies, behind, self._arrivals)

    def _copy(
        self,
        stream: SideStream,
        copies: Sequence[SlotCopy],
        behind: Callable[[], object] = lambda: None,
        arrivals: LayerArrivals | None = None,
    ) -> torch.cuda.Event | None:
        with stream.copying():
            copy_slots(copies, self._device, arrivals)
            behind()
        return stream.record()

    def num_same(self, number: int, device: Sequence[Extent], host: Sequence[Extent]) -> int:
        """Return how many of the first token slots ``device`` of pool ``number`` have, in all layers, what
        lies in as many slots ``host`` here. Waits for the device, but not for the current stream, which may
        have a step in flight: whatever wrote to these slots must be over. Raises CopyFailed."""
        pool, here = self._on_device[number], self.tensors[number]
        slots = torch.from_numpy(extents_to_slots(tuple(device)))
        slot_bytes = here.nbytes // here.shape[1]
        piece = COMPARED_BYTES // (3 * slot_bytes + 32)  # both sides, their outcome, and a slot's int64s
        with self._beside_copies.copying(is_behind=False):
            for start in range(0, slots.numel(), piece):
                some = slots[start : start + piece].to(self._device)
                copy = torch.empty((here.shape[0], some.numel()), dtype=here.dtype, device=self._device)
                in_piece = slice_extents(host, start, start + some.numel())
                copy_slots([SlotCopy([(here, copy)], in_piece, [Extent(0, some.numel())])], self._device)
                is_same = (pool[:, some] == copy).all(dim=0)
                num_same = int(is_same.long().cumprod(dim=0).sum())
                if num_same < some.numel():
                    return start + num_same
        return slots.numel()

    def settle(self) -> None:
        """Wait until all copies are over."""
        for stream in (self._down, self._up):
            stream.synchronize()

    def close(self) -> None:
        """Unpin the memory once all copies are over."""
        self.settle()
        self.tensors = ()
        for pool in self._host_pools:
            pool.close()


def copy_slots(
    copies: Sequence[SlotCopy], device: torch.device, arrivals: LayerArrivals | None = None
) -> None:
    """Make the copies; on a GPU, enqueue them on the current stream. With ``arrivals`` they are in as many
    parts of layers, each of which is recorded. Raises PlanError for slots out of bounds, and the driver's
    error."""
    moves = []
    for pools, src_slots, dst_slots in copies:
        runs = plan_writes(SlotRanges.of_extents(src_slots), SlotRanges.of_extents(dst_slots))
        moves += [(runs, src, dst) for src, dst in pools]
    num_parts = 1 if arrivals is None else arrivals.num_parts
    most_long = MOST_LONG // max(1, num_parts * len(moves))  # of each part of a pool
    for part in range(num_parts):
        planned: list[Descriptors] = []
        for runs, src, dst in moves:
            num_layers = src.shape[0]
            layers = range(num_layers) if arrivals is None else arrivals.layers(part, num_layers)
            if not layers:
                continue
            planned.append(descriptors(runs, _region(src), _region(dst), layers))
            if sum(each.num_bytes for each in planned) >= EARLY_BYTES:  # the link moves them meanwhile
                _enqueue(planned, device, most_long)
                planned = []
        _enqueue(planned, device, most_long)
        if arrivals is not None:
            arrivals.record(part)


def _enqueue(parts: Sequence[Descriptors], device: torch.device, most_long: int) -> None:
    """Make planned copies of parts of pools. ``most_long``: long ranges of each that the copy engine may have
    (``for_gpu``)."""
    moves = join_descriptors(parts)
    if device.type == "cuda":
        enqueue_copies(device, *for_gpu(moves, most_long * len(parts)))
    else:
        copy_ranges(*moves)


def _region(pool: Tensor) -> RegionView:
    num_layers, num_slots = pool.shape[:2]
    return RegionView(
        pool.data_ptr(), pool.nbytes, num_layers, num_slots, pool.nbytes // (num_layers * num_slots)
    )
