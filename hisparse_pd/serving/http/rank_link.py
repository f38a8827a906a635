"""The front's side of one engine: the socket, what waits to be sent, and what the engine last said of itself.

A node has one engine a rank. No task waits here: what has come is handed on, and what is to go leaves, in
turns of the event loop that take a bounded time each.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from hisparse_pd.base.settings import STARTUP_TIMEOUT_SECS
from hisparse_pd.engine.messages import EngineLoading, EngineReady, EngineStats, FromEngine, ToEngine
from hisparse_pd.engine.sockets import Crossing, FrontSocket
from hisparse_pd.serving.http.board import InFlightCounts

_SENT_A_TURN = 8
"""Messages, some of which have a prompt of megabytes."""


class RankLink:
    """The connection to the engine of ``rank``."""

    def __init__(
        self,
        rank: int,
        endpoint: str,
        in_flight: InFlightCounts,
        on_message: Callable[[RankLink, FromEngine], None],
        on_lost: Callable[[RankLink], None],
        crossing: Crossing | None,
    ) -> None:
        """``endpoint``: ZMQ's, which the socket binds; ``in_flight``: the node's, in which it is counted.

        ``on_lost``: called when an engine on another machine is gone that had said something.
        """
        self.rank = rank
        self.loading: EngineLoading | None = None
        """How far it was when it last said so, until it is ready."""
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.has_told_since_leaving = True
        """Whether ``stats`` are younger than the node's decision to leave."""
        self._endpoint = endpoint
        self._in_flight = in_flight
        self._on_message = on_message
        self._on_lost = on_lost
        self._crossing = crossing
        self._outbox: deque[tuple[ToEngine | None, Callable[[], None]]] = deque()
        self._socket: FrontSocket | None = None
        self._next_turn: asyncio.Handle | None = None
        self._last_stats_at = self._last_progress_at = time.monotonic()

    @property
    def num_tokens_in_flight(self) -> int:
        """Prompt tokens of the samples that it has, of all fronts."""
        return self._in_flight.tokens_of(self.rank)

    @property
    def num_given(self) -> int:
        """Samples that it ever got, of all fronts."""
        return self._in_flight.given_to(self.rank)

    def start(self) -> None:
        """Bind the socket and start talking; needs a running event loop. Raises OSError."""
        self._socket = FrontSocket(self._endpoint, self._crossing)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._wake)
        if (losses := self._socket.loss_fileno) is not None:
            asyncio.get_running_loop().add_reader(losses, self._check_loss)
            self._check_loss()  # only who has looked is told of what follows
        self._wake()

    def close(self) -> None:
        if self._socket is not None:
            if self._next_turn is not None:
                self._next_turn.cancel()
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            if (losses := self._socket.loss_fileno) is not None:
                asyncio.get_running_loop().remove_reader(losses)
            self._socket.close()
            self._socket = None

    def put(self, message: ToEngine | None, on_sent: Callable[[], None] = lambda: None) -> None:
        """Never waits. ``on_sent``: called once it, and all before it, has gone. None: nothing goes."""
        self._outbox.append((message, on_sent))
        self._wake()

    async def flush(self) -> None:
        """Until all that was put has gone."""
        gone = asyncio.Event()
        self.put(None, gone.set)
        await gone.wait()

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
                has_to_step = message.num_running > message.num_without_grammar
                if self.stats is None or message.step != self.stats.step or not has_to_step:
                    self._last_progress_at = now
                self._last_stats_at = now
                self.stats, self.has_told_since_leaving = message, True

    def stall(self, health_timeout_secs: float) -> str | None:
        """Why the engine gets nowhere, or None while it makes progress, loading included."""
        now = time.monotonic()
        if self.ready is None:
            still_secs = now - self._last_progress_at
            if still_secs <= STARTUP_TIMEOUT_SECS:
                return None
            return f"loading has stood still for {still_secs:.0f} s, at: {self.loading or 'the beginning'}"
        if now - self._last_stats_at > health_timeout_secs:
            return f"the engine has been silent for {now - self._last_stats_at:.0f} s"
        if now - self._last_progress_at > health_timeout_secs:
            return f"the engine has made no progress for {now - self._last_progress_at:.0f} s"
        return None

    def _check_loss(self) -> None:
        assert self._socket is not None
        if self._socket.take_loss() and (self.ready is not None or self.loading is not None):
            self._on_lost(self)

    def _wake(self) -> None:
        """Take a turn soon, behind those who have something to do already."""
        if self._next_turn is None and self._socket is not None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        assert self._socket is not None
        self._next_turn = None
        for _ in range(min(_SENT_A_TURN, len(self._outbox))):
            message, on_sent = self._outbox[0]
            if message is not None and not self._socket.send(message):
                break
            self._outbox.popleft()
            on_sent()
        for received in self._socket.receive():
            self._on_message(self, received)
        self._check_loss()  # with the first message it is known which connection is the engine's
        if self._socket.is_ready(to_send=bool(self._outbox)):
            self._wake()
