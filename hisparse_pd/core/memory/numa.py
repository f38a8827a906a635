"""Chooses a NUMA node for each rank: the one that its GPU is attached to, unless ``--numa`` names another.

A NUMA node has CPUs, memory and attached devices of its own; those of other nodes are reached over the link
between sockets. At an engine's start, ``place_ranks`` chooses nodes for all ranks of the machine, and
``with_pools`` then decides how strictly the pools are bound. Everything is read from files below
``Machine.sys`` and ``Machine.proc``. The result is a ``Placement``, which ``numa_binding.py`` carries out.

With ``--numa off``, or on a machine with CPUs in one node only, no rank is placed. With ``auto``, a rank is
not placed without a GPU either, nor where the kernel does not name the GPU's node, nor where this process may
not use that node's CPUs or memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.machine import Machine, read_text, show_bytes

_RESERVE_SHARE = 0.05
"""Share of a node's memory that bound pools must leave free; with less the kernel might kill processes."""


class PoolPolicy(IntEnum):
    """How the kernel allocates a pool's pages; the values are the kernel's own mode numbers."""

    FIRST_TOUCH = 0
    """No request: pages come from the node of the CPU that touches them first, while it has free ones."""
    PREFERRED = 1
    """Pages come from the node, and from others when it is full."""
    BIND = 2
    """Pages come from the node alone, which gives up file pages for them."""


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: its online CPUs and its memory. Memory expanders have no CPUs, and a node may have no
    memory."""

    number: int
    cpus: frozenset[int]
    total_bytes: int
    free_bytes: int
    """Free bytes, file pages included: the kernel gives these up when asked for memory of this node."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether pools of ``num_bytes`` fit into this node alone."""
        return num_bytes <= self.free_bytes - int(_RESERVE_SHARE * self.total_bytes)


@dataclass(frozen=True)
class Placement:
    """The place of one rank. ``why``: the reason, for the log. ``node``: None leaves the rank to the kernel.

    ``cpus``: the node's CPUs that this process may use; ``nics``: the RDMA devices nearest to the node.
    ``remedy``: what an operator can do to get the right place; empty if the rank has it.
    """

    why: str
    node: int | None = None
    cpus: tuple[int, ...] = ()
    nics: tuple[str, ...] = ()
    num_ranks: int = 1
    """Ranks of this service on the node, which share its memory."""
    policy: PoolPolicy = PoolPolicy.FIRST_TOUCH
    remedy: str = ""

    def __str__(self) -> str:
        parts = [f"anywhere, {self.why}"]
        if self.node is not None:
            parts = [f"node {self.node}, {self.why}", f"CPUs {show_cpus(self.cpus)}"]
            parts += [f"RDMA {', '.join(self.nics)}"] if self.nics else []
            parts.append(f"pools {_POOLS[self.policy]}")
        return "; ".join((*parts, self.remedy) if self.remedy else parts)


_POOLS = {
    PoolPolicy.FIRST_TOUCH: "by first touch",
    PoolPolicy.PREFERRED: "there first",
    PoolPolicy.BIND: "there",
}

ANYWHERE = Placement("nothing is placed")


def place_ranks(numa: str, devices: Sequence[str], machine: Machine) -> tuple[Placement, ...]:
    """Return the placement of each of a service's ranks on this machine, whose devices are ``devices``.

    ``numa``: ``auto``, ``off``, or the numbers of nodes, one for all ranks or one a rank. Raises StartError
    for a named node that does not exist or that this process may not use.
    """
    if numa == "off":
        return (Placement("--numa off"),) * len(devices)
    nodes = read_nodes(machine)
    named = [] if numa == "auto" else [int(number) for number in numa.split(",")]
    for number in named:
        if fault := _node_fault(number, nodes, machine):
            raise StartError(f"--numa {numa}: {fault}; name another node, or give --numa auto or off")
    if sum(bool(node.cpus) for node in nodes.values()) < 2:
        return (Placement("one NUMA node"),) * len(devices)
    if named:
        wanted = [named[position % len(named)] for position in range(len(devices))]
        found = [_placement_on(nodes[number], f"named by --numa {numa}", nodes, machine) for number in wanted]
    else:
        bus_ids = machine.gpu_bus_ids() if any(map(is_gpu, devices)) else ()
        found = [_placement_near_gpu(device, bus_ids, nodes, machine) for device in devices]
    on_nodes = [placement.node for placement in found]
    return tuple(replace(placement, num_ranks=on_nodes.count(placement.node)) for placement in found)


def with_pools(placement: Placement, num_bytes: int, machine: Machine) -> Placement:
    """Return the placement with the policy for pools of ``num_bytes`` a rank. Call it before any rank of the
    machine makes its pools, because it compares them with the node's free memory.

    Pools are bound to their node if those of all its ranks fit into it. Otherwise they may spill: reading
    some memory over the link is better than being killed.
    """
    node = read_nodes(machine).get(placement.node) if placement.node is not None else None
    if node is None or not node.total_bytes:  # by first touch the kernel takes the memory nearest to the CPUs
        return replace(placement, policy=PoolPolicy.FIRST_TOUCH)
    if node.has_room(num_bytes * placement.num_ranks):
        return replace(placement, policy=PoolPolicy.BIND)
    wanted = f"pools of {placement.num_ranks} ranks take {show_bytes(num_bytes * placement.num_ranks)}"
    return replace(
        placement,
        policy=PoolPolicy.PREFERRED,
        remedy=f"{wanted}, and node {node.number} has {show_bytes(node.free_bytes)} free, so that some of it "
        "will be on other nodes: lower --host-pool-tokens or --host-cache-tokens, or spread the ranks",
    )


# --- facts ------------------------------------------------------------------------------------------------


def read_nodes(machine: Machine) -> dict[int, NumaNode]:
    """Return the online nodes by number; none on a kernel without NUMA."""
    online_text = read_text(_nodes(machine) / "online")
    online = parse_cpus(online_text) if online_text else None
    found = {}
    for path in _nodes(machine).glob("node[0-9]*"):
        number = int(path.name.removeprefix("node"))
        if online is None or number in online:
            found[number] = _read_node(number, path)
    return dict(sorted(found.items()))


def distances_of(number: int, nodes: Mapping[int, NumaNode], machine: Machine) -> dict[int, int]:
    """Return the distance of each node from node ``number`` by the kernel's measure: 10 is the node
    itself."""
    words = read_text(_nodes(machine) / f"node{number}" / "distance").split()
    return {**dict(zip(nodes, map(int, words), strict=False)), number: 10}


def pci_path(bus_id: str, machine: Machine) -> Path:
    """Return the directory of the device at ``bus_id``, such as ``0000:1B:00.0``; sysfs has it in lower
    case."""
    domain, _, rest = bus_id.lower().partition(":")
    return machine.sys / "bus/pci/devices" / f"{int(domain or '0', 16):04x}:{rest}"


def node_of_gpu(bus_id: str, nodes: Mapping[int, NumaNode], machine: Machine) -> int | None:
    """Return the node that the device at ``bus_id`` is attached to, or None where the kernel does not say."""
    path = pci_path(bus_id, machine)
    number = _number(path / "numa_node")
    if number in nodes:
        return number
    near = parse_cpus(read_text(path / "local_cpulist"))
    touched = [node.number for node in nodes.values() if node.cpus & near]
    return touched[0] if len(touched) == 1 else None


def nodes_of_nics(machine: Machine) -> dict[str, int]:
    """Return the node of each RDMA device for which the kernel names one."""
    paths = sorted(machine.infiniband.glob("*"))
    numbers = {path.name: _number(path / "device" / "numa_node") for path in paths}
    return {name: number for name, number in numbers.items() if number >= 0}


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list in the kernel's notation: ``0-3,8``."""
    bounds = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return frozenset(number for first, last in bounds for number in range(first, last + 1))


def show_cpus(cpus: Collection[int]) -> str:
    """Return a list of CPUs in the kernel's notation."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def gpu_number(device: str) -> int:
    """Return the number of ``cuda`` or ``cuda:1`` among the GPUs that this process sees."""
    return int(device.partition(":")[2] or 0)


# --- decisions --------------------------------------------------------------------------------------------


def _placement_near_gpu(
    device: str, bus_ids: Sequence[str], nodes: Mapping[int, NumaNode], machine: Machine
) -> Placement:
    if not is_gpu(device):
        return Placement("a rank without a GPU is near no node")
    bus_id = bus_ids[gpu_number(device)] if gpu_number(device) < len(bus_ids) else ""
    number = node_of_gpu(bus_id, nodes, machine) if bus_id else None
    where = f"{device} ({bus_id})" if bus_id else device
    if number is None:
        return Placement(
            f"the kernel does not say on which NUMA node {where} is",
            remedy="if nvidia-smi topo -m or the machine's manual does, name the nodes with --numa",
        )
    if fault := _node_fault(number, nodes, machine):
        remedy = (
            "widen the cpuset of the container (docker: --cpuset-cpus, --cpuset-mems), or give it a near GPU"
        )
        return Placement(f"{where} is on node {number}, but {fault}", remedy=remedy)
    return _placement_on(nodes[number], f"that of {where}", nodes, machine)


def _placement_on(node: NumaNode, why: str, nodes: Mapping[int, NumaNode], machine: Machine) -> Placement:
    cpus = tuple(sorted(node.cpus.intersection(machine.allowed_cpus())))
    return Placement(why, node.number, cpus, _nearest_nics(node.number, nodes, machine))


def _node_fault(number: int, nodes: Mapping[int, NumaNode], machine: Machine) -> str:
    """Return why a rank cannot be on the node, or an empty string."""
    if number not in nodes:
        return (
            f"this machine has the NUMA nodes {', '.join(map(str, nodes)) or 'none'}, and {number} is not one"
        )
    cpus, allowed = nodes[number].cpus, machine.allowed_cpus()
    if not cpus:
        return f"NUMA node {number} has no CPUs"
    if cpus.isdisjoint(allowed):
        return (
            f"this process may use CPUs {show_cpus(allowed)}, and none of node {number}'s, which are "
            f"{show_cpus(cpus)}"
        )
    status = read_text(machine.proc / "self" / "status")
    mems = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
    if mems and nodes[number].total_bytes and number not in parse_cpus(mems[1]):
        return f"this process may use memory of the nodes {mems[1]}, and not of node {number}"
    return ""


def _nearest_nics(number: int, nodes: Mapping[int, NumaNode], machine: Machine) -> tuple[str, ...]:
    """Return the RDMA devices at the least distance from the node.

    Where a socket has several nodes, a card may be attached to another node of the same socket.
    """
    distances = distances_of(number, nodes, machine)
    unknown = max(distances.values(), default=0) + 1
    by_nic = {name: distances.get(node, unknown) for name, node in nodes_of_nics(machine).items()}
    return tuple(name for name, distance in by_nic.items() if distance == min(by_nic.values()))


# --- sysfs ------------------------------------------------------------------------------------------------


def _nodes(machine: Machine) -> Path:
    return machine.sys / "devices" / "system" / "node"


def _read_node(number: int, path: Path) -> NumaNode:
    meminfo = read_text(path / "meminfo")
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"(\S+):\s+(\d+) kB", meminfo)}
    free_bytes = sum(sizes.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
    return NumaNode(number, parse_cpus(read_text(path / "cpulist")), sizes.get("MemTotal", 0), free_bytes)


def _number(path: Path) -> int:
    """Return the number in a file, or -1 if it has none; the kernel, too, writes -1 for an unknown number."""
    text = read_text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else -1
