"""A process with memory that is registered for RDMA, in one of the machines.

``python -m tests.rdma.endpoint HOST [IB_DEVICE]`` prints its session and its memory's address, then
answers each line of JSON with one. ``{"poison": true}`` overwrites the memory; ``{"check": NAME}`` compares
it with what the pattern must have left there; ``{"write": NAME, "session": ..., "base_addr": ...}`` writes
the pattern to another endpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.rdma.patterns import MEMORY_BYTES, PATTERNS, POISON, Pattern, source_content
from transfer.engine import TransferEngine, TransferError, quiet_mooncake_logs
from transfer.transport import choose_transport

if TYPE_CHECKING:
    from tests.rdma.machines import Machine


class Endpoint:
    """The process, as a test sees it."""

    def __init__(self, machine: Machine, *ib_device: str) -> None:
        module = (sys.executable, "-m", "tests.rdma.endpoint")
        self.command = machine.start(*module, machine.address, *ib_device)
        try:
            self.session, addr = self.command.read_line().split()
        except BaseException:
            self.command.close()
            raise
        self.base_addr = int(addr)

    def write(self, pattern: Pattern, session: str, base_addr: int) -> str:
        """The error; empty when it was written."""
        return str(self._ask(write=pattern.name, session=session, base_addr=base_addr)["error"])

    def poison(self) -> None:
        self._ask(poison=True)

    def check(self, pattern: Pattern) -> str:
        """Where the memory is not what the pattern must have left; empty when it is."""
        return str(self._ask(check=pattern.name)["fault"])

    def _ask(self, **question: Any) -> dict[str, Any]:
        self.command.write_line(json.dumps(question))
        answer = json.loads(self.command.read_line())
        assert isinstance(answer, dict)
        return answer


@contextmanager
def endpoint(machine: Machine, *ib_device: str) -> Iterator[Endpoint]:
    """``ib_device``: none for all that are usable."""
    found = Endpoint(machine, *ib_device)
    try:
        yield found
    finally:
        found.command.close()


def main() -> None:
    quiet_mooncake_logs()
    host, *ib_device = sys.argv[1:]
    transport = choose_transport(
        "rdma", ",".join(ib_device), host, num_host_bytes=MEMORY_BYTES, uses_gpu=False
    )
    engine = TransferEngine(host, transport)
    memory, content = source_content(), source_content()
    base_addr = engine.register(memory.ctypes.data, memory.nbytes)
    patterns = {pattern.name: pattern for pattern in PATTERNS}
    print(engine.session, base_addr, flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case {"poison": _}:
                memory[:] = POISON
                answer = {}
            case {"check": name}:
                answer = {"fault": _difference(memory, patterns[name].expected(content))}
            case {"write": name, "session": session, "base_addr": dst_base_addr}:
                answer = {"error": ""}
                try:
                    engine.write(session, patterns[name].writes(base_addr, dst_base_addr))
                except TransferError as error:
                    answer = {"error": str(error)}
            case other:
                raise ValueError(f"unknown question {other}")
        print(json.dumps(answer), flush=True)
    os._exit(0)  # the test does not wait for Mooncake's own goodbye


def _difference(found: np.ndarray, expected: np.ndarray) -> str:
    wrong = np.flatnonzero(found != expected)
    if not wrong.size:
        return ""
    first = wrong[0]
    return f"{wrong.size} bytes are wrong, the first at {first}: {found[first]}, not {expected[first]}"


if __name__ == "__main__":
    main()
