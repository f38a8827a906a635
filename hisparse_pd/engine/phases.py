"""How a request passes through an engine: its phases, which follow one another without a gap.

Engines keep them on their monotonic clock and tell their fronts of those that have ended, on the wall clock,
which processes and machines share. Fronts make histograms and spans of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct

PREFILL_PHASES = ("queue", "prefill", "transfer")
"""On a prefill node: until the first of the KV is computed; until all is; and what is left then of sending
it."""

DECODE_PHASES = ("queue", "landing", "first_step")
"""On a decode node: until the landing zone is reserved; until all KV is in it; until the answer's first
token."""


class Phase(Struct, frozen=True, array_like=True):
    """One that has ended. Times are Unix time, in seconds."""

    name: str
    started_at: float
    ended_at: float

    @property
    def secs(self) -> float:
        return max(0.0, self.ended_at - self.started_at)


class PhaseLog:
    """The phases of one request, by name in their order. Times are of ``time.monotonic``."""

    __slots__ = ("_ends", "_names", "_num_taken")

    def __init__(self, names: Sequence[str], started_at: float) -> None:
        self._names = names
        self._ends = [started_at]
        self._num_taken = 0

    def end(self, now: float) -> None:
        """The present phase is over, and the next one begins. Behind the last one nothing happens."""
        if len(self._ends) <= len(self._names):
            self._ends.append(now)

    def secs(self, name: str) -> float:
        """That a phase took; 0 while it has not ended."""
        number = self._names.index(name)
        ends = self._ends[number : number + 2]
        return max(0.0, ends[1] - ends[0]) if len(ends) == 2 else 0.0

    def take(self) -> tuple[Phase, ...]:
        """Those that have ended since the last call."""
        first, last = self._num_taken, len(self._ends) - 1
        if first == last:
            return ()
        self._num_taken = last
        ahead = wall_clock_ahead()
        return tuple(
            Phase(self._names[number], self._ends[number] + ahead, self._ends[number + 1] + ahead)
            for number in range(first, last)
        )


def wall_clock_ahead() -> float:
    """What Unix time is ahead of ``time.monotonic``, in seconds.

    To be asked each time: clocks are set, and machines suspended.
    """
    readings = []
    for _ in range(3):  # between two readings the thread may have to wait; the closest ones count
        before = time.monotonic()
        wall = time.time()
        after = time.monotonic()
        readings.append((after - before, wall - before))
    return min(readings)[1]
