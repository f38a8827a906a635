"""The fronts of a node, which serve on one port: what the first one and the others tell each other.

The first front starts the engines and the other fronts, gets the signals, and decides when all of them leave.
It alone renders ``/metrics``, out of what each front has counted. Requests go to whichever front accepts
their connection; what they must share, ``NodeCounts`` has.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import assert_never

from msgspec import Struct
from msgspec.msgpack import Encoder
from starlette.types import ASGIApp

from hisparse_pd.http.channel import Channel, ChannelClosed
from hisparse_pd.http.engine_link import EngineLink
from hisparse_pd.http.http_errors import NodeUnavailable
from hisparse_pd.http.listening import Listener
from hisparse_pd.http.metrics import FrontMetrics
from hisparse_pd.http.workers import Workers
from protocol.decoding import TypedDecoder

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the node is shutting down; send the request again"


class StopAccepting(Struct, frozen=True, tag="stop_accepting"):
    """New requests are refused, those in flight go on."""


class Leave(Struct, frozen=True, tag="leave"):
    """End what is in flight, tell the engines, and exit. ``died``: what has, when that is why."""

    died: str = ""


_encoder = Encoder()
_decoder: TypedDecoder[StopAccepting | Leave] = TypedDecoder(StopAccepting | Leave)


class Fronts:
    """The first front's side; ``workers`` are the others."""

    def __init__(self, workers: Workers, metrics: FrontMetrics) -> None:
        self.workers = workers
        self._metrics = metrics

    async def connect(self) -> None:
        await self.workers.connect(lambda index, note: None, self._on_question)

    async def _on_question(self, index: int, question: bytes) -> bytes:
        return await self.render_metrics()

    async def render_metrics(self) -> bytes:
        """Those of the node."""
        return self._metrics.render(await self.workers.collect())

    def stop_accepting(self) -> None:
        self.workers.tell(_encoder.encode(StopAccepting()))

    async def leave(self, died: str = "") -> None:
        """Until the others have left."""
        self.workers.tell(_encoder.encode(Leave(died)))
        await self.workers.left()


class FrontWorker:
    """A further front's side, in a process of its own."""

    def __init__(self, link: EngineLink, metrics: FrontMetrics, sock: socket.socket) -> None:
        self._link = link
        self._metrics = metrics
        self._channel = Channel(sock, self._on_note, self._on_question)
        self._leave: asyncio.Future[Leave] | None = None

    async def render_metrics(self) -> bytes:
        """Those of the node. Raises NodeUnavailable when the first front is gone."""
        try:
            return await self._channel.ask(b"")
        except ChannelClosed:
            raise NodeUnavailable(SHUTTING_DOWN) from None

    async def serve(self, listener: Listener, app: ASGIApp) -> None:
        """Until the first front says so. Its death is the kernel's to see to."""
        self._leave = asyncio.get_running_loop().create_future()
        await self._channel.open()
        self._link.start()
        server = listener.server(app, process=self._link.front)
        running = asyncio.create_task(server.serve(sockets=[listener.socket]))
        try:
            await asyncio.wait((self._leave, running), return_when=asyncio.FIRST_COMPLETED)
            if self._leave.done():
                await self._end_requests(self._leave.result())
            server.should_exit = True
            await running
        finally:
            await self._channel.close()
            self._link.close()

    async def _end_requests(self, leave: Leave) -> None:
        if leave.died:
            self._link.engine_died(leave.died)
        else:
            self._link.fail_all(503, SHUTTING_DOWN)
            await self._link.shut_engines_down()

    def _on_note(self, body: bytes) -> None:
        match message := _decoder.decode(body):
            case StopAccepting():
                self._link.stop_accepting()
            case Leave():
                if self._leave is not None and not self._leave.done():
                    self._leave.set_result(message)
            case _:
                assert_never(message)

    async def _on_question(self, question: bytes) -> bytes:
        return self._metrics.pack()
