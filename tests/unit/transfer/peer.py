"""A process with registered memory for the transfer tests: ``python -m tests.unit.transfer.peer NUM_BYTES``.

It prints its session and the address of its memory, answers each line ``START STOP`` with those bytes as hex,
and ends at the end of its input.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hisparse_pd.transfer.engine import TransferEngine, quiet_mooncake_logs
from tests.other_process import OtherProcess


class Peer(OtherProcess):
    """The process, as a test controls it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__("tests.unit.transfer.peer", num_bytes)
        self.session, addr = self.read_line().split()
        self.base_addr = int(addr)

    def read(self, start: int, stop: int) -> bytes:
        return bytes.fromhex(self.ask(f"{start} {stop}"))


@dataclass(frozen=True)
class ArrayMemory:
    """An array as memory to register. A tensor would make the process import torch, which takes a second."""

    array: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous


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
    addr = engine.register(ArrayMemory(memory))
    print(engine.session, addr, flush=True)
    for line in sys.stdin:
        start, stop = map(int, line.split())
        print(memory[start:stop].tobytes().hex(), flush=True)
    os._exit(0)  # the test does not wait for Mooncake's own shutdown


if __name__ == "__main__":
    main()
