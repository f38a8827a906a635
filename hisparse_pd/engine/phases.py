"""The phases of a request in an engine, which follow one another without a gap.

Either node's engine keeps a ``PhaseLog`` for each request or room, in its monotonic clock. It sends phases
that have ended to its fronts in Unix time, which processes and machines share; fronts make histograms and
spans of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct

PREFILL_PHASES = ("queue", "prefill", "transfer")
"""Phases on a prefill node. queue ends when the room is admitted, prefill when all its KV is computed,
transfer when all of it is sent."""

DECODE_PHASES = ("queue", "landing", "first_step")
"""Phases on a decode node. queue ends when the landing zone is reserved, landing when all KV is in it,
first_step with the answer's first token."""


class Phase(Struct, frozen=True, array_like=True):
    """A phase that has ended. Times are Unix time, in seconds."""

    name: str
    started_at: float
    ended_at: float

    @property
    def secs(self) -> float:
        return max(0.0, self.ended_at - self.started_at)


class PhaseLog:
    """The phases of one request, in order. Times are those of ``time.monotonic``, in seconds."""

    __slots__ = ("_bounds", "_names", "_num_taken")

    def __init__(self, names: Sequence[str], started_at: float) -> None:
        self._names = names
        self._bounds = [started_at]
        """When the first phase began, and each phase's end so far."""
        self._num_taken = 0

    def end(self, now: float) -> None:
        """End the present phase and begin the next one. Does nothing after the last phase."""
        if len(self._bounds) <= len(self._names):
            self._bounds.append(now)

    def reopen(self) -> None:
        """Go on with the phase that ended last, as if it had not ended."""
        self._bounds.pop()

    def secs(self, name: str) -> float:
        """Return the seconds that a phase took; 0 while it has not ended."""
        number = self._names.index(name)
        bounds = self._bounds[number : number + 2]
        return max(0.0, bounds[1] - bounds[0]) if len(bounds) == 2 else 0.0

    def take(self) -> tuple[Phase, ...]:
        """Return the phases that have ended since the last call."""
        first, last = self._num_taken, len(self._bounds) - 1
        if first == last:
            return ()
        self._num_taken = last
        ahead = wall_clock_ahead()
        return tuple(
            Phase(self._names[number], self._bounds[number] + ahead, self._bounds[number + 1] + ahead)
            for number in range(first, last)
        )


def wall_clock_ahead() -> float:
    """Return how far Unix time is ahead of ``time.monotonic``, in seconds.

    The difference changes when a clock is set or a machine suspended, so it must not be cached.
    """
    readings = []
    for _ in range(3):  # the thread may have to wait between two readings; the closest pair counts
        before = time.monotonic()
        wall = time.time()
        after = time.monotonic()
        readings.append((after - before, wall - before))
    return min(readings)[1]
