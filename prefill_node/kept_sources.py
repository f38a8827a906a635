"""Owns what delivered rooms sent from for as long as the transport might still read it (I1). Pure.

A batch that failed and was repeated may leave parts of its first attempt in the transport. While the source
stands they bring the same bytes to the same place once more, which harms nobody. If the source were given to
another prompt, they would bring that prompt's bytes to a request that is being served. A room that was not
delivered needs none of this: its landing zone is quarantined at the decode node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from prefill_node.kv_pool import PageId
from prefill_node.prefix_cache import Lease
from protocol.messages import Room


@dataclass(frozen=True, slots=True)
class Source:
    """What one room sent from, and when it is free. Of ``page_ids`` those that were the room's alone."""

    room: Room
    page_ids: list[PageId]
    lease: Lease | None
    aux_slot: int | None
    free_at_secs: float


class KeptSources:
    """Times are on ``time.monotonic()``'s clock, in seconds."""

    def __init__(self, quarantine_secs: float) -> None:
        self.quarantine_secs = quarantine_secs
        self._sources: deque[Source] = deque()

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    def add(
        self,
        room: Room,
        page_ids: list[PageId],
        lease: Lease | None,
        aux_slot: int | None,
        now_secs: float,
    ) -> None:
        """Keep what ``room`` sent from, from now on and for ``quarantine_secs``."""
        self._sources.append(Source(room, page_ids, lease, aux_slot, now_secs + self.quarantine_secs))

    def postpone(self, secs: float) -> None:
        """This node stood still for ``secs``: its transport goes on with what it was at."""
        self._sources = deque(
            replace(source, free_at_secs=source.free_at_secs + secs) for source in self._sources
        )

    def take_free(self, now_secs: float) -> list[Source]:
        """Those that are free by now; they are no longer here."""
        free = []
        while self._sources and self._sources[0].free_at_secs <= now_secs:
            free.append(self._sources.popleft())
        return free
