"""What swap-ins count for a row of the tables: for the statistics of its request, and for the metrics.

Kernels count in each row, a step's results carry the counts to the host (``step_results.py``), and
``RequestTables`` sums them up.
"""

from __future__ import annotations

from typing import NamedTuple


class SwapCounts(NamedTuple):
    """What the swap-ins of one or more requests have counted."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    def plus(self, other: SwapCounts) -> SwapCounts:
        return SwapCounts(
            self.hits + other.hits, self.misses + other.misses, self.evictions + other.evictions
        )
