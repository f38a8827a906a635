"""Says when the cluster's store is left alone: after an error or a late answer, for longer each time."""

from __future__ import annotations

from typing import Final

FIRST_PAUSE_SECS: Final = 1.0
LONGEST_PAUSE_SECS: Final = 60.0
"""Time for which the store is left alone after the first error or late answer, and after many."""


class StoreBackoff:
    """The pauses of one engine's store, each twice as long as the one before. Times are those of one clock,
    in seconds."""

    def __init__(self) -> None:
        self._paused_until = self._pause_secs = 0.0

    def is_paused(self, now: float) -> bool:
        return now < self._paused_until

    def pause(self, now: float) -> None:
        """Begin the next pause, unless one is under way."""
        if not self.is_paused(now):
            self._pause_secs = min(max(2 * self._pause_secs, FIRST_PAUSE_SECS), LONGEST_PAUSE_SECS)
            self._paused_until = now + self._pause_secs

    def reset(self) -> None:
        """End the pause, and let the next one be the first again."""
        self._paused_until = self._pause_secs = 0.0
