"""The channels between a node's HTTP fronts and its engine processes: both ends of one.

An engine connects to a socket of each front. What is about a request goes to the front that has it, which the
request's id names; what an engine says of itself goes to all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import zmq

from protocol.polling import BURST_MESSAGES, SEND_HWM, burst
from service import engine_messages
from service.engine_messages import (
    EngineLoading,
    EngineReady,
    EngineStats,
    FromEngine,
    GenerateGroup,
    Shutdown,
    ToEngine,
    front_of,
)

_HWM = 64
"""Messages that ZMQ keeps a direction and a side; a prompt of a million tokens has 4 MB."""

_RECEIVED_A_TURN = 64
"""Messages that a front takes in between two turns of its loop: a task of a millisecond or two, with what
they make others do."""


class FrontChannel:
    """The engine's end of the channel to one front.

    What the front is too slow to take waits in ``backlog``, in order: no more than the requests in flight
    may still bring forth, for the engine's statistics do not wait, newer ones follow.
    """

    def __init__(self, endpoint: str) -> None:
        self.backlog: deque[bytes] = deque()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 2000)  # the last answers still leave at shutdown
        self.socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        self.socket.setsockopt(zmq.RCVHWM, _HWM)
        self.socket.connect(endpoint)

    def send(self, frame: bytes, *, may_be_dropped: bool = False) -> None:
        """Never waits."""
        self.flush()
        if not (self.backlog and may_be_dropped):
            self.backlog.append(frame)
            self.flush()

    def flush(self) -> None:
        try:
            while self.backlog:
                self.socket.send(self.backlog[0], zmq.NOBLOCK)
                self.backlog.popleft()
        except zmq.Again:
            return


class EngineSocket:
    """The engine's end of the channels to all of its fronts, in their order."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """``endpoints``: ZMQ's, ``ipc://PATH`` or ``tcp://HOST:PORT``, one a front."""
        self.fronts = [FrontChannel(endpoint) for endpoint in endpoints]
        self._leaving: set[int] = set()
        self._num_turns = 0

    def receive(self) -> Iterator[ToEngine]:
        """What has arrived, without waiting, at most a burst; a group counts with each of its samples.

        ``Shutdown`` comes once all fronts have said it.
        """
        self._num_turns += 1  # who is first takes turns: a burst of one front must not be all that is heard
        first = self._num_turns % len(self.fronts)
        fronts = self.fronts[first:] + self.fronts[:first]
        for front in fronts:
            front.flush()
        num_samples = 0
        for (frame,) in burst(*(front.socket for front in fronts)):
            message = engine_messages.to_engine_decoder.decode(frame)
            if isinstance(message, Shutdown):
                self._leaving.add(message.front)
                if len(self._leaving) < len(self.fronts):
                    continue
            yield message
            num_samples += len(message.samples) if isinstance(message, GenerateGroup) else 1
            if num_samples >= BURST_MESSAGES:
                return

    def send(self, message: FromEngine) -> None:
        """Never waits. Statistics for which there is no room are dropped."""
        frame = engine_messages.encoder.encode(message)
        if isinstance(message, EngineLoading | EngineReady | EngineStats):
            for front in self.fronts:
                front.send(frame, may_be_dropped=isinstance(message, EngineStats))
        elif len(self.fronts) == 1:
            self.fronts[0].send(frame)
        else:
            self.fronts[front_of(message.request_id)].send(frame)

    def close(self) -> None:
        for front in self.fronts:
            front.flush()
            front.socket.close()


class FrontSocket:
    """A front's end of the channel to one engine. Nothing here waits; its loop watches ``fileno``.

    The descriptor becomes readable when something *changes*, and receiving and sending may use that up. So
    whoever was called because of it goes on until ``is_ready`` is false.
    """

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _HWM)
        self.socket.setsockopt(zmq.RCVHWM, SEND_HWM)
        self.socket.bind(endpoint)

    def fileno(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def receive(self) -> Iterator[FromEngine]:
        """What has arrived, as much as a turn takes in."""
        for _ in range(_RECEIVED_A_TURN):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield engine_messages.from_engine_decoder.decode(frame)

    def send(self, message: ToEngine) -> bool:
        """False: there is no room for it now."""
        try:
            self.socket.send(engine_messages.encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def is_ready(self, *, to_send: bool) -> bool:
        """Whether something can be received or, if there is something ``to_send``, sent."""
        events = int(self.socket.getsockopt(zmq.EVENTS))
        return bool(events & (zmq.POLLIN | (zmq.POLLOUT if to_send else 0)))

    def close(self) -> None:
        self.socket.close()
