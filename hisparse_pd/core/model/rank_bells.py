"""Lets the ranks of a node wake each other out of an idle wait, by messages straight from engine to engine.

A rank that gets a request while all are idle rings (``engine/lockstep.py``); the other engines poll
``socket`` beside their other sockets. A ring carries the number of the agreement to which it calls, so that
one that comes too late is ignored. Neither the rank that rings nor the one that hears waits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress

import zmq

_NUMBER = struct.Struct("<q")
"""The content of a ring."""
_MAX_FRAME_BYTES = 1024
"""Greatest frame that is accepted; ZMQ's greetings are larger than a ring."""
_MAX_RINGS = 64
"""Most rings that wait in a queue, and that one ``heard`` returns. Few ever wait, since no agreement goes on
without the rank that has to read them."""


class RankBells:
    """One rank's bell, which others ring, and its connections to theirs."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint``: the ZMQ endpoint to bind, whose port may be ``*``. Raises OSError."""
        self.socket = _socket(zmq.PULL)
        self._others: list[zmq.Socket[bytes]] = []
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            raise OSError(error.errno, f"cannot listen at {endpoint}: {error}") from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The endpoint at which others ring, with its port."""

    def connect(self, others: Mapping[int, str]) -> None:
        """Connect to the bells of the other ranks. ``others``: their endpoints, by rank."""
        for endpoint in others.values():
            bell = _socket(zmq.PUSH)
            bell.connect(endpoint)
            self._others.append(bell)

    def ring(self, number: int) -> None:
        """Send ``number`` to the other ranks; nothing is sent to one that is gone."""
        for bell in self._others:
            with suppress(zmq.Again):
                bell.send(_NUMBER.pack(number), zmq.NOBLOCK)

    def heard(self) -> list[int]:
        """Return the numbers that other ranks have rung since the last call."""
        numbers: list[int] = []
        with suppress(zmq.Again):
            while len(numbers) < _MAX_RINGS:
                frame = self.socket.recv(zmq.NOBLOCK)
                if len(frame) == _NUMBER.size:
                    numbers += _NUMBER.unpack(frame)
        return numbers

    def close(self) -> None:
        for bell in (self.socket, *self._others):
            bell.close()


def _socket(kind: int) -> zmq.Socket[bytes]:
    bell: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    bell.setsockopt(zmq.LINGER, 0)
    bell.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    bell.setsockopt(zmq.IPV6, 1)
    bell.setsockopt(zmq.SNDHWM, _MAX_RINGS)
    bell.setsockopt(zmq.RCVHWM, _MAX_RINGS)
    return bell
