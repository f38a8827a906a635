"""Writes and reads from pool to pool as nodes plan them, and what must lie in the destination afterwards.

The expectation comes from token slots by plain indexing, without runs, pieces or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hisparse_pd.core.paging.extents import SlotArray
from hisparse_pd.transfer.engine import MAX_BATCH_DESCRIPTORS
from hisparse_pd.transfer.plan import MAX_DESCRIPTOR_BYTES, Descriptors, RegionView, descriptors
from tests.slot_plans import expand_pages, plan_slots

MAX_PAYLOAD_BYTES = 4096
"""Payload of an RDMA packet at the largest MTU that there is."""
MEMORY_BYTES = 24 << 20
"""Size of the memory that each side registers; every pattern's pools fit in it."""
POOL_OFFSET = 4096 + 13
"""Where a pool starts in that memory; not aligned, so that nothing can rely on alignment."""
POISON = 0xEE

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Pattern:
    """Tokens to copy. ``src_slots``, ``dst_slots``: int64 [num_tokens]; both pools have ``num_slots``."""

    name: str
    item_bytes: int
    num_layers: int
    num_slots: int
    src_slots: SlotArray
    dst_slots: SlotArray

    @property
    def num_bytes(self) -> int:
        """Size of all that is copied."""
        return self.src_slots.size * self.item_bytes * self.num_layers

    def writes(self, src_base_addr: int, dst_base_addr: int) -> Descriptors:
        """Return the descriptors of the copy. ``*_base_addr``: where each side's memory begins."""
        src, dst = (self._region(addr + POOL_OFFSET) for addr in (src_base_addr, dst_base_addr))
        return descriptors(plan_slots(self.src_slots, self.dst_slots), src, dst, range(self.num_layers))

    def expected(self, content: Bytes) -> Bytes:
        """Return the destination's memory afterwards, uint8 [MEMORY_BYTES]. ``content``: the source's."""
        memory = np.full(MEMORY_BYTES, POISON, np.uint8)
        self._pool(memory)[:, self.dst_slots] = self._pool(content)[:, self.src_slots]
        return memory

    def _pool(self, memory: Bytes) -> Bytes:
        num_bytes = self.num_layers * self.num_slots * self.item_bytes
        pool = memory[POOL_OFFSET : POOL_OFFSET + num_bytes]
        return pool.reshape(self.num_layers, self.num_slots, self.item_bytes)

    def _region(self, base_addr: int) -> RegionView:
        num_bytes = MEMORY_BYTES - POOL_OFFSET
        return RegionView(base_addr, num_bytes, self.num_layers, self.num_slots, self.item_bytes)


def source_content() -> Bytes:
    """Return the source's memory, uint8 [MEMORY_BYTES]: the same in every process, without POISON."""
    return np.random.default_rng(20261121).integers(0, POISON, MEMORY_BYTES, np.uint8)


def _rows(name: str, item_bytes: int, num_tokens: int) -> Pattern:
    """Tokens with no neighbour at either end: a descriptor each, in more than one batch."""
    assert num_tokens > 2 * MAX_BATCH_DESCRIPTORS
    generator = np.random.default_rng(item_bytes)
    src, dst = (2 * generator.permutation(num_tokens).astype(np.int64) for _ in range(2))
    return Pattern(name, item_bytes, 1, 2 * num_tokens, src, dst)


def _runs() -> Pattern:
    """Two runs, each longer than a descriptor may be."""
    num_tokens = MAX_DESCRIPTOR_BYTES // 1152 + 500
    src = np.arange(100, 100 + 2 * num_tokens, dtype=np.int64)
    dst = np.concatenate((src[num_tokens:] + 7, src[:num_tokens] - 3))
    return Pattern("coalesced-runs", 1152, 1, 2 * num_tokens + 200, src, dst)


def _partial_pages(name: str, item_bytes: int, num_layers: int, src_page: int, dst_page: int) -> Pattern:
    """Scattered pages, of another size at each end; the tokens begin and stop in the middle of a page."""
    start, stop, num_slots = 23, 411, 768
    generator = np.random.default_rng(num_layers)

    def slots(page_size: int) -> SlotArray:
        return expand_pages(generator.permutation(num_slots // page_size), page_size, start, stop)

    return Pattern(name, item_bytes, num_layers, num_slots, slots(src_page), slots(dst_page))


PATTERNS: Sequence[Pattern] = (
    _rows("rows-of-1152", 1152, 1300),
    _rows("rows-of-656", 656, 1300),
    _rows("rows-of-1", 1, 1100),
    _runs(),
    _partial_pages("partial-pages", 1152, 2, 64, 16),
    _partial_pages("many-layers", 256, 61, 32, 64),
)
"""Patterns with items of bf16 (1152 bytes), of fp8 (656) and of sizes that no model has."""

OBJECT = ((3 << 20, 36), (100, 73_728), (1 << 20, 700_000), (2 << 20, 1))
"""Pieces of memory, start and size, that are an object of the store, as a page's seal and layers are."""
