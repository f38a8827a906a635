"""The runs of a tree of prefixes that no request uses, in the order in which they may be evicted.

``RunTree`` keeps its runs without users here. There is one order for each set of pools in which runs have
slots, because evicting a run only helps if slots of its pools are missing. With one order for all, each
eviction from the device would walk over thousands of runs that main memory alone has kept for longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Kinds, Prefix


@dataclass(slots=True)
class _Order:
    """Runs by the number of their last touch, the least recent first."""

    numbers: list[int] = field(default_factory=list)
    runs: list[Prefix] = field(default_factory=list)

    def add(self, number: int, run: Prefix) -> None:
        at = bisect_left(self.numbers, number)  # nearly always the end
        self.numbers.insert(at, number)
        self.runs.insert(at, run)

    def remove(self, number: int) -> None:
        at = bisect_left(self.numbers, number)
        del self.numbers[at], self.runs[at]


class _Place(NamedTuple):
    """Where a run is, and as how large it is counted."""

    pools: Kinds
    """The pools that it had slots in, under which its order is."""
    number: int
    """The number of its last touch."""
    num_pages: int


class IdleRuns:
    """Runs in the order of their last ``touch``, over all pools and for each set of pools."""

    def __init__(self) -> None:
        self._orders: dict[Kinds, _Order] = {}
        self._places: dict[Prefix, _Place] = {}
        self.num_pages: Counter[Kinds] = Counter()
        """Pages of the runs, by the pools in which these have slots."""
        self._num_touches = 0

    def __contains__(self, run: Prefix) -> bool:
        return run in self._places

    def __iter__(self) -> Iterator[Prefix]:
        """Yield the least recently touched run first."""
        return iter(sorted(self._places, key=lambda run: self._places[run].number))

    def touch(self, run: Prefix) -> None:
        """Add a run, or make it the most recently touched one."""
        self.discard(run)
        self._num_touches += 1
        self._add(run, self._num_touches)

    def changed(self, run: Prefix) -> None:
        """Note that a run, if it is here, has other pages than before, or slots in other pools. It keeps its
        place in the order of all."""
        if (place := self._places.get(run)) is None:
            return
        if run.pools == place.pools:
            self.num_pages[place.pools] += len(run.keys) - place.num_pages
            self._places[run] = place._replace(num_pages=len(run.keys))
            return
        self.discard(run)
        self._add(run, place.number)

    def discard(self, run: Prefix) -> None:
        """Take out a run, if it is here."""
        if (place := self._places.pop(run, None)) is not None:
            self.num_pages[place.pools] -= place.num_pages
            self._orders[place.pools].remove(place.number)

    def firsts(self) -> Iterator[Prefix]:
        """Yield the least recently touched run of each set of pools."""
        for order in self._orders.values():
            yield from order.runs[:1]

    def oldest(self, pools: Container[PoolKind] = frozenset(PoolKind)) -> Prefix | None:
        """Return the least recently touched run with slots in one of ``pools``, or None without any."""
        wanted = (run for run in self.firsts() if any(kind in pools for kind in run.pools))
        return min(wanted, key=lambda run: self._places[run].number, default=None)

    def _add(self, run: Prefix, number: int) -> None:
        place = self._places[run] = _Place(run.pools, number, len(run.keys))
        self.num_pages[place.pools] += place.num_pages
        self._orders.setdefault(place.pools, _Order()).add(number, run)
