"""A process with registered memory for the transfer tests: ``python -m tests.unit.transfer.peer NUM_BYTES``.

Prints its session and the address of its memory; then answers each line ``START STOP`` with those bytes as
hex, and ends at the end of its input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from transfer.engine import TransferEngine, quiet_mooncake_logs


class Peer:
    """The other process, as a test sees it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.transfer.peer", str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.session, addr = self.process.stdout.readline().split()
        self.base_addr = int(addr)

    def read(self, start: int, stop: int) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{start} {stop}\n")
        self.process.stdin.flush()
        return bytes.fromhex(self.process.stdout.readline())

    def pause(self) -> None:
        """Returns when all its threads have stopped, which a signal that was sent does not say."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@contextmanager
def peer_process(num_bytes: int) -> Iterator[Peer]:
    peer = Peer(num_bytes)
    try:
        yield peer
    finally:
        peer.close()


def main() -> None:
    quiet_mooncake_logs()
    memory = np.zeros(int(sys.argv[1]), np.uint8)
    engine = TransferEngine("127.0.0.1")
    addr = engine.register(memory.ctypes.data, memory.nbytes)
    print(engine.session, addr, flush=True)
    for line in sys.stdin:
        start, stop = map(int, line.split())
        print(memory[start:stop].tobytes().hex(), flush=True)
    os._exit(0)  # the test does not wait for Mooncake's own goodbye


if __name__ == "__main__":
    main()
