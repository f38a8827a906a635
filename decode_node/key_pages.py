"""Main memory for the indexer keys and row checks of held prefixes, and the copies of held pages.

``KeyPages`` owns the memory, which has a place for each page of the host pool, and the two streams of copies;
``held_tier.py`` and ``dense_tier.py`` decide what is copied. Copies run beside steps and wait for the work in
front of them. The KV of held pages has its home in the host pool; that of dense requests goes there and back
with their keys.

A page's bytes lie together, those of all layers, other than in the pools. So a copy needs one transfer for
each run of adjacent pages and not one for each layer of it: 64k tokens of V3.2 in single pages are 2,048
transfers. On the device, pages are gathered from the pools, or scattered to them, a few at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.core.memory.host import HostPool, Pinning, allocate_host
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.core.paging.extents import extents_to_pages, extents_to_slots
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.kernels.hot_state import MAX_LOOKUP_SLOTS
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.swap_in import replay_misses, write_back
from hisparse_pd.kernels.warm_up import FILL_BLOCKS
from hisparse_pd.protocol.messages import Extent

log = logging.getLogger(__name__)

STAGED_BYTES: Final = 32 << 20
"""Most bytes that a copy gathers on the device at once."""
COPIES_AT_ONCE: Final = 16384
"""Items of several layers that one launch copies; one layer may have more. A short request's KV is one launch
then, and not one for each layer."""


class KeyPages:
    """A place in main memory for what ``memory`` has of each page in its index pool: as many places as the
    host pool has pages.

    ``pinning``: CUDA's when not given; ``placement``: the NUMA node of the memory. Raises HostMemoryError.
    """

    def __init__(
        self,
        memory: DecodeMemory,
        page_size: int,
        *,
        pinning: Pinning | None = None,
        placement: Placement = ANYWHERE,
    ) -> None:
        self._device = memory.index.device
        self._page_size = page_size
        self._k_host, self._k_dev = memory.k_host, memory.k_dev
        num_pages = memory.k_host.shape[1] // page_size
        on_device = [_by_page(memory.index, page_size)]
        if memory.row_checks is not None:
            on_device.append(_by_page(memory.row_checks, page_size))
        self._host_pools: list[HostPool] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """A pool on the device, [layers, pages, words], and its pages here, [pages, layers, words]."""
        is_cuda = self._device.type == "cuda"
        for pool in on_device:
            host = allocate_host(
                _page_bytes(pool) * num_pages,
                pinned=is_cuda,
                touch=is_cuda,  # without a GPU, pages are allocated when they are first written
                name="keys of held prefixes",
                pinning=pinning,
                placement=placement,
            )
            self._host_pools.append(host)
            shape = (num_pages, pool.shape[0], pool.shape[2])
            self._pairs.append((pool, host.tensor.view(pool.dtype).view(shape)))
        self._down, self._up = SideStream(self._device), SideStream(self._device)
        num_bytes = sum(here.nbytes for _, here in self._pairs)
        log.info("keys of held prefixes: %d pages, %.2f GiB", num_pages, num_bytes / (1 << 30))

    def copy_down(
        self, index: Sequence[Extent], host: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event | None:
        """Begin to copy pages of the index pool to the places of as many pages of the host pool, and the KV
        of as many pages of the device pool, if ``device`` has any, to these pages. Returns the event behind
        the copy, or None where it is over. Raises CopyFailed."""
        with self._down.copying():
            for on_device, here in self._pairs:
                for from_ids, to_ids in self._parts(on_device, index, host):
                    staged = on_device.index_select(1, self._on_device(from_ids)).transpose(0, 1).contiguous()
                    for at, first, num in _runs(to_ids):
                        here[first : first + num].copy_(staged[at : at + num], non_blocking=True)
            if device:
                self._copy_kv(write_back, host, device)
        return self._down.record()

    def copy_up(
        self, host: Sequence[Extent], index: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event | None:
        """Begin to copy what lies at the places of pages of the host pool to as many pages of the index pool,
        and the KV of these pages to as many pages of the device pool; as ``copy_down``."""
        with self._up.copying():
            for on_device, here in self._pairs:
                for from_ids, to_ids in self._parts(on_device, host, index):
                    staged = on_device.new_empty((len(from_ids), *here.shape[1:]))
                    for at, first, num in _runs(from_ids):
                        staged[at : at + num].copy_(here[first : first + num], non_blocking=True)
                    on_device.index_copy_(1, self._on_device(to_ids), staged.transpose(0, 1))
            if device:
                self._copy_kv(replay_misses, host, device)
        return self._up.record()

    def _copy_kv(
        self,
        copy: Callable[[MissPlan, int, Tensor, Tensor, int], None],
        host: Sequence[Extent],
        device: Sequence[Extent],
    ) -> None:
        """Copy the items of all layers between as many slots of both pools, on few multiprocessors, beside
        steps. ``copy``: ``write_back`` or ``replay_misses``."""
        host_slots, device_slots = extents_to_slots(host), extents_to_slots(device)
        num_layers, num_host_slots, _ = self._k_host.shape
        num_device_slots = self._k_dev.shape[1]
        most_slots = max(num_host_slots, num_device_slots)
        at_once = max(1, min(COPIES_AT_ONCE // len(host_slots), MAX_LOOKUP_SLOTS // most_slots))
        for first in range(0, num_layers, at_once):
            # Several layers are copied as one that has the slots of all of them.
            layers = slice(first, first + at_once)
            k_host, k_dev = (pool[layers].view(1, -1, pool.shape[2]) for pool in (self._k_host, self._k_dev))
            number = np.arange(min(at_once, num_layers - first))[:, None]
            plan = MissPlan.of_slots(
                (number * num_host_slots + host_slots).ravel(),
                (number * num_device_slots + device_slots).ravel(),
                self._device,
            )
            copy(plan, 0, k_host, k_dev, FILL_BLOCKS)

    def row_checks(self, slots: Tensor) -> Tensor:
        """Return the row checks that lie at the places of token slots of the host pool: int32 [layers,
        num_slots]. ``slots``: int64 [num_slots], on the CPU."""
        _, here = self._pairs[1]
        return here.view(torch.int32)[slots // self._page_size, :, slots % self._page_size].T

    def settle(self) -> None:
        """Wait until all copies are over."""
        for stream in (self._down, self._up):
            stream.synchronize()

    def close(self) -> None:
        """Unpin the memory once all copies are over."""
        self.settle()
        self._pairs.clear()
        self._k_host = self._k_host[:, :0].clone()  # the memory is not this object's to keep mapped
        for pool in self._host_pools:
            pool.close()

    def _parts(
        self, pool: Tensor, src: Sequence[Extent], dst: Sequence[Extent]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield page ids of both sides, as many at a time as a copy stages."""
        src_ids, dst_ids = (extents_to_pages(extents, self._page_size) for extents in (src, dst))
        most = max(1, STAGED_BYTES // _page_bytes(pool))
        for start in range(0, len(src_ids), most):
            yield src_ids[start : start + most], dst_ids[start : start + most]

    def _on_device(self, page_ids: Sequence[int]) -> Tensor:
        """Return the ids on the device. Pinned, they get there in stream order and nobody waits."""
        ids = torch.tensor(page_ids)
        return ids.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else ids


def _by_page(pool: Tensor, page_size: int) -> Tensor:
    """Return a pool, [layers, slots, …], as [layers, pages, words], in the widest words that fit."""
    pages = pool.reshape(pool.shape[0], pool.shape[1] // page_size, -1)
    page_bytes = pages.shape[2] * pages.itemsize
    for word in (torch.int64, torch.int32):
        if page_bytes % word.itemsize == 0 and pages.itemsize <= word.itemsize:
            return pages.view(word)
    return pages


def _page_bytes(pool: Tensor) -> int:
    """Return the bytes of one page in all layers. ``pool``: [layers, pages, words]."""
    return pool.shape[0] * pool.shape[2] * pool.itemsize


def _runs(page_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of adjacent pages: where each begins in the list, its first page and its length."""
    start = 0
    for at in range(1, len(page_ids) + 1):
        if at == len(page_ids) or page_ids[at] != page_ids[at - 1] + 1:
            yield start, page_ids[start], at - start
            start = at
