"""A process that writes over a lane until it ends: ``python -m tests.unit.transfer.lane_writer``.

Reads a line with a ``LaneOffer`` as hex and the directory of its socket, opens it as the run ``child``, and
prints ``open``. From then on it writes one byte value after the other over all of the first window.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from protocol.lane import LaneOffer, encoder
from transfer.lane_memory import Mapping


class LaneWriter:
    """The other process, as a test sees it."""

    def __init__(self, offer: LaneOffer, directory: str, wrapper: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "tests.unit.transfer.lane_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{encoder.encode(offer).hex()} {directory}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "open\n"

    def pause(self) -> None:
        """Returns when all its threads have stopped, which a signal that was sent does not say."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """The signal alone: nobody waits until it has ended."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)


@contextmanager
def lane_writer(offer: LaneOffer, directory: str = "", wrapper: Sequence[str] = ()) -> Iterator[LaneWriter]:
    """``wrapper``: a command that runs the process."""
    writer = LaneWriter(offer, directory, wrapper)
    try:
        yield writer
    finally:
        writer.close()


def main() -> None:
    offer, _, directory = sys.stdin.readline().strip().partition(" ")
    mapping = Mapping(msgspec.msgpack.decode(bytes.fromhex(offer), type=LaneOffer), "child", directory)
    mapping.promise_sole()
    memory = np.frombuffer(mapping._maps[0], np.uint8)
    print("open", flush=True)
    for value in itertools.cycle(range(1, 256)):
        memory[:] = value


if __name__ == "__main__":
    main()
