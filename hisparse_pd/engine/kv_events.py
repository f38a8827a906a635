"""The events that a rank publishes of its prefixes: ``KvEvents`` listens to the tree and makes batches of
them.

The loop (``loop.py``) makes one if ``--kv-events-config`` asks for it, and calls ``publish`` once a turn.
Batches are bounded: pages that come or go together may be in several. The publisher's thread makes the events
of them and sends them (``protocol/kv_event_sockets.py``).

A page's token ids are published only if its request has no isolation key; the tree's callers see to that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Kinds
from hisparse_pd.core.paging.prompt_keys import PageKey, block_hash
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.protocol.kv_event_sockets import KvEventPublisher
from hisparse_pd.protocol.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    encode_batch,
)
from hisparse_pd.protocol.messages import TOKEN_BYTES

MAX_EVENT_TOKENS: Final = 16_384
"""Most tokens of the pages in one event, if these are several, and about half of the most in one batch."""


class _Stored(NamedTuple):
    medium: str
    parent: PageKey | None
    keys: Sequence[PageKey]
    token_ids: bytes

    def event(self, page_size: int) -> KvEvent:
        parent = None if self.parent is None else block_hash(self.parent)
        token_ids = unpack_token_ids(self.token_ids).tolist()
        hashes = list(map(block_hash, self.keys))
        return BlockStored(hashes, parent, token_ids, page_size, medium=self.medium)


class _Removed(NamedTuple):
    medium: str
    keys: Sequence[PageKey]

    def event(self, page_size: int) -> KvEvent:
        return BlockRemoved(list(map(block_hash, self.keys)), self.medium)


class _Cleared(NamedTuple):
    keys: Sequence[PageKey] = ()

    def event(self, page_size: int) -> KvEvent:
        return AllBlocksCleared()


_Change = _Stored | _Removed | _Cleared


class KvEvents:
    """The ``PageListener`` of one rank's prefixes.

    Its first event says that nothing is held: subscribers may know blocks of an earlier process.
    """

    def __init__(self, publisher: KvEventPublisher, rank: int, page_size: int) -> None:
        self._publisher = publisher
        self._rank = rank
        self._page_size = page_size
        self._changes: list[_Change] = [_Cleared()]
        """The changes since the last ``publish``."""

    def stored(self, kinds: Kinds, parent: PageKey | None, keys: Sequence[PageKey], token_ids: bytes) -> None:
        page_bytes = self._page_size * TOKEN_BYTES
        for start, piece in self._pieces(keys):
            ids = token_ids[start * page_bytes : (start + len(piece)) * page_bytes]
            self._changes.append(_Stored(_medium(kinds), parent, piece, ids))
            parent = piece[-1]

    def removed(self, kinds: Kinds, keys: Sequence[PageKey]) -> None:
        self._changes += (_Removed(_medium(kinds), piece) for _, piece in self._pieces(keys))

    def emptied(self) -> None:
        self._changes.append(_Cleared())

    def publish(self) -> None:
        """Publish what has changed since the last call, without waiting for anybody."""
        changes, self._changes = self._changes, []
        batch: list[_Change] = []
        num_pages = 0
        for change in changes:
            batch.append(change)
            num_pages += len(change.keys)
            if num_pages >= self._max_pages:
                self._send(batch)
                batch, num_pages = [], 0
        if batch:
            self._send(batch)

    def counters(self) -> dict[str, float]:
        return {
            "kv_event_batches_total": float(self._publisher.num_published),
            "kv_event_batches_dropped_total": float(self._publisher.num_dropped),
        }

    def close(self) -> None:
        self._publisher.close()

    @property
    def _max_pages(self) -> int:
        return max(1, MAX_EVENT_TOKENS // self._page_size)

    def _pieces(self, keys: Sequence[PageKey]) -> Iterator[tuple[int, Sequence[PageKey]]]:
        """Yield ``keys`` in pieces for one event each, with the number of each piece's first key."""
        for start in range(0, len(keys), self._max_pages):
            yield start, keys[start : start + self._max_pages]

    def _send(self, changes: Sequence[_Change]) -> None:
        self._publisher.publish(partial(_encode, time.time(), changes, self._page_size, self._rank))


def _encode(ts: float, changes: Sequence[_Change], page_size: int, rank: int) -> bytes:
    return encode_batch(ts, (change.event(page_size) for change in changes), rank)


def _medium(kinds: Kinds) -> str:
    """Return where pages of these pools have their KV."""
    return MEDIUM_CPU if PoolKind.HOST in kinds else MEDIUM_GPU
