"""The fronts of a node, which serve on one port: how they start, what they tell each other, and their end.

The first front starts the engines and the other fronts, gets the signals, and decides when all of them leave.
One that leaves by itself ends the node, for a supervisor to start all of it again. The first one alone
renders ``/metrics``, out of what each front has counted. Requests go to whichever front accepts their
connection; what they must share, ``NodeCounts`` has.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import assert_never

from msgspec import Struct
from msgspec.msgpack import Encoder
from starlette.types import ASGIApp

from hisparse_pd.http.channel import Channel, ChannelClosed
from hisparse_pd.http.engine_link import EngineLink
from hisparse_pd.http.http_errors import NodeUnavailable
from hisparse_pd.http.listening import Listener
from hisparse_pd.http.metric_sums import NOTHING
from hisparse_pd.http.metrics import FrontMetrics
from hisparse_pd.process import die_with_parent
from protocol.decoding import TypedDecoder

log = logging.getLogger(__name__)

COUNTS_SECS = 2.0
"""For a front to say what it counts, which is all that it is asked."""

EXIT_SECS = 5.0
"""For a front that was told to leave: its last answers, and the interpreter's end."""

SHUTTING_DOWN = "the node is shutting down; send the request again"


class StopAccepting(Struct, frozen=True, tag="stop_accepting"):
    """New requests are refused, those in flight go on."""


class Leave(Struct, frozen=True, tag="leave"):
    """End what is in flight, tell the engines, and exit. ``died``: what has, when that is why."""

    died: str = ""


_encoder = Encoder()
_decoder: TypedDecoder[StopAccepting | Leave] = TypedDecoder(StopAccepting | Leave)


class Fronts:
    """The first front's side: the others, numbered from 1, in processes that die with this one."""

    def __init__(self, num: int, target: Callable[..., None], name: str, metrics: FrontMetrics) -> None:
        """``target(number, sock, *arguments)`` runs a front, ``sock`` being its end of the channel to us; it
        is imported by name in the child.
        """
        self._num = num
        self._target = target
        self._name = name
        self._metrics = metrics
        self._channels: list[Channel] = []
        self._counts: Sequence[bytes] = ()
        """What each of them counts, as it said last."""
        self._sockets: list[socket.socket] = []
        self._processes: list[BaseProcess] = []

    def start(self, *arguments: object) -> None:
        """From the main thread: the kernel ends the children when the thread that started them ends."""
        spawning = multiprocessing.get_context("spawn")
        for number in range(1, self._num + 1):
            ours, theirs = socket.socketpair()
            with theirs:
                process = spawning.Process(
                    target=_run,
                    args=(self._target, number, theirs, arguments),
                    name=f"{self._name} {number}",
                )
                process.start()
            self._sockets.append(ours)
            self._processes.append(process)

    @property
    def sentinels(self) -> list[int]:
        """File descriptors each of which becomes readable when a front has exited."""
        return [process.sentinel for process in self._processes]

    def exits(self) -> str:
        """Which have exited, and how."""
        return exits(self._processes)

    async def connect(self) -> None:
        """Open the channels. A front asks one thing, the metrics of the node."""
        self._channels = [Channel(sock, lambda note: None, self._on_question) for sock in self._sockets]
        self._counts = [NOTHING] * len(self._channels)
        for channel in self._channels:
            await channel.open()

    async def _on_question(self, question: bytes) -> bytes:
        return await self.render_metrics()

    async def render_metrics(self) -> bytes:
        """Those of the node; a front that does not answer in time is shown with what it said last."""
        asking = map(_ask, self._channels, self._counts)
        self._counts = await asyncio.gather(*asking)
        return self._metrics.render(self._counts)

    def stop_accepting(self) -> None:
        self._tell(StopAccepting())

    async def leave(self, died: str = "") -> None:
        """Until the others have left, or are overdue."""
        self._tell(Leave(died))
        deadline = time.monotonic() + EXIT_SECS
        while any(process.is_alive() for process in self._processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _tell(self, message: StopAccepting | Leave) -> None:
        for channel in self._channels:
            channel.tell(_encoder.encode(message))

    async def close(self) -> None:
        """The channels."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def stop(self) -> None:
        """End whoever is left: they ignore the signals that are for the first process."""
        for process in self._processes:
            if process.is_alive():
                log.info("%s still runs: kill", process.name)
                process.kill()
        join(self._processes, EXIT_SECS)
        for sock in self._sockets:
            sock.close()


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


def exits(processes: Sequence[BaseProcess]) -> str:
    """Which have exited, and how; a sentinel says so a moment before the status can be read."""
    ready = multiprocessing.connection.wait([process.sentinel for process in processes], timeout=0)
    exited = [process for process in processes if process.sentinel in ready]
    join(exited, EXIT_SECS)
    return ", ".join(f"{process.name} exited with status {process.exitcode}" for process in exited)


def join(processes: Sequence[BaseProcess], timeout_secs: float) -> None:
    """Until all have ended, or the time is up."""
    deadline = time.monotonic() + timeout_secs
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


async def _ask(channel: Channel, last: bytes) -> bytes:
    try:
        return await asyncio.wait_for(channel.ask(b""), COUNTS_SECS)
    except (ChannelClosed, TimeoutError):
        return last


def _run(
    target: Callable[..., None], number: int, sock: socket.socket, arguments: tuple[object, ...]
) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a supervisor may send it to all processes of the service
    target(number, sock, *arguments)
