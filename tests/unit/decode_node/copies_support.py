"""A held prefix to copy from pool to pool, on any device, and what must come of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from decode_node.held_prefixes import KV_POOL, OTHER_MODE, HeldPrefix
from decode_node.memory import DecodeMemory
from decode_node.pools import Holding, PoolKind, Stage
from decode_node.prefix_copies import PrefixCopies
from decode_node.request import PeerAddress, Request
from protocol.messages import Extent, Room
from transfer.extents import extents_to_slots
from vocabulary import HisparseFlag, Mode, SamplingParams

NUM_LAYERS, NUM_SLOTS, ITEM_BYTES = 3, 96, 24
SOURCE = ((Extent(64, 16), Extent(0, 8)), (Extent(32, 16),))
"""40 tokens of two prefixes, of which the request has the first two extents in one, and the last in two."""
SOURCE_INDEX = ((Extent(8, 24),), (Extent(40, 8), Extent(0, 8)))
TARGET = (Extent(8, 32), Extent(80, 8), Extent(48, 16))
TARGET_INDEX = (Extent(56, 32), Extent(48, 8))


class Copying:
    """Pools of random bytes, and a request of ``mode`` that has something to copy. ``k_host``: pinned."""

    def __init__(self, mode: Mode, k_host: torch.Tensor, k_dev: torch.Tensor) -> None:
        index = torch.empty(NUM_LAYERS - 1, NUM_SLOTS, 12, dtype=torch.uint8, device=k_dev.device)
        for pool in (k_host, k_dev, index):
            pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
        self.memory = SimpleNamespace(k_host=k_host, k_dev=k_dev, index=index)
        self.copies = PrefixCopies(cast(DecodeMemory, self.memory), slice_bytes=5 * ITEM_BYTES)
        self.request = Request(
            "id", Room(1), 50, SamplingParams(4), HisparseFlag.AUTO, PeerAddress("p", 1), 0.0, mode=mode
        )
        other, parent = OTHER_MODE[mode], None
        for pages, index_pages in zip(SOURCE, SOURCE_INDEX, strict=True):
            holding = Holding(Room(0), Stage.HELD, {KV_POOL[other]: pages, PoolKind.INDEX: index_pages})
            parent = HeldPrefix(other, parent, 0, [], holding)
        self.request.source = parent
        own = {KV_POOL[mode]: TARGET, PoolKind.INDEX: TARGET_INDEX}
        self.request.holding = Holding(Room(1), Stage.LANDING, own)
        src, self.dst = (k_host, k_dev) if mode is Mode.DENSE else (k_dev, k_host)
        self.expected = [pool.cpu().clone() for pool in (self.dst, index)]
        self.expected[0][:, slots(TARGET)] = src.cpu()[:, slots(*SOURCE)]
        self.expected[1][:, slots(TARGET_INDEX)] = index.cpu()[:, slots(*SOURCE_INDEX)]

    def is_done(self) -> bool:
        """And nothing else is touched."""
        found = (self.dst, self.memory.index)
        return all(pool.cpu().equal(expected) for pool, expected in zip(found, self.expected, strict=True))


def slots(*parts: tuple[Extent, ...]) -> torch.Tensor:
    """The first 40 of them."""
    return torch.from_numpy(extents_to_slots([extent for part in parts for extent in part]))[:40]


def empty_pools(**device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = NUM_LAYERS, NUM_SLOTS, ITEM_BYTES
    return torch.empty(shape, dtype=torch.uint8), torch.empty(shape, dtype=torch.uint8, **device)


def check_turns(copying: Copying) -> int:
    """How many turns it took."""
    copying.copies.start(copying.request)
    num_turns = 1
    while (done := copying.copies.turn()) is None:
        num_turns += 1
    assert done is copying.request
    assert not copying.copies.is_busy
    assert copying.copies.turn() is None
    assert copying.is_done()
    return num_turns


def check_finish_and_drop(copying: Copying) -> None:
    copying.copies.start(copying.request)
    assert copying.copies.turn() is None
    copying.copies.drop(copying.request)
    assert not copying.copies.is_busy
    assert not copying.is_done()
    copying.copies.drop(copying.request)
    copying.copies.start(copying.request)
    copying.copies.turn()
    copying.copies.finish(copying.request)
    assert copying.is_done()
