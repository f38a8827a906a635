"""Counts of swap-ins for a row of the tables, for the statistics of its request and for the metrics.

Kernels count in each row, a step's results carry the counts to the host (``step_results.py``), and
``RequestTables`` sums them up.
"""

from __future__ import annotations

from typing import NamedTuple


class SwapCounts(NamedTuple):
    """Counts of the swap-ins of one or more requests, over all steps and index groups. A position that is
    selected several times counts once a step and group."""

    hits: int = 0
    """Selected positions that were in the hot buffer."""
    misses: int = 0
    """Selected positions that were not, so that their items came from the host pool."""
    evictions: int = 0
    """Positions that lost their entry to a miss or to a new position. Taking a free entry counts nothing."""

    @property
    def miss_share(self) -> float:
        """The share of selected positions that were not in the hot buffer; 0 where nothing was selected."""
        return self.misses / max(1, self.hits + self.misses)

    def plus(self, other: SwapCounts) -> SwapCounts:
        return SwapCounts(
            self.hits + other.hits, self.misses + other.misses, self.evictions + other.evictions
        )
