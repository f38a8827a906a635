"""Checks where the ranks of a node would be placed on this machine, for ``command.py``.

A rank's place is the NUMA node of its GPU, with that node's CPUs, RDMA devices and memory for pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.commands.doctor.checks import Check, Status, failed
from hisparse_pd.commands.doctor.settings import DoctorSettings
from hisparse_pd.core.memory.machine import Machine, show_bytes
from hisparse_pd.core.memory.numa import (
    Placement,
    gpu_number,
    is_gpu,
    nodes_of_nics,
    place_ranks,
    read_nodes,
    with_pools,
)
from hisparse_pd.core.memory.numa_binding import MemoryBinder, mbind, with_allowed_policy
from hisparse_pd.transfer.rdma import device_names

_NAME = "NUMA"


def check_numa(
    settings: DoctorSettings, machine: Machine, bind: MemoryBinder = mbind
) -> tuple[list[Check], tuple[str, ...]]:
    """Check each GPU from ``--device`` on as if it had a rank, with an equal share of ``--host-pool-gib``.

    Returns one check for each, or a single one if nothing is placed, and the RDMA devices near the first GPU.
    """
    devices = _devices(settings.device, machine)
    try:
        placements = place_ranks(settings.numa, devices, machine)
    except StartError as error:
        return [failed(_NAME, error, "a node would not start: ")], ()
    if all(placement.node is None and not placement.remedy for placement in placements):
        status = Status.OK if is_gpu(settings.device) else Status.INFO
        return [Check(_NAME, status, f"nothing is placed: {placements[0].why}")], ()
    num_pool_bytes = settings.host_pool_bytes // len(devices)
    checks = [
        _check(f"{_NAME} {device}", placement, settings, num_pool_bytes, machine, bind)
        for device, placement in zip(devices, placements, strict=True)
    ]
    return checks, placements[0].nics


def _devices(device: str, machine: Machine) -> list[str]:
    if not is_gpu(device):
        return [device]
    first = gpu_number(device)
    return [f"cuda:{number}" for number in range(first, max(first + 1, len(machine.gpu_bus_ids())))]


def _check(
    name: str,
    placement: Placement,
    settings: DoctorSettings,
    num_pool_bytes: int,
    machine: Machine,
    bind: MemoryBinder,
) -> Check:
    """Check one rank's place: its NUMA node, free memory there, and the distance of its RDMA devices."""
    if (node := placement.node) is None:
        return Check(name, Status.WARN, f"not placed: {placement.why}", placement.remedy)
    # Either call sets a remedy: if the node has too little memory, or this process may not bind any.
    placement = with_allowed_policy(with_pools(placement, num_pool_bytes, machine), bind)
    free_bytes = read_nodes(machine)[node].free_bytes
    place = str(replace(placement, remedy=""))  # as the log of a node describes it
    found = f"{place}; {show_bytes(free_bytes)} of it free"
    remedies = [placement.remedy] if placement.remedy else []
    remedies += _far_cards(placement, settings, machine)
    return Check(name, Status.WARN if remedies else Status.OK, found, "; ".join(remedies))


def _far_cards(placement: Placement, settings: DoctorSettings, machine: Machine) -> Sequence[str]:
    """Return a remedy if all RDMA devices that would be used are on other NUMA nodes, else no remedy."""
    if settings.transfer_protocol == "tcp":
        return ()
    nodes = nodes_of_nics(machine)
    used = device_names(settings.ib_device) or placement.nics
    at = {name: nodes[name] for name in used if name in nodes}
    if not at or placement.node in at.values():
        return ()
    where = ", ".join(f"{name} is on node {node}" for name, node in at.items())
    remedy = "KV crosses the link between NUMA nodes; name a nearer card in --ib-device, or move one"
    return (f"{where}: {remedy}",)
