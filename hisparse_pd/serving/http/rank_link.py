"""A front's link to the engine of one rank: the socket, and the messages to be sent.

``EngineLink`` has one for each rank. There is no task: the link sends and receives in callbacks of the event
loop (``_turn``), each of which takes a bounded time and schedules the next one while there is work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from hisparse_pd.engine.messages import FromEngine, ToEngine
from hisparse_pd.engine.sockets import Crossing, FrontSocket
from hisparse_pd.serving.http.board import InFlightCounts
from hisparse_pd.serving.http.engine_reports import EngineReports

_MAX_SENT_A_TURN = 8
"""Limit of messages that are sent in one turn; some have a prompt of megabytes."""


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
        """``endpoint``: the ZMQ endpoint that the socket binds. ``in_flight``: the node's counts.

        ``on_lost``: called when an engine on another machine is gone after it had reported. ``crossing``:
        keys, allowed peers and heartbeats of the connection; None for a node of one machine.
        """
        self.rank = rank
        self.reports = EngineReports()
        self._endpoint = endpoint
        self._in_flight = in_flight
        self._on_message = on_message
        self._on_lost = on_lost
        self._crossing = crossing
        self.outbox: deque[tuple[ToEngine | None, Callable[[], None]]] = deque()
        """Messages to send, in order, each with what to call once it is sent; see ``put``."""
        self._socket: FrontSocket | None = None
        self._next_turn: asyncio.Handle | None = None

    @property
    def num_tokens_in_flight(self) -> int:
        """Prompt tokens of the samples that the engine has, from all fronts."""
        return self._in_flight.num_prompt_tokens_of(self.rank)

    @property
    def num_samples_given(self) -> int:
        """Samples that the engine was ever given, by all fronts."""
        return self._in_flight.num_samples_given_to(self.rank)

    def start(self) -> None:
        """Bind the socket and begin to talk. Needs a running event loop. Raises OSError."""
        self._socket = FrontSocket(self._endpoint, self._crossing)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._schedule_turn)
        if (losses := self._socket.loss_fileno) is not None:
            asyncio.get_running_loop().add_reader(losses, self._check_loss)
            self._check_loss()  # the descriptor reports later losses only after a first look
        self._schedule_turn()

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
        """Queue a message, without waiting. ``on_sent`` is called once it and all before it are sent.

        None sends nothing, and only calls ``on_sent`` in its turn.
        """
        self.outbox.append((message, on_sent))
        self._schedule_turn()

    async def flush(self) -> None:
        """Wait until all queued messages have gone."""
        gone = asyncio.Event()
        self.put(None, gone.set)
        await gone.wait()

    def _check_loss(self) -> None:
        """Report if the engine, on another machine, is gone."""
        assert self._socket is not None
        if self._socket.take_loss() and self.reports.has_begun:
            self._on_lost(self)

    def _schedule_turn(self) -> None:
        """Schedule a turn after the callbacks that are due already."""
        if self._next_turn is None and self._socket is not None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Send some messages, take in those that have come, and schedule a turn if there is more to do."""
        assert self._socket is not None
        self._next_turn = None
        for _ in range(min(_MAX_SENT_A_TURN, len(self.outbox))):
            message, on_sent = self.outbox[0]
            if message is not None and not self._socket.send(message):
                break
            self.outbox.popleft()
            on_sent()
        for received in self._socket.receive():
            self._on_message(self, received)
        # The first message tells which connection is the engine's. If that one ended before the message
        # was read, the descriptor of losses has reported it already, when nobody knew whose it was.
        self._check_loss()
        if self._socket.is_ready(to_send=bool(self.outbox)):
            self._schedule_turn()
