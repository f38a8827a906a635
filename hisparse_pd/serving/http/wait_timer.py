"""One timer that limits each of many short waits, for instance for each token of a stream.

``SampleGroup`` limits its waits for events with it, ``KeepAlive`` the silence of an answer, and the router
its waits for nodes. Setting a timer of the event loop for each wait would cost more than the wait. This one
is set once. When it fires and the present wait began later, it is set again for the rest of that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WaitTimer:
    """Calls ``on_timeout`` once when a wait has lasted ``secs``. Needs a running event loop."""

    def __init__(self, secs: float, on_timeout: Callable[[], None]) -> None:
        self._secs = secs
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._began_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin a wait. One that has begun already starts anew."""
        self._began_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._began_at + self._secs, self._check)

    def end(self) -> None:
        """End the wait."""
        self._began_at = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._began_at = None

    def _check(self) -> None:
        self._timer = None
        if self._began_at is None:
            return
        ends_at = self._began_at + self._secs
        if self._loop.time() >= ends_at:
            self._began_at = None
            self._on_timeout()
        else:
            self._timer = self._loop.call_at(ends_at, self._check)
