"""A process in one of the machines, on the transport that a node would choose there.

``python -m tests.rdma.endpoint PROTOCOL IB_DEVICE HOST NUM_BYTES`` prints the choice as JSON:
``protocol``, ``devices``, ``reason``, ``info_metric`` and ``session``, or ``error``. With ``unchecked`` as
PROTOCOL, Mooncake is told to use IB_DEVICE unchecked, as if the checks had missed something.

Then it answers each line of JSON with one. ``{"register": true}`` registers memory, and tells its address;
``{"poison": true}`` overwrites it; ``{"check": NAME}`` compares it with what the pattern must have left;
``{"write": NAME, "session": ..., "base_addr": ...}`` writes the pattern to another endpoint, and ``"read"``
instead of ``"write"`` reads it from there.

``{"store": ADDRESS, "lent_bytes": ...}`` joins a master's store, and lends memory to it. ``{"put": KEY}``
makes the bytes of the object anew and writes it, ``{"get": KEY}`` reads it, and ``{"check_object": true}``
compares the memory with what a read into poison must have left.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hisparse_pd.base.settings import TransportSettings
from hisparse_pd.transfer.engine import TransferEngine, TransferError, quiet_mooncake_logs
from hisparse_pd.transfer.page_store import MooncakeStore, Pieces
from hisparse_pd.transfer.plan import Descriptors
from hisparse_pd.transfer.transport import Transport, choose_transport
from tests.rdma.patterns import MEMORY_BYTES, OBJECT, PATTERNS, POISON, Pattern, source_content

if TYPE_CHECKING:
    from tests.rdma.command import Command
    from tests.rdma.machines import Machine


def start(
    machine: Machine,
    protocol: str,
    ib_device: str = "",
    *,
    host: str = "",
    num_bytes: int = MEMORY_BYTES,
    wrapper: tuple[str, ...] = (),
) -> tuple[Command, dict[str, Any]]:
    """Start the process; return it with what it printed. ``wrapper``: a command that runs it, say with fewer
    rights.
    """
    module = (*wrapper, sys.executable, "-m", "tests.rdma.endpoint")
    arguments = (protocol, ib_device, host or machine.address, str(num_bytes))
    command = machine.start(*module, *arguments)
    try:
        answer = json.loads(command.read_line())
        assert isinstance(answer, dict)
        return command, answer
    except BaseException:
        command.close()
        raise


def choose(machine: Machine, protocol: str, ib_device: str = "", **options: Any) -> dict[str, Any]:
    """Return what ``start`` prints of the choice, and end the process."""
    command, answer = start(machine, protocol, ib_device, **options)
    command.close()
    return answer


class Endpoint:
    """A test's handle on such a process that has registered memory for RDMA."""

    def __init__(self, machine: Machine, ib_device: str = "") -> None:
        self.command, answer = start(machine, "rdma", ib_device)
        try:
            self.session = str(answer["session"])
            self.base_addr = int(self._ask(register=True)["base_addr"])
        except BaseException:
            self.command.close()
            raise

    def write(self, pattern: Pattern, session: str, base_addr: int) -> str:
        """Write a pattern. Returns the error, or an empty string."""
        return str(self._ask(write=pattern.name, session=session, base_addr=base_addr)["error"])

    def read(self, pattern: Pattern, session: str, base_addr: int) -> str:
        """Read a pattern. Returns the error, or an empty string."""
        return str(self._ask(read=pattern.name, session=session, base_addr=base_addr)["error"])

    def join(self, store: str, lent_bytes: int) -> None:
        """Become a client of the store of a master, and lend memory to it."""
        self._ask(store=store, lent_bytes=lent_bytes)

    def put(self, key: str) -> str:
        """Write an object to the store. Returns the name of the result."""
        return str(self._ask(put=key)["result"])

    def get(self, key: str) -> str:
        """Read an object from the store. Returns the name of the result."""
        return str(self._ask(get=key)["result"])

    def check_object(self) -> str:
        """Return where the memory differs from poison with the object, or an empty string."""
        return str(self._ask(check_object=True)["fault"])

    def poison(self) -> None:
        self._ask(poison=True)

    def check(self, pattern: Pattern) -> str:
        """Return where the memory differs from what the pattern must have left, or an empty string."""
        return str(self._ask(check=pattern.name)["fault"])

    def _ask(self, **question: Any) -> dict[str, Any]:
        self.command.write_line(json.dumps(question))
        answer = json.loads(self.command.read_line())
        assert isinstance(answer, dict)
        return answer


@contextmanager
def endpoint(machine: Machine, ib_device: str = "") -> Iterator[Endpoint]:
    """An ``Endpoint`` that ends with the context. An empty ``ib_device`` means all that are usable."""
    found = Endpoint(machine, ib_device)
    try:
        yield found
    finally:
        found.command.close()


def main() -> None:
    quiet_mooncake_logs()
    protocol, ib_device, host, num_bytes = sys.argv[1:]
    try:
        match protocol:
            case "rdma" | "tcp" | "auto":
                settings = TransportSettings(host=host, transfer_protocol=protocol, ib_device=ib_device)
                transport = choose_transport(settings, int(num_bytes))
            case _:
                transport = Transport("rdma", tuple(ib_device.split(",")), "unchecked")
        engine = TransferEngine(host, transport)
    except TransferError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        os._exit(0)
    shown = {**asdict(transport), "info_metric": transport.info_metric, "session": engine.session}
    print(json.dumps(shown), flush=True)
    memory, content = source_content(), source_content()
    base_addr = memory.ctypes.data
    patterns = {pattern.name: pattern for pattern in PATTERNS}
    pieces = [Pieces([base_addr + start for start, _ in OBJECT], [size for _, size in OBJECT])]
    store: MooncakeStore | None = None
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        match json.loads(line):
            case {"register": _}:
                answer = {"base_addr": engine.register(torch.from_numpy(memory))}
            case {"poison": _}:
                memory[:] = POISON
            case {"check": name}:
                answer = {"fault": _difference(memory, patterns[name].expected(content))}
            case {"write": name, "session": session, "base_addr": dst_base_addr}:
                writes = patterns[name].writes(base_addr, dst_base_addr)
                answer = {"error": _error(engine.write, session, writes)}
            case {"read": name, "session": session, "base_addr": src_base_addr}:
                reads = patterns[name].writes(src_base_addr, base_addr)
                answer = {"error": _error(engine.read, session, reads)}
            case {"store": address, "lent_bytes": lent_bytes}:
                mine = [torch.from_numpy(memory)]
                store = MooncakeStore(address, host, memory=mine, lent_bytes=lent_bytes, transport=transport)
                store.connect()
            case {"put": key} if store is not None:
                memory[:] = content
                answer = {"result": store.put([key], pieces)[0].name}
            case {"get": key} if store is not None:
                answer = {"result": store.get([key], pieces)[0].name}
            case {"check_object": _}:
                expected = np.full(MEMORY_BYTES, POISON, np.uint8)
                for start, size in OBJECT:
                    expected[start : start + size] = content[start : start + size]
                answer = {"fault": _difference(memory, expected)}
            case other:
                raise ValueError(f"unknown question {other}")
        print(json.dumps(answer), flush=True)
    os._exit(0)  # without Mooncake's shutdown, which no test waits for


def _error(move: Callable[[str, Descriptors], None], session: str, descriptors: Descriptors) -> str:
    """Write or read. Returns the error, or an empty string."""
    try:
        move(session, descriptors)
    except TransferError as error:
        return str(error)
    return ""


def _difference(found: np.ndarray, expected: np.ndarray) -> str:
    wrong = np.flatnonzero(found != expected)
    if not wrong.size:
        return ""
    first = wrong[0]
    return f"{wrong.size} bytes are wrong, the first at {first}: {found[first]}, not {expected[first]}"


if __name__ == "__main__":
    main()
