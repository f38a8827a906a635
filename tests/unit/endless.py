"""A ZMQ socket that never runs dry, for tests of what is taken in between two turns of a loop."""

from __future__ import annotations

import zmq


class Endless:
    """There is always one more message, of these frames."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = list(frames)
        self.num_received = 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        assert flags == zmq.NOBLOCK
        self.num_received += 1
        return self._frames
