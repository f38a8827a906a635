"""How many requests had slots at a time a moment ago: as many may be there again in the next moment."""

from __future__ import annotations

from collections import deque
from typing import Final

RECENT_SECS: Final = 1.0
"""Time for which a number of requests counts as recent. A client that asks again has its answer's end and its
next request within that; a load that has fallen leaves its memory to others after it."""


class RecentLoad:
    """The most requests that had slots at a time in the last RECENT_SECS."""

    def __init__(self) -> None:
        self._falling: deque[tuple[float, int]] = deque()
        """Times until which a number is recent, and the numbers, each larger than those behind it."""

    def most(self, num_requests: int, now: float) -> int:
        """Note how many requests have slots at ``now``, and return the most of them."""
        while self._falling and self._falling[-1][1] <= num_requests:
            self._falling.pop()
        self._falling.append((now + RECENT_SECS, num_requests))
        while self._falling[0][0] < now:
            self._falling.popleft()
        return self._falling[0][1]
