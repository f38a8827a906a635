"""The front's side of the conversation with its engine: who waits for what, and whether the engine lives.

One receive task hands every message to the group of samples that waits for it, one send task keeps the order
of what goes out. Opening and closing a group never waits, so a cancelled handler still aborts what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from service.engine_messages import (
    Abort,
    EngineLoading,
    EngineReady,
    EngineStats,
    FlushCache,
    FromEngine,
    GenerateGroup,
    PrefillFinished,
    ReleaseQuarantine,
    RequestFailed,
    Shutdown,
    ToEngine,
    Tokens,
)
from service.engine_sockets import FrontSocket
from service.http_errors import ApiError, NodeUnavailable, QueueFull
from service.settings import NodeSettings

log = logging.getLogger(__name__)

SampleEvent = Tokens | PrefillFinished | RequestFailed

_MESSAGES_BETWEEN_YIELDS = 8
"""ZMQ's sockets do not let other tasks run as long as they need not wait."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may be in flight. A prompt's tokens count once, for all of its samples."""

    max_requests: int
    max_prompt_tokens: int

    @classmethod
    def of(cls, settings: NodeSettings) -> QueueLimits:
        return cls(settings.max_running_requests + settings.max_queued_requests, settings.max_queued_tokens)


@dataclass(frozen=True, slots=True)
class _Closed:
    """Behind the last word about a group in the outbox: its prompts are no longer held here."""

    num_prompt_tokens: int


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
        await asyncio.sleep(0)  # what has come already is not waited for, and others want their turn
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
        startup_timeout_secs: float = 300.0,
        limits: QueueLimits = QueueLimits(sys.maxsize, sys.maxsize),
    ) -> None:
        """``on_connected``: called once the engine is ready, and so connected.

        ``startup_timeout_secs``: how long loading may stand still.
        """
        self.limits = limits
        self.health_timeout_secs = health_timeout_secs
        self._startup_timeout_secs = startup_timeout_secs
        self.state = LinkState.LOADING
        self.loading: EngineLoading | None = None
        """How far it was when it last said so, until it is ready."""
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self._ipc_path = ipc_path
        self._on_stats = on_stats
        self._on_connected = on_connected
        self._groups: dict[str, SampleGroup] = {}
        self._num_prompt_tokens = self._num_unsent_aborts = 0
        self._outbox: asyncio.Queue[ToEngine | _Closed] = asyncio.Queue()
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
    def is_loading(self) -> bool:
        return self.state is LinkState.LOADING

    @property
    def num_in_flight(self) -> int:
        return len(self._groups)

    @contextlib.contextmanager
    def open(self, prompts: Sequence[GenerateGroup]) -> Iterator[SampleGroup]:
        """Send the samples of one HTTP request. On leaving, whatever has not ended is aborted.

        Raises NodeUnavailable unless the engine serves, and QueueFull.
        """
        self.require_serving()
        request_ids = [sample.request_id for prompt in prompts for sample in prompt.samples]
        num_prompt_tokens = sum(prompt.samples[0].num_prompt_tokens for prompt in prompts)
        self.require_place(len(request_ids), num_prompt_tokens)
        group = SampleGroup(self, request_ids)
        self._num_prompt_tokens += num_prompt_tokens
        try:
            self._groups.update(dict.fromkeys(request_ids, group))
            for prompt in prompts:
                self._outbox.put_nowait(prompt)
            yield group
        finally:
            for request_id in list(group.live):
                self.forget(group, request_id)
            self._outbox.put_nowait(_Closed(num_prompt_tokens))

    def require_place(self, num_samples: int, num_prompt_tokens: int = 0) -> None:
        """Raises QueueFull when so much does not fit beside what is in flight, ApiError when it never does.

        A request whose client left is in flight until its abort, and so all of it, has gone to the engine.
        """
        for num, most, name in (
            (num_samples, self.limits.max_requests, "samples"),
            (num_prompt_tokens, self.limits.max_prompt_tokens, "prompt tokens"),
        ):
            if num > most:
                raise ApiError(400, f"{num} {name} are in this request, {most} fit in this node; split it")
        num_in_flight = len(self._groups) + self._num_unsent_aborts
        if num_in_flight + num_samples > self.limits.max_requests:
            raise QueueFull(
                f"{num_in_flight} requests run or wait here, and {num_samples} more would exceed "
                f"{self.limits.max_requests} (max_running_requests + max_queued_requests); try again later"
            )
        if self._num_prompt_tokens + num_prompt_tokens > self.limits.max_prompt_tokens:
            raise QueueFull(
                f"prompts of {self._num_prompt_tokens} tokens run or wait here, and {num_prompt_tokens} more "
                f"would exceed {self.limits.max_prompt_tokens} (max_queued_tokens); try again later"
            )

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
            self._abort(Abort(request_id, has_finished))

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
            self._abort(Abort(request_id))

    def trouble(self) -> str | None:
        """Why this node cannot serve, or None while the engine makes progress. Looks at no peer."""
        if self.is_loading:
            return self.stall() or (f"{self.state}: {self.loading}" if self.loading else str(self.state))
        if self.state is not LinkState.SERVING:
            return str(self.state)
        return self.stall() or (self.stats.trouble if self.stats is not None else "") or None

    def stall(self) -> str | None:
        """Why the engine gets nowhere, or None while it makes progress, loading included."""
        if self.state is LinkState.GONE:
            return str(self.state)
        now = time.monotonic()
        if self.ready is None:
            still_secs = now - self._last_progress_at
            if still_secs <= self._startup_timeout_secs:
                return None
            return f"loading has stood still for {still_secs:.0f} s, at: {self.loading or 'the beginning'}"
        if now - self._last_stats_at > self.health_timeout_secs:
            return f"the engine has been silent for {now - self._last_stats_at:.0f} s"
        if now - self._last_progress_at > self.health_timeout_secs:
            return f"the engine has made no progress for {now - self._last_progress_at:.0f} s"
        return None

    async def _send(self) -> None:
        assert self._socket is not None
        for num_sent in itertools.count(1):
            message = await self._outbox.get()
            if isinstance(message, _Closed):
                self._num_prompt_tokens -= message.num_prompt_tokens
            else:
                await self._socket.send(message)
                self._num_unsent_aborts -= isinstance(message, Abort)
            self._outbox.task_done()
            if num_sent % _MESSAGES_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)

    async def _receive(self) -> None:
        assert self._socket is not None
        for num_received in itertools.count(1):
            self._handle(await self._socket.receive())
            if num_received % _MESSAGES_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)

    def _abort(self, abort: Abort) -> None:
        self._num_unsent_aborts += 1
        self._outbox.put_nowait(abort)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case EngineLoading():
                if message != self.loading:
                    self._last_progress_at = time.monotonic()
                self.loading = message
            case EngineReady():
                self.ready = message
                self.loading = None
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
