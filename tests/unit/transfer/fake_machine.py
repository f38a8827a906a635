"""Machines for tests of the transport and the doctor: a tree like that of /sys, /dev and /proc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hisparse_pd.core.memory.machine import Machine

ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL_GID = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"
IB_GID = "fe80:0000:0000:0000:b859:9f03:00d4:1234"
GIB = 1 << 30


def ipv4_gid(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


@dataclass(frozen=True)
class FakeDevice:
    """A device with one port. ``gids``: its GIDs in order of index, each with its type as sysfs writes it."""

    name: str = "mlx5_0"
    state: str = "4: ACTIVE"
    link_layer: str = "Ethernet"
    gids: Sequence[tuple[str, str]] = (
        (LINK_LOCAL_GID, "IB/RoCE v1"),
        (LINK_LOCAL_GID, "RoCE v2"),
        (ipv4_gid("192.0.2.7"), "IB/RoCE v1"),
        (ipv4_gid("192.0.2.7"), "RoCE v2"),
        (ZERO_GID, ""),
    )
    port: int = 1
    uverbs: str = "uverbs0"
    has_node: bool = True


ROCE = FakeDevice()
INFINIBAND = FakeDevice(link_layer="InfiniBand", gids=((IB_GID, "IB/RoCE v1"), (ZERO_GID, "")))


class FakeMachine:
    """Files below ``root``. By default the user is root and no limit is low; ``changes`` replace fields of
    the Machine."""

    def __init__(self, root: Path, *devices: FakeDevice, **changes: Any) -> None:
        self.root = root
        for directory in ("sys/class", "dev/infiniband", "proc/self"):
            (root / directory).mkdir(parents=True)
        for device in devices:
            self.add(device)
        self.write("proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\n")
        self.write("proc/self/uid_map", "         0          0 4294967295\n")
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
        names = tuple(device.name for device in devices)
        machine = Machine(
            root / "sys",
            root / "dev",
            root / "proc",
            environ={},
            verbs_devices=lambda: names,
            memlock_bytes=lambda: None,
            has_dma_buf=lambda: False,
            gpu_bus_ids=lambda: (),
            allowed_cpus=lambda: range(1 << 10),
        )
        self.machine = replace(machine, **changes)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def add(self, device: FakeDevice) -> None:
        base = f"sys/class/infiniband/{device.name}"
        port = f"{base}/ports/{device.port}"
        self.write(f"{port}/state", f"{device.state}\n")
        self.write(f"{port}/link_layer", f"{device.link_layer}\n")
        for index, (gid, gid_type) in enumerate(device.gids):
            self.write(f"{port}/gids/{index}", f"{gid}\n")
            if gid_type:  # reading the attributes of an empty entry fails
                self.write(f"{port}/gid_attrs/types/{index}", f"{gid_type}\n")
                self.write(f"{port}/gid_attrs/ndevs/{index}", "ens1f0\n")
        if device.uverbs:
            self.write("sys/class/infiniband_verbs/abi_version", "6\n")
            self.write(f"sys/class/infiniband_verbs/{device.uverbs}/ibdev", f"{device.name}\n")
            if device.has_node:
                self.write(f"dev/infiniband/{device.uverbs}", "")

    def add_numa_node(
        self, number: int, cpus: str, gib: float = 512, free_gib: float = 256, distances: str = ""
    ) -> None:
        """A quarter of ``free_gib`` is page cache."""
        base = f"sys/devices/system/node/node{number}"
        self.write(f"{base}/cpulist", f"{cpus}\n")
        sizes = {"MemTotal": gib, "MemFree": 0.75 * free_gib, "Active(file)": free_gib / 8}
        sizes |= {"Inactive(file)": free_gib / 8, "FilePages": free_gib, "Shmem": gib / 4}
        lines = [f"Node {number} {name}: {int(size * (1 << 20)):>12} kB" for name, size in sizes.items()]
        self.write(f"{base}/meminfo", "\n".join(lines) + "\n")
        self.write(f"{base}/distance", f"{distances}\n")

    def put_pci(self, bus_id: str, node: int, local_cpus: str = "") -> None:
        """Add a PCI device; ``bus_id`` is written as in sysfs."""
        self.write(f"sys/bus/pci/devices/{bus_id}/numa_node", f"{node}\n")
        self.write(f"sys/bus/pci/devices/{bus_id}/local_cpulist", f"{local_cpus}\n")

    def put_nic(self, name: str, node: int) -> None:
        self.write(f"sys/class/infiniband/{name}/device/numa_node", f"{node}\n")

    def grant_ipc_lock(self, uid_map: str = "0 0 4294967295") -> None:
        self.write("proc/self/status", "CapEff:\t0000000000004000\n")
        self.write("proc/self/uid_map", uid_map)
