"""The ipc channel between a node's HTTP front and its engine process, both ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import zmq
import zmq.asyncio

from protocol.polling import BURST_MESSAGES, SEND_HWM, burst
from service import engine_messages
from service.engine_messages import EngineStats, FromEngine, GenerateGroup, ToEngine

_IPC_HWM = 64
"""Messages that ZMQ keeps a direction and a side; a prompt of a million tokens has 4 MB."""


class EngineSocket:
    """The engine's end of the ipc channel to its front.

    What the front is too slow to take waits in ``backlog``, in order: no more than the requests in flight
    may still bring forth, for the engine's statistics do not wait, newer ones follow.
    """

    def __init__(self, ipc_path: str) -> None:
        self.backlog: deque[bytes] = deque()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 2000)  # the last answers still leave at shutdown
        self.socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        self.socket.setsockopt(zmq.RCVHWM, _IPC_HWM)
        self.socket.connect(f"ipc://{ipc_path}")

    def receive(self) -> Iterator[ToEngine]:
        """What has arrived, without waiting, at most a burst; a group counts with each of its samples."""
        self._flush()
        num_samples = 0
        for (frame,) in burst(self.socket):
            message = engine_messages.to_engine_decoder.decode(frame)
            yield message
            num_samples += len(message.samples) if isinstance(message, GenerateGroup) else 1
            if num_samples >= BURST_MESSAGES:
                return

    def send(self, message: FromEngine) -> None:
        """Never waits. Statistics for which there is no room are dropped."""
        self._flush()
        if not (self.backlog and isinstance(message, EngineStats)):
            self.backlog.append(engine_messages.encoder.encode(message))
            self._flush()

    def close(self) -> None:
        self._flush()
        self.socket.close()

    def _flush(self) -> None:
        try:
            while self.backlog:
                self.socket.send(self.backlog[0], zmq.NOBLOCK)
                self.backlog.popleft()
        except zmq.Again:
            return


class FrontSocket:
    """The front's end of the ipc channel to its engine, for asyncio."""

    def __init__(self, ipc_path: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _IPC_HWM)
        self.socket.setsockopt(zmq.RCVHWM, SEND_HWM)
        self.socket.bind(f"ipc://{ipc_path}")

    async def receive(self) -> FromEngine:
        return engine_messages.from_engine_decoder.decode(await self.socket.recv())

    async def send(self, message: ToEngine) -> None:
        await self.socket.send(engine_messages.encoder.encode(message))

    def close(self) -> None:
        self.socket.close()
