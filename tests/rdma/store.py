"""A Mooncake Store in a machine: its master, and a client that lends main memory, over RDMA.

Both run in the second machine. What a prefill node writes there and reads from there crosses the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.mooncake_master import store_program
from tests.rdma.command import Command
from tests.rdma.machines import DEVICE, Machine

_PORT = 50051
_LENDER_PORT = 50052
"""Port that the lending client opens last."""
_SILENCE_SECS = 3600
"""Time without a word after which the master forgets a client; without KVM, a busy one is silent for long."""


def store_address(machine: Machine) -> str:
    """Return what ``--kv-store`` is for a master in ``machine``."""
    return f"{machine.address}:{_PORT}"


@contextlib.contextmanager
def running_master(machine: Machine) -> Iterator[Command]:
    """A master, which has no memory of its own."""
    options = (f"--rpc_port={_PORT}", f"--client_ttl={_SILENCE_SECS}", "--logtostderr")
    with _running(machine, _PORT, store_program("mooncake_master"), *options) as command:
        yield command


@contextlib.contextmanager
def running_lender(machine: Machine) -> Iterator[Command]:
    """The program by which operators lend memory to the store, beside a master in ``machine``."""
    options = (
        *(f"--master_server_address={store_address(machine)}", "--metadata_server=P2PHANDSHAKE"),
        *(f"--host={machine.address}", f"--port={_LENDER_PORT}", "--global_segment_size=64MB"),
        *("--protocol=rdma", f"--device_names={DEVICE}", "--logtostderr"),
    )
    with _running(machine, _LENDER_PORT, store_program("mooncake_client"), *options) as command:
        yield command


@contextlib.contextmanager
def _running(machine: Machine, port: int, *command: str) -> Iterator[Command]:
    """Start a command, and wait until its port is open."""
    started = machine.start(*command)
    try:
        is_open = f"(: > /dev/tcp/{machine.address}/{port}) 2> /dev/null"
        machine.run("timeout", "600", "bash", "-c", f"until {is_open}; do sleep 0.2; done")
        assert started.is_running, started.stderr[-3000:]
        yield started
    finally:
        started.close()
