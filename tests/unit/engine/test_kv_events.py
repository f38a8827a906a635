"""Batches of KV events: how large they are, and what they say. ``tests/property`` follows whole histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, block_hash, page_keys
from hisparse_pd.engine import kv_events
from hisparse_pd.engine.kv_events import KvEvents
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    kv_events_decoder,
)

PAGE = 2
GPU, CPU = "GPU", "CPU_PINNED"
TOKENS = list(range(10, 20))
KEYS = page_keys(NO_ISOLATION, pack_token_ids(TOKENS), PAGE)
HASHES = list(map(block_hash, KEYS))


class Published:
    """A publisher that keeps the events of each batch."""

    num_published, num_dropped = 7, 2

    def __init__(self) -> None:
        self.batches: list[list[KvEvent]] = []

    def publish(self, encode: Callable[[], bytes]) -> None:
        self.batches.append(kv_events_decoder.decode(encode()).events)


@pytest.fixture
def published() -> Published:
    return Published()


@pytest.fixture
def events(published: Published) -> KvEvents:
    publisher: Any = published
    events = KvEvents(publisher, 0, PAGE)
    events.publish()
    assert published.batches.pop() == [AllBlocksCleared()], "an earlier process may have had blocks"
    return events


def store(events: KvEvents, kinds: tuple[PoolKind, ...], first: int, end: int) -> None:
    parent = KEYS[first - 1] if first else None
    events.stored(kinds, parent, KEYS[first:end], pack_token_ids(TOKENS[first * PAGE : end * PAGE]))


def test_a_turn_is_a_batch(events: KvEvents, published: Published) -> None:
    store(events, (PoolKind.DEVICE,), 0, 2)
    store(events, (PoolKind.HOST,), 0, 1)
    events.removed((PoolKind.DEVICE,), KEYS[1:2])
    events.publish()
    events.publish()
    assert published.batches == [
        [
            BlockStored(HASHES[:2], None, TOKENS[:4], PAGE, medium=GPU),
            BlockStored(HASHES[:1], None, TOKENS[:2], PAGE, medium=CPU),
            BlockRemoved(HASHES[1:2], GPU),
        ]
    ]


@pytest.mark.parametrize(
    ("kinds", "medium"),
    [((PoolKind.DEVICE, PoolKind.INDEX), GPU), ((PoolKind.HOST, PoolKind.INDEX), CPU)],
)
def test_a_decode_nodes_pages_are_where_their_kv_is(
    events: KvEvents, published: Published, kinds: tuple[PoolKind, ...], medium: str
) -> None:
    store(events, kinds, 3, 5)
    events.removed(kinds, KEYS[4:])
    events.publish()
    assert published.batches == [
        [
            BlockStored(HASHES[3:], HASHES[2], TOKENS[6:], PAGE, medium=medium),
            BlockRemoved(HASHES[4:], medium),
        ]
    ]


@pytest.mark.I8
def test_batches_are_bounded(events: KvEvents, published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_EVENT_TOKENS", 2 * PAGE + 1)
    store(events, (PoolKind.DEVICE,), 0, 5)
    events.removed((PoolKind.DEVICE,), KEYS[2:])
    events.publish()
    assert published.batches == [
        [BlockStored(HASHES[:2], None, TOKENS[:4], PAGE, medium=GPU)],
        [BlockStored(HASHES[2:4], HASHES[1], TOKENS[4:8], PAGE, medium=GPU)],
        [BlockStored(HASHES[4:], HASHES[3], TOKENS[8:], PAGE, medium=GPU), BlockRemoved(HASHES[2:4], GPU)],
        [BlockRemoved(HASHES[4:], GPU)],
    ]


def test_hashes_depend_on_the_tokens_alone() -> None:
    """They are the same on every node and after every start, and read alike as signed and as unsigned."""
    assert (
        HASHES[:2] == [block_hash(KEYS[0]), block_hash(KEYS[1])] == [16812937325938660, 2919741560739684444]
    )
    assert block_hash(b"\xff" * 16) == (1 << 63) - 1


def test_what_was_dropped_is_counted(events: KvEvents) -> None:
    assert events.counters() == {"kv_event_batches_total": 7.0, "kv_event_batches_dropped_total": 2.0}
