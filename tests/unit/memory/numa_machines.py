"""Machines of several NUMA nodes, as sysfs shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.transfer.fake_machine import FakeMachine

GPUS = [f"cuda:{number}" for number in range(8)]


def bus_id(number: int) -> str:
    """The address of a GPU as the driver writes it; sysfs has lower case."""
    return f"0000:{0x1B + 0x10 * number:02X}:00.0"


def two_sockets(root: Path, **changes: Any) -> FakeMachine:
    """Two nodes of 32 CPUs and 512 GiB, on each four GPUs and two RDMA devices."""
    fake = FakeMachine(root)
    fake.write("sys/devices/system/node/online", "0-1\n")
    fake.add_numa_node(0, "0-15,32-47", distances="10 21")
    fake.add_numa_node(1, "16-31,48-63", distances="21 10")
    for number in range(8):
        fake.put_pci(bus_id(number).lower(), number // 4)
    for number in range(4):
        fake.put_nic(f"mlx5_{number}", number // 2)
    with_gpus(fake, 8, **changes)
    return fake


def with_gpus(fake: FakeMachine, num_gpus: int, **changes: Any) -> None:
    bus_ids = tuple(map(bus_id, range(num_gpus)))
    fake.machine = replace(fake.machine, **{"gpu_bus_ids": lambda: bus_ids, **changes})
