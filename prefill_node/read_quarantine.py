"""Slots of failed reads into which bytes may still land: nobody gets them until that can no longer be.

``StoreTier`` and ``PartReads`` have a ``ReadQuarantine`` each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hisparse_pd.core.paging.pools import Holding, Pools, Stage

QUARANTINE_SECS: Final = 60.0
"""Time after a failed read in which its slots are not used: twice Mooncake's longest timeout."""


class ReadQuarantine:
    """Holdings of ``pools`` in Stage.QUARANTINED. Times are those of one clock, in seconds."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._entries: list[tuple[float, Holding]] = []
        """When each holding is free, and the holding."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Holding]:
        return (holding for _, holding in self._entries)

    def add(self, holding: Holding, now: float) -> None:
        """Take over the holding of a read that has failed."""
        self._pools.move(holding, Stage.QUARANTINED)
        self._entries.append((now + QUARANTINE_SECS, holding))

    def free_due(self, now: float) -> None:
        """Free the slots whose time is over."""
        for entry in [entry for entry in self._entries if entry[0] <= now]:
            self._entries.remove(entry)
            self._pools.release(entry[1])
