"""A ZMQ socket that always has a message, for tests of how much a loop's turn takes in."""

from __future__ import annotations

import zmq


class Endless:
    """A socket that always has one more message, of these frames."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = list(frames)
        self.num_received = 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        assert flags == zmq.NOBLOCK
        self.num_received += 1
        return self._frames
