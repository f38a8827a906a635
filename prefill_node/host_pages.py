"""Main memory below the prefix cache: pages of KV, indexer keys and row checks, and the copies of them.

``HostPages`` owns the tensors and the two streams of copies; ``host_tier.py`` decides what is copied. Copies
run beside forwards: those down begin behind the forward that has written their pages, and those up behind
all forwards that may still read the pages they write to.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse_pd.core.memory.host import HostPool, Pinning, allocate_host
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.core.paging.extents import SlotRanges
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.protocol.messages import Extent
from hisparse_pd.transfer.plan import plan_writes

log = logging.getLogger(__name__)


class HostPages:
    """``num_slots`` token slots in main memory for what ``memory`` has of each token.

    ``pinning``: CUDA's when not given; ``placement``: the NUMA node of the memory. Raises HostMemoryError.
    """

    def __init__(
        self,
        memory: PrefillMemory,
        num_slots: int,
        *,
        pinning: Pinning | None = None,
        placement: Placement = ANYWHERE,
    ) -> None:
        device = memory.kv.device
        self.num_slots = num_slots
        self._pools: list[HostPool] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """A pool on the device and the one with its tokens' bytes here, [layers, slots, …] each."""
        sizes = [source.nbytes // source.shape[1] * num_slots for source in memory.sent]
        for source, size in zip(memory.sent, sizes, strict=True):
            shape = (source.shape[0], num_slots, *source.shape[2:])
            # Without a GPU, pages are allocated when they are first written.
            pool = allocate_host(
                size,
                pinned=device.type == "cuda",
                touch=device.type == "cuda",
                name="host cache",
                pinning=pinning,
                placement=placement,
            )
            self._pools.append(pool)
            self._pairs.append((source, pool.tensor.view(source.dtype).view(shape)))
        self._down, self._up = SideStream(device), SideStream(device)
        log.info("host cache: %d tokens, %.2f GiB", num_slots, sum(sizes) / (1 << 30))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is here of the tokens, [layers, num_slots, …] each: KV, indexer keys and, if there are
        any, row checks."""
        return tuple(here for _, here in self._pairs)

    @property
    def kv(self) -> Tensor:
        """Items of KV, uint8 [num_kv_layers, num_slots, item_bytes]."""
        return self._pairs[0][1]

    @property
    def index(self) -> Tensor:
        """Indexer keys, uint8 [num_index_groups, num_slots, index_item_bytes]."""
        return self._pairs[1][1]

    @property
    def row_checks(self) -> Tensor | None:
        """The items' checks, int32 [num_kv_layers, num_slots], or None if the node computes none."""
        return self._pairs[2][1] if len(self._pairs) > 2 else None

    def copy_down(self, device: Sequence[Extent], host: Sequence[Extent]) -> torch.cuda.Event | None:
        """Begin to copy the token slots ``device`` to as many slots ``host`` here. Returns the event behind
        it, or None where it is over. Raises CopyFailed."""
        with self._down.copying():
            for on_device, here in self._pairs:
                _copy(on_device, device, here, host)
        return self._down.record()

    def copy_up(self, host: Sequence[Extent], device: Sequence[Extent]) -> torch.cuda.Event | None:
        """Begin to copy the token slots ``host`` to as many slots ``device`` of the device; as
        ``copy_down``."""
        with self._up.copying():
            for on_device, here in self._pairs:
                _copy(here, host, on_device, device)
        return self._up.record()

    def settle(self) -> None:
        """Wait until all copies are over."""
        for stream in (self._down, self._up):
            stream.synchronize()

    def close(self) -> None:
        """Unpin the memory once all copies are over."""
        self.settle()
        self._pairs.clear()
        for pool in self._pools:
            pool.close()


def _copy(src: Tensor, src_slots: Sequence[Extent], dst: Tensor, dst_slots: Sequence[Extent]) -> None:
    """Copy token slots of all layers, a run of adjacent slots of a layer at a time: only whole runs go
    between main memory and a GPU without a detour."""
    runs = plan_writes(SlotRanges.of_extents(src_slots), SlotRanges.of_extents(dst_slots))
    columns = runs.src_start.tolist(), runs.dst_start.tolist(), runs.length.tolist()
    for src_layer, dst_layer in zip(src, dst, strict=True):
        for src_start, dst_start, length in zip(*columns, strict=True):
            dst_run = dst_layer[dst_start : dst_start + length]
            dst_run.copy_(src_layer[src_start : src_start + length], non_blocking=True)
