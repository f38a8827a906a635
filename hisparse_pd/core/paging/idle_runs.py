"""The runs of a tree of prefixes that no request uses, in the order in which they may be evicted.

``PrefixTree`` keeps its runs without users here. Runs of one kind have an order of their own, because a run
can only help where slots of its pools are missing: with all in one order, each eviction from the device would
walk over what main memory has kept for longer, which may be thousands of runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator

from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Kinds, Prefix


class IdleRuns:
    """Runs in the order of their last ``touch``, over all kinds and for each of them."""

    def __init__(self) -> None:
        self._touched: dict[Kinds, OrderedDict[Prefix, int]] = {}
        """The number of each run's last ``touch``, the least recent first."""
        self._num_touches = 0

    def __contains__(self, run: Prefix) -> bool:
        return run in self._touched.get(run.kinds, ())

    def __iter__(self) -> Iterator[Prefix]:
        """Yield the runs of one kind after those of another, the least recently touched first."""
        for runs in self._touched.values():
            yield from runs

    def touch(self, run: Prefix) -> None:
        """Add a run, or make it the most recently touched one."""
        runs = self._touched.setdefault(run.kinds, OrderedDict())
        self._num_touches += 1
        runs[run] = self._num_touches
        runs.move_to_end(run)

    def discard(self, run: Prefix) -> None:
        """Take out a run, if it is here."""
        self._touched.get(run.kinds, OrderedDict()).pop(run, None)

    def oldest(self, pools: Container[PoolKind] = frozenset(PoolKind)) -> Prefix | None:
        """Return the least recently touched run with slots in one of ``pools``, or None without any."""
        wanted = (
            runs for kinds, runs in self._touched.items() if runs and any(kind in pools for kind in kinds)
        )
        firsts = (next(iter(runs.items())) for runs in wanted)
        found = min(firsts, key=lambda item: item[1], default=None)
        return None if found is None else found[0]
