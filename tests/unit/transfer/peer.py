"""A process with registered memory for the transfer tests: ``python -m tests.unit.transfer.peer NUM_BYTES``.

Prints its session and the address of its memory; then answers each line ``START STOP`` with those bytes as
hex, and ends at the end of its input.
"""

from __future__ import annotations

import os
import socket
import sys

import numpy as np
import torch

from tests.other_process import OtherProcess
from transfer.engine import TransferEngine, quiet_mooncake_logs


class Peer(OtherProcess):
    """The other process, as a test sees it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__("tests.unit.transfer.peer", num_bytes)
        self.session, addr = self.read_line().split()
        self.base_addr = int(addr)

    def read(self, start: int, stop: int) -> bytes:
        return bytes.fromhex(self.ask(f"{start} {stop}"))


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def main() -> None:
    quiet_mooncake_logs()
    memory = np.zeros(int(sys.argv[1]), np.uint8)
    engine = TransferEngine("127.0.0.1")
    addr = engine.register(torch.from_numpy(memory))
    print(engine.session, addr, flush=True)
    for line in sys.stdin:
        start, stop = map(int, line.split())
        print(memory[start:stop].tobytes().hex(), flush=True)
    os._exit(0)  # the test does not wait for Mooncake's own goodbye


if __name__ == "__main__":
    main()
