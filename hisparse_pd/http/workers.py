"""Further processes that serve on a service's port: how they start, hear from the first one, and end.

The first process binds the socket and decides when all of them leave. A worker that leaves by itself ends the
service, for a supervisor to start all of it again. Workers die with the first process.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.process import BaseProcess

from hisparse_pd.http.channel import Channel, ChannelClosed
from hisparse_pd.http.metric_sums import NOTHING
from hisparse_pd.process import die_with_parent

log = logging.getLogger(__name__)

ANSWER_SECS = 2.0
"""For a worker's counts."""

COUNTS = b""
"""The one question to a worker: what it counts, answered as of ``metric_sums.pack``."""

EXIT_SECS = 5.0
"""For a worker that was told to leave: its last answers, and the interpreter's end."""


class Workers:
    """The workers, numbered from 1: the first process is number 0."""

    def __init__(self, num: int, target: Callable[..., None], name: str) -> None:
        """``target(number, sock, *arguments)`` runs a worker, ``sock`` being its end of the channel to us; it
        is imported by name in the child.
        """
        self.channels: list[Channel] = []
        self._collected: Sequence[bytes] = ()
        self._num = num
        self._target = target
        self._name = name
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
        """File descriptors each of which becomes readable when a worker has exited."""
        return [process.sentinel for process in self._processes]

    def exits(self) -> str:
        """Which workers have exited, and how."""
        return exits(self._processes)

    async def connect(
        self,
        on_note: Callable[[int, bytes], None],
        on_question: Callable[[int, bytes], Awaitable[bytes]],
    ) -> None:
        """Open the channels; the handlers get the index of the worker's channel."""

        def channel(index: int, sock: socket.socket) -> Channel:
            return Channel(sock, lambda body: on_note(index, body), lambda body: on_question(index, body))

        self.channels = [channel(index, sock) for index, sock in enumerate(self._sockets)]
        self._collected = [NOTHING] * len(self.channels)
        for opened in self.channels:
            await opened.open()

    def tell(self, body: bytes) -> None:
        """All of them."""
        for channel in self.channels:
            channel.tell(body)

    async def collect(self) -> list[bytes]:
        """What each worker counts; of one that does not say so in time, what it said last."""
        self._collected = await asyncio.gather(
            *(_ask(channel, last) for channel, last in zip(self.channels, self._collected, strict=True))
        )
        return list(self._collected)

    async def left(self) -> None:
        """Until all of them have exited, or the time is up."""
        deadline = time.monotonic() + EXIT_SECS
        while any(process.is_alive() for process in self._processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """The channels."""
        await asyncio.gather(*(channel.close() for channel in self.channels))

    def stop(self) -> None:
        """End whoever is left: they ignore the signals that are for the first process."""
        for process in self._processes:
            if process.is_alive():
                log.info("%s still runs: kill", process.name)
                process.kill()
        join(self._processes, EXIT_SECS)
        for sock in self._sockets:
            sock.close()


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
        return await asyncio.wait_for(channel.ask(COUNTS), ANSWER_SECS)
    except (ChannelClosed, TimeoutError):
        return last


def _run(
    target: Callable[..., None], number: int, sock: socket.socket, arguments: tuple[object, ...]
) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a supervisor may send it to all processes of the service
    target(number, sock, *arguments)
