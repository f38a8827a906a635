"""Chooses a node's KV transport once at its start, and checks whether peers can reach its address.

Each engine calls ``choose_transport`` before it loads the model; the doctor reports the same checks. ``rdma``
means RDMA or an error, never TCP: whatever makes Mooncake fall back to TCP in silence is checked first
(``rdma.py`` has the devices). ``auto`` takes RDMA when no check fails, else TCP, and gives the reason. Peers
compare their protocols when they register.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hisparse_pd.base.access import parse_address
from hisparse_pd.base.settings import TransportSettings
from hisparse_pd.base.vocabulary import info_metric
from hisparse_pd.core.memory.machine import Fault, Machine, gpu_direct_fault, memlock_fault
from hisparse_pd.protocol.names import resolve
from hisparse_pd.transfer.errors import TransferSetupError
from hisparse_pd.transfer.rdma import (
    GidGrade,
    IpAddress,
    RdmaDevice,
    device_fault,
    missing_device_fault,
    no_device_fault,
    read_devices,
    wanted_devices,
)

log = logging.getLogger(__name__)

Protocol = Literal["tcp", "rdma"]
AskedProtocol = Literal["tcp", "rdma", "auto"]

RESOLVE_SECS = 5.0
"""Limit for resolving the name at which peers reach this node."""
_MAX_REASON_CHARS = 400
"""Longest reason, which is a label of a metric."""


@dataclass(frozen=True)
class Transport:
    """The chosen transport. ``devices``: the RDMA devices, empty for TCP. ``reason``: one line for people."""

    protocol: Protocol
    devices: tuple[str, ...] = ()
    reason: str = ""

    @property
    def info_metric(self) -> str:
        devices = ",".join(self.devices)
        return info_metric("transfer_info", protocol=self.protocol, devices=devices, reason=self.reason)


TCP = Transport("tcp", reason="asked for")


def choose_transport(
    settings: TransportSettings,
    num_host_bytes: int,
    machine: Machine | None = None,
    near: Collection[str] = (),
) -> Transport:
    """Choose the transport of a node that registers ``num_host_bytes`` of main memory, and memory of its GPU.

    ``near``: RDMA devices near that memory, which are preferred if the operator names none. Raises
    TransferSetupError when the operator asks for rdma and it cannot work.
    """
    machine = machine or Machine()
    asked, ib_device = settings.transfer_protocol, settings.ib_device
    transport = _choose(settings, num_host_bytes, machine, near)
    # On a machine with RDMA hardware, the operator hardly expects that auto takes TCP.
    is_surprising = asked == "auto" and transport.protocol == "tcp" and bool(read_devices(machine))
    level = logging.WARNING if is_surprising else logging.INFO
    log.log(level, "KV transport: %s (%s)", transport.protocol, transport.reason)
    if transport.protocol == "tcp" and ib_device:
        log.warning("--ib-device %s is not used: the KV transport is tcp", ib_device)
    return transport


def _choose(
    settings: TransportSettings, num_host_bytes: int, machine: Machine, near: Collection[str]
) -> Transport:
    asked, uses_gpu = settings.transfer_protocol, settings.device.startswith("cuda")
    if asked == "tcp":
        return TCP
    host = settings.reachable_host
    selection = select_devices(settings.ib_device, host, machine, near, only_sure=asked == "auto")
    checks = (
        *selection.faults,
        forced_tcp_fault(machine),
        memlock_fault(num_host_bytes, len(selection.devices), machine),
        gpu_direct_fault(machine) if uses_gpu and selection.devices else None,
    )
    faults = [fault for fault in checks if fault is not None]
    if not faults:
        reason = "; ".join((selection.found, *selection.notes))
        return Transport("rdma", selection.devices, _shorten(reason))
    if asked == "auto":
        return Transport("tcp", (), _shorten("no RDMA: " + "; ".join(fault.what for fault in faults)))
    raise TransferSetupError("--transfer-protocol rdma: " + " | ".join(map(str, faults)))


@dataclass(frozen=True)
class DeviceSelection:
    """The devices to use, none if there are ``faults``. ``notes``: oddities that do not prevent RDMA."""

    devices: tuple[str, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> str:
        return f"RDMA devices usable: {', '.join(self.devices)}"


def select_devices(
    ib_device: str, host: str, machine: Machine, near: Collection[str] = (), *, only_sure: bool = False
) -> DeviceSelection:
    """Select RDMA devices: those named by ``ib_device`` (names with commas) or the operator's topology, else
    the usable ones of ``near``, else all usable ones. ``host``: the address that peers are told.
    ``only_sure``: leave out a device whose GID may not reach the peer."""
    devices = read_devices(machine)
    if not devices:
        return DeviceSelection((), (no_device_fault(machine),))

    names, topology_fault = wanted_devices(ib_device, machine)
    if topology_fault is not None:
        return DeviceSelection((), (topology_fault,))
    usable, faults, notes = _try_devices(names or tuple(devices), devices, host, machine, only_sure=only_sure)
    # Of devices that the operator named, all must work; of others, one is enough.
    if not usable or (names and faults):
        return DeviceSelection((), tuple(faults))
    notes += [f"left out: {fault.what}" for fault in faults]

    far = [] if names else [name for name in usable if name not in near]
    if 0 < len(far) < len(usable):  # some are near
        usable = [name for name in usable if name in near]
        notes.append(f"left out: {', '.join(far)} of other NUMA nodes (--ib-device takes them)")

    link_layers = {port.link_layer for name in usable if (port := devices[name].port)}
    if len(link_layers) > 1:
        notes.append(f"{' and '.join(sorted(link_layers))} do not reach each other, name devices of one kind")
    return DeviceSelection(tuple(usable), (), tuple(notes))


class _Tried(NamedTuple):
    """The devices that can be used, why others cannot, and oddities of the former."""

    usable: list[str]
    faults: list[Fault]
    notes: list[str]


def _try_devices(
    names: Iterable[str], devices: Mapping[str, RdmaDevice], host: str, machine: Machine, *, only_sure: bool
) -> _Tried:
    """Check for each of ``names`` whether it is a device that can be used."""
    advertised = addresses_of(host)
    tried = _Tried([], [], [])
    for name in names:
        device = devices.get(name)
        if device is None:
            tried.faults.append(missing_device_fault(name, devices, machine))
            continue
        fault = device_fault(device, machine)
        grade, note = _reach(device, host, advertised)
        if fault is None and only_sure and grade < GidGrade.ROUTABLE:
            fault = Fault(note, "give its interface an address, or use --transfer-protocol rdma")
        if fault is not None:
            tried.faults.append(fault)
            continue
        tried.usable.append(name)
        tried.notes.extend([note] if note else [])
    return tried


def environment_fault(machine: Machine) -> Fault | None:
    """Return why no engine may start, whatever its transport."""
    if machine.environ.get("MC_TCP_PROTO") != "1":
        return None
    return Fault(
        "MC_TCP_PROTO=1 in the environment: that version of Mooncake's TCP protocol reports a write as done "
        "before it has landed, and even when the peer refuses it",
        "unset MC_TCP_PROTO",
    )


def forced_tcp_fault(machine: Machine) -> Fault | None:
    """Return why Mooncake would take TCP even when RDMA is asked for."""
    if "MC_FORCE_TCP" not in machine.environ:
        return None
    return Fault("MC_FORCE_TCP is set in the environment", "unset it, or use --transfer-protocol tcp")


def _reach(device: RdmaDevice, host: str, advertised: Collection[IpAddress]) -> tuple[GidGrade, str]:
    """Return how far a device reaches, and a note on its GID, or an empty string."""
    if device.port is None:
        return GidGrade.NONE, ""
    grade, gid = device.port.best_gid(advertised)
    if grade is GidGrade.LINK_LOCAL:
        return grade, f"{device.name} has no GID with an IP address and reaches peers on the same link only"
    if grade is GidGrade.ROUTABLE and gid is not None and device.port.link_layer != "InfiniBand":
        return grade, f"{device.name} has the address {gid.ip}, not the advertised {host}"
    return grade, ""


# --- the advertised address -------------------------------------------------------------------------------


def addresses_of(host: str) -> frozenset[IpAddress]:
    """Return the IP addresses of a host name or address; empty when it cannot be resolved in time."""
    try:
        found = map(parse_address, resolve(host, time.monotonic() + RESOLVE_SECS))
    except OSError:
        return frozenset()
    return frozenset(address for address in found if address is not None)


def address_fault(host: str) -> Fault | None:
    """Return why peers may not reach ``host``: it does not resolve, or no interface here has its address."""
    addresses = addresses_of(host)
    if not addresses:
        return Fault(
            f"advertised address {host} cannot be resolved here; peers that cannot resolve it either send "
            "nothing over a network",
            "set --advertise-host to an address, or make the name resolve before the first request",
        )
    if any(map(is_local, addresses)):
        return None
    return Fault(
        f"advertised address {host} belongs to no network interface of this machine",
        "set --advertise-host, unless a NAT forwards all ports of that address to this machine",
    )


def is_local(address: IpAddress) -> bool:
    """Return whether an interface of this machine has the address, by binding a socket to it."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((str(address), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[: _MAX_REASON_CHARS - 3]}..."
