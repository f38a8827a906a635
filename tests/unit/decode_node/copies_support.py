"""A held prefix to copy from pool to pool, on any device, and what must come of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from decode_node.held_prefixes import KV_POOL
from decode_node.memory import DecodeMemory
from decode_node.pools import Holding, Stage
from decode_node.prefix_copies import PrefixCopies
from decode_node.request import PeerAddress, Request
from protocol.messages import Extent, Room
from transfer.extents import extents_to_slots
from vocabulary import HisparseFlag, Mode, SamplingParams

NUM_LAYERS, NUM_SLOTS, ITEM_BYTES = 3, 96, 24
SOURCE = (Extent(64, 16), Extent(0, 8), Extent(32, 16))
"""40 tokens, of which the request has the first two extents in one, and the last in two."""
TARGET = (Extent(8, 32), Extent(80, 8), Extent(48, 16))
OTHER = {Mode.HISPARSE: Mode.DENSE, Mode.DENSE: Mode.HISPARSE}


class Copying:
    """Pools of random bytes, and a request of ``mode`` that has something to copy. ``k_host``: pinned."""

    def __init__(self, mode: Mode, k_host: torch.Tensor, k_dev: torch.Tensor) -> None:
        for pool in (k_host, k_dev):
            pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
        self.memory = SimpleNamespace(k_host=k_host, k_dev=k_dev)
        self.copies = PrefixCopies(cast(DecodeMemory, self.memory), slice_bytes=5 * ITEM_BYTES)
        self.request = Request(
            "id", Room(1), 50, SamplingParams(4), HisparseFlag.AUTO, PeerAddress("p", 1), 0.0, mode=mode
        )
        self.request.source = Holding(Room(0), Stage.HELD, {KV_POOL[OTHER[mode]]: SOURCE})
        self.request.holding = Holding(Room(1), Stage.LANDING, {KV_POOL[mode]: TARGET})
        self.src, self.dst = (k_host, k_dev) if mode is Mode.DENSE else (k_dev, k_host)
        self.before = self.dst.clone().cpu()
        self.src_slots = torch.from_numpy(extents_to_slots(SOURCE))
        self.dst_slots = torch.from_numpy(extents_to_slots(TARGET))[:40]

    def is_done(self) -> bool:
        return self.dst.cpu()[:, self.dst_slots].equal(self.src.cpu()[:, self.src_slots])

    def touches_nothing_else(self) -> bool:
        others = torch.ones(NUM_SLOTS, dtype=torch.bool)
        others[self.dst_slots] = False
        return self.dst.cpu()[:, others].equal(self.before[:, others])


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
    assert copying.touches_nothing_else()
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
    assert copying.touches_nothing_else()
