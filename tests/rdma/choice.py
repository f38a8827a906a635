"""Chooses a transport in a machine and starts an engine on it, as a node does, without a model.

``python -m tests.rdma.choice PROTOCOL IB_DEVICE HOST NUM_BYTES`` prints what came of it as JSON:
``protocol``, ``devices``, ``reason``, ``info_metric`` and ``session``, or ``error``. With ``unchecked`` as
PROTOCOL, Mooncake is told to use IB_DEVICE without a look at it, as if the checks had missed something.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from transfer.engine import TransferEngine, TransferError, quiet_mooncake_logs
from transfer.transport import Transport, choose_transport

if TYPE_CHECKING:
    from tests.rdma.machines import Machine

NUM_BYTES = 1 << 20


def choose(
    machine: Machine,
    protocol: str,
    ib_device: str = "",
    *,
    host: str = "",
    num_bytes: int = NUM_BYTES,
    environment: dict[str, str] | None = None,
    wrapper: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What the process in the machine printed. ``wrapper``: a command that runs it, with less rights say."""
    module = (*wrapper, sys.executable, "-m", "tests.rdma.choice")
    arguments = (protocol, ib_device, host or machine.address, str(num_bytes))
    done = machine.run(*module, *arguments, environment=environment)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def main() -> None:
    quiet_mooncake_logs()
    protocol, ib_device, host, num_bytes = sys.argv[1:]
    try:
        match protocol:
            case "rdma" | "tcp" | "auto":
                transport = choose_transport(
                    protocol, ib_device, host, num_host_bytes=int(num_bytes), uses_gpu=False
                )
            case _:
                transport = Transport("rdma", tuple(ib_device.split(",")), "unchecked")
        engine = TransferEngine(host, transport)
        answer = {**asdict(transport), "info_metric": transport.info_metric, "session": engine.session}
    except TransferError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the test does not wait for Mooncake's own goodbye


if __name__ == "__main__":
    main()
