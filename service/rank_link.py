"""The front's side of one engine: the socket, what waits to be sent, and what the engine last said of itself.

A node has one engine a rank. One receive task hands every message on, one send task keeps the order of what
goes out.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from service.engine_messages import (
    EngineLoading,
    EngineReady,
    EngineStats,
    FromEngine,
    ToEngine,
)
from service.engine_sockets import FrontSocket

_MESSAGES_BETWEEN_YIELDS = 8
"""ZMQ's sockets do not let other tasks run as long as they need not wait."""


class RankLink:
    """The connection to the engine of ``rank``."""

    def __init__(self, rank: int, ipc_path: str, on_message: Callable[[RankLink, FromEngine], None]) -> None:
        self.rank = rank
        self.loading: EngineLoading | None = None
        """How far it was when it last said so, until it is ready."""
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.num_tokens_in_flight = 0
        """Prompt tokens of the samples that it has."""
        self.num_given = 0
        """Samples that it ever got."""
        self._ipc_path = ipc_path
        self._on_message = on_message
        self._outbox: asyncio.Queue[tuple[ToEngine | None, Callable[[], None]]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._socket: FrontSocket | None = None
        self._last_stats_at = self._last_progress_at = time.monotonic()

    def start(self) -> None:
        """Bind the socket and start talking; needs a running event loop."""
        self._socket = FrontSocket(self._ipc_path)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    def put(self, message: ToEngine | None, on_sent: Callable[[], None] = lambda: None) -> None:
        """Never waits. ``on_sent``: called once it, and all before it, has gone. None: nothing goes."""
        self._outbox.put_nowait((message, on_sent))

    async def flush(self) -> None:
        """Until all that was put has gone."""
        await self._outbox.join()

    def note(self, message: EngineLoading | EngineReady | EngineStats) -> None:
        """What the engine says of itself."""
        now = time.monotonic()
        match message:
            case EngineLoading():
                if message != self.loading:
                    self._last_progress_at = now
                self.loading = message
            case EngineReady():
                self.ready, self.loading = message, None
                self._last_stats_at = self._last_progress_at = now
            case EngineStats():
                if self.stats is None or message.step != self.stats.step or message.num_running == 0:
                    self._last_progress_at = now
                self._last_stats_at = now
                self.stats = message

    def stall(self, startup_timeout_secs: float, health_timeout_secs: float) -> str | None:
        """Why the engine gets nowhere, or None while it makes progress, loading included."""
        now = time.monotonic()
        if self.ready is None:
            still_secs = now - self._last_progress_at
            if still_secs <= startup_timeout_secs:
                return None
            return f"loading has stood still for {still_secs:.0f} s, at: {self.loading or 'the beginning'}"
        if now - self._last_stats_at > health_timeout_secs:
            return f"the engine has been silent for {now - self._last_stats_at:.0f} s"
        if now - self._last_progress_at > health_timeout_secs:
            return f"the engine has made no progress for {now - self._last_progress_at:.0f} s"
        return None

    async def _send(self) -> None:
        assert self._socket is not None
        for num_sent in itertools.count(1):
            message, on_sent = await self._outbox.get()
            if message is not None:
                await self._socket.send(message)
            on_sent()
            self._outbox.task_done()
            if num_sent % _MESSAGES_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)

    async def _receive(self) -> None:
        assert self._socket is not None
        for num_received in itertools.count(1):
            self._on_message(self, await self._socket.receive())
            if num_received % _MESSAGES_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
