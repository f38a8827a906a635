"""The time for which decode nodes are silent, as a router knows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hisparse_pd.router.relay import DECODE_SILENCE_SECS
from hisparse_pd.serving.http.wait_timer import WaitTimer
from tests.waiting import until


class Silence:
    """The router's clock for a decode node's silence, which only the test advances."""

    def __init__(self) -> None:
        self.limit_secs = DECODE_SILENCE_SECS
        """The router's limit for this silence; its waits with other limits are timed by the real clock."""
        self._num_waits = 0
        self._now = 0.0
        self._numbers = itertools.count()
        self._ends: dict[int, tuple[float, Callable[[], None]]] = {}

    def wait_timer(self, secs: float, on_lost: Callable[[], None]) -> Any:
        """Make the replacement of a ``WaitTimer``."""
        if secs != self.limit_secs:
            return WaitTimer(secs, on_lost)
        number = next(self._numbers)

        def begin() -> None:
            self._num_waits += 1
            self._ends[number] = (self._now + secs, on_lost)

        def end() -> None:
            self._ends.pop(number, None)

        return SimpleNamespace(begin=begin, end=end, close=end)

    @property
    def is_waited_in(self) -> bool:
        """Whether the router waits for a node now."""
        return bool(self._ends)

    async def waited_for_again(self) -> None:
        """Wait until the router has received something from the node and waits for more."""
        num_waits = self._num_waits
        await until(lambda: self._num_waits > num_waits)

    def advance(self, secs: float) -> None:
        self._now += secs
        for ends_at, on_lost in list(self._ends.values()):
            if ends_at <= self._now:
                on_lost()
