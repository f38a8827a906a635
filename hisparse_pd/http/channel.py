"""Notes and questions between two processes of one service, over a pair of sockets.

Both ends are one release of one program. Notes arrive in order and are handled at once; a question is
answered by a task of its own, so that one which takes long holds nothing up. What follows a note finds it
handled.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable

_HEAD = struct.Struct("<IIB")
"""Bytes of the body, number of the question, kind."""
_NOTE, _QUESTION, _ANSWER = range(3)


class ChannelClosed(Exception):
    """The other process is gone, or leaving."""


class Channel:
    """One end. Needs a running event loop from ``open`` on."""

    def __init__(
        self,
        sock: socket.socket,
        on_note: Callable[[bytes], None],
        on_question: Callable[[bytes], Awaitable[bytes]],
    ) -> None:
        self._sock = sock
        self._on_note = on_note
        self._on_question = on_question
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        self._reading = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """What was told before still goes, as far as the kernel takes it."""
        tasks = [task for task in (self._reading, *self._answering) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    def tell(self, body: bytes) -> None:
        """A note, to nobody when the other end is closed."""
        self._send(_NOTE, 0, body)

    async def ask(self, body: bytes) -> bytes:
        """The answer to a question. Raises ChannelClosed."""
        if self._reading is None or self._reading.done():
            raise ChannelClosed
        number = next(self._numbers) & 0xFFFFFFFF
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(_QUESTION, number, body)
            await answer
            return answer.result()
        finally:
            del self._asked[number]

    def _send(self, kind: int, number: int, body: bytes) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(_HEAD.pack(len(body), number, kind) + body)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                num_bytes, number, kind = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                body = await reader.readexactly(num_bytes)
                if kind == _NOTE:
                    self._on_note(body)
                elif kind == _QUESTION:
                    task = asyncio.create_task(self._answer(number, body))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif (asked := self._asked.get(number)) is not None and not asked.done():
                    asked.set_result(body)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ChannelClosed())

    async def _answer(self, number: int, body: bytes) -> None:
        self._send(_ANSWER, number, await self._on_question(body))
