"""The time that this node takes to compute tokens, which bounds its waits for what others have computed.

The engine notes every forward; the tiers below the device ask before they wait.
"""

from __future__ import annotations

from typing import Final

SHARE_OF_EARLIER: Final = 0.8
"""The weight of a forward, as a share of that of the next one."""


class Pace:
    """The time that forwards took lately."""

    def __init__(self) -> None:
        self._num_tokens = self._secs = 0.0
        """Tokens of forwards and the time that they took; earlier ones count less."""

    def note(self, num_tokens: int, secs: float) -> None:
        """Note how long a forward took."""
        self._num_tokens = SHARE_OF_EARLIER * self._num_tokens + num_tokens
        self._secs = SHARE_OF_EARLIER * self._secs + secs

    def secs_for(self, num_tokens: int) -> float | None:
        """Return how long computing so many tokens takes; None before the first forward."""
        return num_tokens * self._secs / self._num_tokens if self._num_tokens else None
