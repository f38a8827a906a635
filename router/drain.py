"""The router's shutdown: no new requests, time for those in flight, then an error for the rest.

The server (``server.py``) runs each request in ``in_flight`` and its waits in ``time_left``; the process
(``process.py``) calls ``finish`` at a signal. ``Drain`` counts the requests in flight. It owns no socket: the
server goes on listening, so that new clients get a 503 that tells them to retry, instead of a connection that
nobody accepts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from hisparse_pd.router.errors import RouterError

_POLL_SECS = 0.05


class ShuttingDown(RouterError):
    """The router shuts down: the request was not accepted, or did not finish in time."""

    def __init__(self) -> None:
        super().__init__(503, "the router is shutting down; send the request again")


class Drain:
    """Counts requests in flight, each until its answer is complete, and ends them when the router stops."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_in_flight = 0
        self._limits: set[asyncio.Timeout] = set()
        """Timeouts of the waits under way. They have no time limit until the drain ends, and expire then."""
        self._ends_at: float | None = None
        """Time of the event loop at which the drain ended; None before."""

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request for as long as the context is open. Raises ShuttingDown once the drain has
        begun."""
        if self.is_draining:
            raise ShuttingDown
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    @asynccontextmanager
    async def time_left(self) -> AsyncIterator[None]:
        """Limit a wait of a request to the drain's end. Raises ShuttingDown when the drain ends first."""
        limit = asyncio.timeout_at(self._ends_at)
        self._limits.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise ShuttingDown from None
            raise
        finally:
            self._limits.discard(limit)

    async def finish(self, timeout_secs: float, is_hurried: Callable[[], bool]) -> None:
        """Accept no new request, and return when none is in flight or their time is up.

        Requests that are left after ``timeout_secs`` end with ShuttingDown, and so do those that are left
        once ``is_hurried``, which tells whether a second signal asks to stop at once.
        """
        self.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_secs
        while self.num_in_flight and loop.time() < deadline and not is_hurried():
            await asyncio.sleep(_POLL_SECS)
        self._ends_at = loop.time()
        for limit in self._limits:
            limit.reschedule(self._ends_at)
