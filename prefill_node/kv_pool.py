"""The page allocator of the prefill node's KV pool: owns the state of every page, and no memory.

The KV pool and the index pool are divided into the same pages: one page id names ``page_size`` token
slots in both. Every page is in exactly one state (``PageState``), and who holds it there is known:

    FREE -> OWNED (a room) -> CACHED (the prefix cache) -> FREE
                           -> IN_FLIGHT (an ended room with writes in the transport) -> FREE
                           -> FREE
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

PageId = NewType("PageId", int)


class PageState(IntEnum):
    """Who may use a page's memory."""

    FREE = 0
    """Nobody."""
    OWNED = 1
    """One live room computes into it, and the transport may read it."""
    CACHED = 2
    """The prefix cache keeps it; rooms that reference its node read it, nobody writes it."""
    IN_FLIGHT = 3
    """Its room ended, but the transport may still read it."""


class PoolExhausted(Exception):
    """More pages were asked for than are free."""


class PageStateError(Exception):
    """A page is not in the state that the operation needs: it was freed twice, or belongs to another."""


class IntegrityError(Exception):
    """The conservation law of a pool does not hold: pages leaked, or have two holders."""


class PagePool:
    """``num_pages`` pages of ``page_size`` token slots. Operations are all or nothing."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._states = np.full(num_pages, PageState.FREE, dtype=np.int8)
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = num_pages

    def count(self, state: PageState) -> int:
        """How many pages are in ``state``."""
        return self._counts[state]

    @property
    def num_free(self) -> int:
        return self._counts[PageState.FREE]

    @property
    def num_cached(self) -> int:
        return self._counts[PageState.CACHED]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` token slots need."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[PageId]:
        """FREE -> OWNED, in as few contiguous runs as can be. Raises PoolExhausted."""
        if num_pages > self.num_free:
            raise PoolExhausted(f"{num_pages} pages needed, {self.num_free} of {self.num_pages} free")
        page_ids = self._pick(num_pages)
        self._move(page_ids, PageState.FREE, PageState.OWNED)
        return page_ids

    def free(self, page_ids: Sequence[PageId]) -> None:
        """OWNED -> FREE. Raises PageStateError."""
        self._move(page_ids, PageState.OWNED, PageState.FREE)

    def cache(self, page_ids: Sequence[PageId]) -> None:
        """OWNED -> CACHED: the prefix cache takes the pages over. Raises PageStateError."""
        self._move(page_ids, PageState.OWNED, PageState.CACHED)

    def evict(self, page_ids: Sequence[PageId]) -> None:
        """CACHED -> FREE. Raises PageStateError."""
        self._move(page_ids, PageState.CACHED, PageState.FREE)

    def hold(self, page_ids: Sequence[PageId]) -> None:
        """OWNED -> IN_FLIGHT: the room ended, the transport has not. Raises PageStateError."""
        self._move(page_ids, PageState.OWNED, PageState.IN_FLIGHT)

    def let_go(self, page_ids: Sequence[PageId]) -> None:
        """IN_FLIGHT -> FREE: the transport is done with them. Raises PageStateError."""
        self._move(page_ids, PageState.IN_FLIGHT, PageState.FREE)

    def check_integrity(
        self, *, owned: Iterable[PageId], cached: Iterable[PageId], in_flight: Iterable[PageId]
    ) -> None:
        """Compare with what the holders say that they hold. Raises IntegrityError with every term."""
        held = {
            PageState.OWNED: sorted(owned),
            PageState.CACHED: sorted(cached),
            PageState.IN_FLIGHT: sorted(in_flight),
        }
        faults = []
        for state, page_ids in held.items():
            known = np.flatnonzero(self._states == state).tolist()
            if page_ids != known:
                faults.append(f"{state.name}: the pool has pages {known}, the holders name {page_ids}")
        for state in PageState:
            counted = int(np.count_nonzero(self._states == state))
            if counted != self._counts[state]:
                faults.append(f"{state.name}: {counted} pages, counted as {self._counts[state]}")
        if faults:
            terms = " + ".join(f"{self._counts[state]} {state.name}" for state in PageState)
            raise IntegrityError(f"{terms} of {self.num_pages} pages: " + "; ".join(faults))

    def _pick(self, num_pages: int) -> list[PageId]:
        """The smallest free run that holds all of them, else the longest runs first."""
        if num_pages == 0:
            return []
        is_free = np.concatenate(([0], (self._states == PageState.FREE).view(np.int8), [0]))
        edges = np.flatnonzero(np.diff(is_free))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        fitting = np.flatnonzero(lengths >= num_pages)
        if len(fitting):
            start = int(starts[fitting[np.argmin(lengths[fitting])]])
            return [PageId(page) for page in range(start, start + num_pages)]
        page_ids: list[PageId] = []
        for run in np.argsort(-lengths, kind="stable").tolist():
            start, length = int(starts[run]), int(lengths[run])
            take = min(length, num_pages - len(page_ids))
            page_ids.extend(PageId(page) for page in range(start, start + take))
            if len(page_ids) == num_pages:
                break
        return page_ids

    def _move(self, page_ids: Sequence[PageId], source: PageState, target: PageState) -> None:
        if not page_ids:
            return
        pages: npt.NDArray[np.int64] = np.asarray(page_ids, dtype=np.int64)
        outside = pages[(pages < 0) | (pages >= self.num_pages)]
        if len(outside):
            raise PageStateError(f"page {outside[0]} is not in a pool of {self.num_pages} pages")
        wrong = pages[self._states[pages] != source]
        if len(wrong):
            state = PageState(int(self._states[wrong[0]]))
            raise PageStateError(
                f"page {wrong[0]} is {state.name}, must be {source.name} to become {target.name}"
            )
        if len(np.unique(pages)) != len(pages):
            raise PageStateError(f"a page is named twice among {page_ids} on its way to {target.name}")
        self._states[pages] = target
        self._counts[source] -= len(pages)
        self._counts[target] += len(pages)
