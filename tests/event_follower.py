"""A subscriber of KV events, which knows nothing but their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, assert_never

from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Kinds
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, block_hash, page_keys
from hisparse_pd.engine.kv_events import KvEvents
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    kv_events_decoder,
)

Blocks = dict[str, set[int]]
"""Hashes of blocks, by medium."""


def blocks_of(held: Iterable[tuple[Kinds, PageKey]]) -> Blocks:
    """Return what a subscriber should know of pages with these pools and keys."""
    blocks: Blocks = {MEDIUM_CPU: set(), MEDIUM_GPU: set()}
    for kinds, key in held:
        blocks[MEDIUM_CPU if PoolKind.HOST in kinds else MEDIUM_GPU].add(block_hash(key))
    return blocks


class EventFollower:
    """Keeps which blocks there are in each medium, and checks each event against them."""

    def __init__(self, page_size: int, rank: int = 0) -> None:
        self._page_size = page_size
        self._rank = rank
        self._key_of: dict[int, PageKey] = {}
        self.blocks: Blocks = {MEDIUM_CPU: set(), MEDIUM_GPU: set()}

    def read(self, payload: bytes) -> None:
        batch = kv_events_decoder.decode(payload)
        assert batch.data_parallel_rank == self._rank
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    assert event.medium is not None
                    known = self.blocks[event.medium]
                    assert known.issuperset(event.block_hashes), "a block is removed that was not there"
                    known.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    assert not any(self.blocks.values()), "what a subscriber might not clear was removed"
                case _:
                    assert_never(event)

    def _store(self, event: BlockStored) -> None:
        assert event.medium is not None
        known, parent = self.blocks[event.medium], event.parent_block_hash
        assert parent is None or parent in known, "a block comes without the one before it"
        assert known.isdisjoint(event.block_hashes), "a block comes twice"
        assert event.block_size == self._page_size
        root = NO_ISOLATION if parent is None else self._key_of[parent]
        keys = page_keys(root, pack_token_ids(event.token_ids), self._page_size)
        assert event.block_hashes == list(map(block_hash, keys)), "the hashes are not those of the tokens"
        self._key_of.update(zip(event.block_hashes, keys, strict=True))
        known.update(event.block_hashes)


class TreeFollower:
    """An ``EventFollower`` of a tree, without sockets."""

    num_published = num_dropped = 0

    def __init__(self, tree: PrefixTree, page_size: int) -> None:
        self._follower = EventFollower(page_size, rank=3)
        publisher: Any = self
        self._events = tree.listener = KvEvents(publisher, 3, page_size)

    def publish(self, encode: Callable[[], bytes]) -> None:
        self._follower.read(encode())

    def check(self, held: Iterable[tuple[Kinds, PageKey]]) -> None:
        """Read what was published, and compare it with the pages that are held."""
        self._events.publish()
        assert self._follower.blocks == blocks_of(held)
