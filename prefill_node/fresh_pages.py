"""Pages of the device whose rows have just been verified, because a tier below brought them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FRESH_SECS: Final = 0.1
"""Time after its verification for which a page counts as fresh. A request that waited for its pages begins
within a few turns of the loop, unless others are before it."""


class FreshPages:
    """When each of ``num_pages`` pages was verified as it arrived, by ``clock``. Whoever is about to read a
    fresh page (``row_verification.py``) need not verify it again."""

    def __init__(self, num_pages: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_secs = np.full(num_pages, -np.inf)

    def expect(self, page_ids: NDArray[np.int64]) -> None:
        """Note that the rows of pages, int64 [n], are on their way, and verified when they are there: they
        count as fresh until ``note`` or ``forget``."""
        self._until_secs[page_ids] = np.inf

    def note(self, page_ids: NDArray[np.int64]) -> None:
        """Note that all rows of pages, int64 [n], are right now."""
        self._until_secs[page_ids] = self._clock() + FRESH_SECS

    def forget(self, page_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Note that pages have wrong rows, or that a request gets them and will write to them."""
        self._until_secs[page_ids] = -np.inf

    def are_fresh(self, page_ids: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return which pages, integers [n], are fresh, bool [n]."""
        fresh: NDArray[np.bool_] = self._clock() < self._until_secs[page_ids]
        return fresh
