"""The runs of a tree of prefixes that no request uses, in the order in which they may be evicted.

``PrefixTree`` keeps its runs without users here. There is one order for each set of pools in which runs have
slots, because evicting a run only helps if slots of its pools are missing. With one order for all, each
eviction from the device would walk over thousands of runs that main memory alone has kept for longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

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


class IdleRuns:
    """Runs in the order of their last ``touch``, over all pools and for each set of pools."""

    def __init__(self) -> None:
        self._orders: dict[Kinds, _Order] = {}
        self._touched: dict[Prefix, tuple[Kinds, int]] = {}
        """Where each run is: under the pools that it had slots in, with the number of its last touch."""
        self._num_touches = 0

    def __contains__(self, run: Prefix) -> bool:
        return run in self._touched

    def __iter__(self) -> Iterator[Prefix]:
        """Yield the least recently touched run first."""
        return iter(sorted(self._touched, key=lambda run: self._touched[run][1]))

    def touch(self, run: Prefix) -> None:
        """Add a run, or make it the most recently touched one."""
        self.discard(run)
        self._num_touches += 1
        self._add(run, self._num_touches)

    def changed_pools(self, run: Prefix) -> None:
        """Note that a run has slots in other pools than before; its place in the order of all stays."""
        _, number = self._touched[run]
        self.discard(run)
        self._add(run, number)

    def discard(self, run: Prefix) -> None:
        """Take out a run, if it is here."""
        if (found := self._touched.pop(run, None)) is not None:
            pools, number = found
            self._orders[pools].remove(number)

    def firsts(self) -> Iterator[Prefix]:
        """Yield the least recently touched run of each set of pools."""
        for order in self._orders.values():
            yield from order.runs[:1]

    def oldest(self, pools: Container[PoolKind] = frozenset(PoolKind)) -> Prefix | None:
        """Return the least recently touched run with slots in one of ``pools``, or None without any."""
        wanted = (run for run in self.firsts() if any(kind in pools for kind in run.pools))
        return min(wanted, key=lambda run: self._touched[run][1], default=None)

    def _add(self, run: Prefix, number: int) -> None:
        self._touched[run] = run.pools, number
        self._orders.setdefault(run.pools, _Order()).add(number, run)
