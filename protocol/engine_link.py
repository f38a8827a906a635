"""The front's side of the conversation with its engine: who waits for what, and whether the engine lives.

One receive task hands every message to the group of samples that waits for it, one send task keeps the order
of what goes out. Opening and closing a group never waits, so a cancelled handler still aborts what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import assert_never

from protocol.channels import FrontSocket
from protocol.engine_messages import (
    Abort,
    EngineReady,
    EngineStats,
    FlushCache,
    FromEngine,
    Generate,
    PrefillFinished,
    ReleaseQuarantine,
    RequestFailed,
    Shutdown,
    ToEngine,
    Tokens,
)
from protocol.http_errors import NodeUnavailable

log = logging.getLogger(__name__)

SampleEvent = Tokens | PrefillFinished | RequestFailed


class LinkState(StrEnum):
    """LOADING → SERVING → STOPPING → GONE; any state may go to GONE when the engine dies."""

    LOADING = "the engine is loading"
    SERVING = "serving"
    STOPPING = "the node is shutting down"
    GONE = "the engine has died"


class SampleGroup:
    """The samples of one HTTP request and the queue of their events."""

    def __init__(self, link: EngineLink, request_ids: Sequence[str]) -> None:
        self._link = link
        self.live = set(request_ids)
        self._events: asyncio.Queue[SampleEvent] = asyncio.Queue()
        self._num_waiting_tokens: Counter[str] = Counter()
        """``Tokens`` in the queue, by request id."""

    def put(self, event: SampleEvent) -> None:
        self._num_waiting_tokens[event.request_id] += isinstance(event, Tokens)
        self._events.put_nowait(event)

    async def next_event(self) -> SampleEvent:
        """The next event of any live sample.

        Waits as long as the engine makes progress: its own timeouts end requests. Raises NodeUnavailable when
        it makes none.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._link.health_timeout_secs):
                    event = await self._events.get()
                    self._num_waiting_tokens[event.request_id] -= isinstance(event, Tokens)
                    return event
            if (stall := self._link.stall()) is not None:
                raise NodeUnavailable(stall)

    def has_more_tokens(self, request_id: str) -> bool:
        """More output of the sample has come already."""
        return self._num_waiting_tokens[request_id] > 0

    def finish(self, request_id: str) -> None:
        """One sample is complete; no event of it follows. The engine is told unless it said so itself."""
        self._link.forget(self, request_id, has_finished=True)


class EngineLink:
    """Owner of the front's socket, of the requests in flight and of what the engine last said of itself."""

    def __init__(
        self,
        ipc_path: str,
        health_timeout_secs: float,
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_connected``: called once the engine is ready, and so connected."""
        self.health_timeout_secs = health_timeout_secs
        self.state = LinkState.LOADING
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self._ipc_path = ipc_path
        self._on_stats = on_stats
        self._on_connected = on_connected
        self._groups: dict[str, SampleGroup] = {}
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
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

    @property
    def num_in_flight(self) -> int:
        return len(self._groups)

    @contextlib.contextmanager
    def open(self, generates: Sequence[Generate]) -> Iterator[SampleGroup]:
        """Send the samples of one HTTP request. On leaving, whatever has not ended is aborted.

        Raises NodeUnavailable unless the engine serves.
        """
        self.require_serving()
        group = SampleGroup(self, [generate.request_id for generate in generates])
        try:
            for generate in generates:
                self._groups[generate.request_id] = group
                self._outbox.put_nowait(generate)
            yield group
        finally:
            for request_id in list(group.live):
                self.forget(group, request_id)

    def require_serving(self) -> EngineReady:
        """What the ready engine said. Raises NodeUnavailable."""
        if self.ready is None or self.state is not LinkState.SERVING:
            raise NodeUnavailable(str(self.state))
        return self.ready

    def require_engine(self) -> EngineReady:
        """The same for requests in flight, which go on while the node shuts down. Raises NodeUnavailable."""
        if self.ready is None or self.state is LinkState.GONE:
            raise NodeUnavailable(str(self.state))
        return self.ready

    def forget(self, group: SampleGroup, request_id: str, *, has_finished: bool = False) -> None:
        if request_id in group.live:
            group.live.discard(request_id)
            del self._groups[request_id]
            self._outbox.put_nowait(Abort(request_id, has_finished))

    def flush_cache(self) -> None:
        self.require_serving()
        self._outbox.put_nowait(FlushCache())

    def release_quarantine(self, instance_id: str) -> None:
        self.require_engine()
        self._outbox.put_nowait(ReleaseQuarantine(instance_id))

    def stop_accepting(self) -> None:
        """New requests are refused; those in flight go on."""
        if self.state is not LinkState.GONE:
            self.state = LinkState.STOPPING

    async def shut_engine_down(self) -> None:
        """Ask the engine to exit, after everything that was sent before."""
        self._outbox.put_nowait(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._outbox.join(), timeout=1.0)

    def engine_died(self) -> None:
        self.state = LinkState.GONE
        self.fail_all(503, f"{LinkState.GONE}; the request is lost, send it again")

    def fail_all(self, status: int, error: str) -> None:
        """End every request in flight with an error."""
        for request_id in list(self._groups):
            self._dispatch(RequestFailed(request_id, status, error))
            self._outbox.put_nowait(Abort(request_id))

    def trouble(self) -> str | None:
        """Why this node cannot serve, or None while the engine makes progress. Looks at no peer."""
        if self.state is not LinkState.SERVING:
            return str(self.state)
        return self.stall() or (self.stats.trouble if self.stats is not None else "") or None

    def stall(self) -> str | None:
        """Why requests in flight get nowhere, or None while the engine makes progress."""
        if self.state is LinkState.GONE:
            return str(self.state)
        now = time.monotonic()
        if now - self._last_stats_at > self.health_timeout_secs:
            return f"the engine has been silent for {now - self._last_stats_at:.0f} s"
        if now - self._last_progress_at > self.health_timeout_secs:
            return f"the engine has made no progress for {now - self._last_progress_at:.0f} s"
        return None

    async def _send(self) -> None:
        assert self._socket is not None
        while True:
            message = await self._outbox.get()
            await self._socket.send(message)
            self._outbox.task_done()

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            self._handle(await self._socket.receive())

    def _handle(self, message: FromEngine) -> None:
        match message:
            case EngineReady():
                self.ready = message
                if self.state is LinkState.LOADING:
                    self.state = LinkState.SERVING
                self._last_stats_at = self._last_progress_at = time.monotonic()
                self._on_connected()
                log.info("the engine is ready: context of %d tokens", message.context_length)
            case EngineStats():
                self._note(message)
            case Tokens() | PrefillFinished() | RequestFailed():
                self._dispatch(message)
            case _:
                assert_never(message)

    def _note(self, stats: EngineStats) -> None:
        now = time.monotonic()
        if self.stats is None or stats.step != self.stats.step or stats.num_running == 0:
            self._last_progress_at = now
        self._last_stats_at = now
        self.stats = stats
        self._on_stats(stats)

    def _dispatch(self, event: SampleEvent) -> None:
        """Hand over, and drop the route with the last event. Events of aborted samples have no taker."""
        group = self._groups.get(event.request_id)
        if group is None:
            return
        if not isinstance(event, Tokens) or event.finish_reason is not None:
            group.live.discard(event.request_id)
            del self._groups[event.request_id]
        group.put(event)
