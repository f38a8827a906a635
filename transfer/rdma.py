"""The RDMA devices of this machine, as sysfs shows them, and the reasons why a device cannot be used.

``transport.py`` and the doctor call these functions before Mooncake is started. The checks follow what
Mooncake does with a device. It opens one port (``MC_IB_PORT``, else 1), takes a GID of RoCE v2 or InfiniBand,
an IPv4 one first (or the one at ``MC_GID_INDEX``, whatever it is), and leaves out a device for which that
fails. When no device is left, it runs on TCP without any message.

An operator's topology (``MC_CUSTOM_TOPO_JSON``) is a file that says which devices serve which memory:
``{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}``, the preferred devices and the others. Mooncake opens the devices of
that file, whatever other settings say.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from pathlib import Path

import msgspec

from hisparse_pd.core.memory.machine import Fault, Machine, read_text, verbs_library_fault

IpAddress = IPv4Address | IPv6Address

_ACTIVE = "4: ACTIVE"
_ETHERNET = "Ethernet"
_LINK_LAYERS = ("InfiniBand", _ETHERNET)
_ROCE_V2 = "RoCE v2"
_TOPOLOGY_VARIABLE = "MC_CUSTOM_TOPO_JSON"
_Topology = dict[str, tuple[list[str], list[str]]]
"""Location of memory -> its preferred devices, its other devices."""


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table; ``type`` and ``netdev`` (the network interface) as sysfs has them."""

    index: int
    address: IPv6Address
    type: str
    netdev: str = ""

    @property
    def ip(self) -> IpAddress:
        """The network interface's address: IPv4 when the GID is made of an IPv4 address."""
        return self.address.ipv4_mapped or self.address


class GidGrade(IntEnum):
    """How far a GID reaches. RDMA may work from ``LINK_LOCAL`` on, and works from ``ROUTABLE`` on."""

    NONE = 0
    ROCE_V1 = 1
    """Ethernet without RoCE v2, which Mooncake takes only by MC_GID_INDEX."""
    LINK_LOCAL = 2
    """Ethernet without an IP address, which reaches at most peers on the same link."""
    ROUTABLE = 3
    """InfiniBand, or RoCE v2 with another address than the advertised one."""
    ADVERTISED = 4
    """The GID of the address that this node advertises to peers."""


@dataclass(frozen=True)
class Port:
    """The port of a device that Mooncake opens. ``state``: such as ``4: ACTIVE``.

    ``gids``: the GIDs that are not all zero. ``gid_index``: the only index that Mooncake looks at, or None.
    """

    number: int
    state: str
    link_layer: str
    gids: tuple[Gid, ...]
    gid_index: int | None = None

    def best_gid(self, advertised: Collection[IpAddress] = ()) -> tuple[GidGrade, Gid | None]:
        """Return the grade of the GID that reaches farthest, and that GID: the first of those that reach
        equally far."""
        graded = [
            (self._grade(gid, advertised), gid) for gid in self.gids if self.gid_index in (None, gid.index)
        ]
        return max(graded, key=lambda entry: (entry[0], -entry[1].index), default=(GidGrade.NONE, None))

    def _grade(self, gid: Gid, advertised: Collection[IpAddress]) -> GidGrade:
        if self.link_layer == _ETHERNET:
            if gid.type != _ROCE_V2:  # RoCE v1, which MC_GID_INDEX may choose, stays on its link
                return GidGrade.ROCE_V1 if self.gid_index is None else GidGrade.LINK_LOCAL
            if gid.address.is_link_local:
                return GidGrade.LINK_LOCAL
        return GidGrade.ADVERTISED if gid.ip in advertised else GidGrade.ROUTABLE


@dataclass(frozen=True)
class RdmaDevice:
    """One device. ``uverbs``: its character devices, such as ``uverbs0``; empty without ib_uverbs."""

    name: str
    port_numbers: tuple[int, ...]
    port: Port | None
    """The port that Mooncake opens."""
    uverbs: tuple[str, ...]


def read_devices(machine: Machine) -> dict[str, RdmaDevice]:
    """Return all RDMA devices that the kernel shows, by name, as Mooncake would open them."""
    uverbs = _uverbs_by_device(machine)
    return {
        path.name: _read_device(path, tuple(uverbs.get(path.name, ())), machine.environ)
        for path in sorted(_children(machine.infiniband))
    }


def device_names(ib_device: str) -> tuple[str, ...]:
    """Return the names in an ``ib_device`` setting, in order, each once."""
    return tuple(dict.fromkeys(name for name in map(str.strip, ib_device.split(",")) if name))


def wanted_devices(ib_device: str, machine: Machine) -> tuple[tuple[str, ...], Fault | None]:
    """Return the devices that ``ib_device`` or the operator's topology names, in order; empty means any.

    Where the topology cannot be used, return the names in ``ib_device``, and a fault that says why.
    """
    named = device_names(ib_device)
    path = machine.environ.get(_TOPOLOGY_VARIABLE)
    if path is None:
        return named, None
    where = f"{_TOPOLOGY_VARIABLE}={path}"
    try:
        topology = msgspec.json.decode(Path(path).read_bytes(), type=_Topology)
    except (OSError, msgspec.DecodeError) as error:
        remedy = 'correct it, in the form {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}, or unset it'
        return named, Fault(f"{where} is no topology ({error})", remedy)
    in_file = tuple(dict.fromkeys(name for lists in topology.values() for names in lists for name in names))
    if not in_file:
        return named, Fault(f"{where} names no device", "correct it, or unset it")
    if named and set(named) != set(in_file):
        return named, Fault(
            f"{where} names {', '.join(in_file)}, which Mooncake would use instead of --ib-device "
            f"{','.join(named)}",
            "name the same devices in both, or leave one of them out",
        )
    return in_file, None


def port_number(environ: Mapping[str, str]) -> int:
    """Return the number of the port that Mooncake opens on every device."""
    return _small_number(environ.get("MC_IB_PORT"), 1)


def chosen_gid_index(environ: Mapping[str, str]) -> int | None:
    """Return the GID index that the environment sets for Mooncake; None if Mooncake looks for one."""
    index = _small_number(environ.get("MC_GID_INDEX", environ.get("NCCL_IB_GID_INDEX")), -1)
    return None if index < 0 else index


def device_fault(device: RdmaDevice, machine: Machine) -> Fault | None:
    """Return why Mooncake cannot open the device; None when it should be able to."""
    port = device.port
    if port is None:
        number, ports = port_number(machine.environ), ", ".join(map(str, device.port_numbers)) or "none"
        return Fault(
            f"{device.name} has no port {number}, its ports: {ports}", "set MC_IB_PORT to one of them"
        )
    where = f"{device.name} port {port.number}"
    if port.state != _ACTIVE:
        return Fault(
            f"{where} is in state '{port.state}', not '{_ACTIVE}'",
            "check cable and switch, bring its interface up, on InfiniBand start a subnet manager",
        )
    if port.link_layer not in _LINK_LAYERS:
        return Fault(
            f"{where} has link layer '{port.link_layer}', not {' or '.join(_LINK_LAYERS)}",
            "name another device in --ib-device, or use --transfer-protocol tcp",
        )
    return _gid_fault(port, where) or _verbs_fault(device, machine)


def missing_device_fault(name: str, devices: Collection[str], machine: Machine) -> Fault:
    """Return the fault of a name in --ib-device that no device has."""
    present = ", ".join(devices) or "none"
    return Fault(f"{name} is not in {machine.infiniband}, which has: {present}", "correct --ib-device")


def no_device_fault(machine: Machine) -> Fault:
    return Fault(
        f"no RDMA device in {machine.infiniband}",
        "load the network card's driver, pass the devices into the container, or use --transfer-protocol tcp",
    )


def _gid_fault(port: Port, where: str) -> Fault | None:
    grade, gid = port.best_gid()
    if grade is GidGrade.NONE and port.gid_index is not None:
        present = ", ".join(str(entry.index) for entry in port.gids) or "none"
        return Fault(
            f"{where} has no GID at index {port.gid_index}, it has them at: {present}",
            "change or unset MC_GID_INDEX and NCCL_IB_GID_INDEX",
        )
    if grade is GidGrade.NONE:
        return Fault(
            f"{where} has no GID, all entries are zero", "give its network interface an address, bring it up"
        )
    if grade is GidGrade.ROCE_V1 and gid is not None:
        return Fault(
            f"{where} has GIDs of RoCE v1 only, and RoCE v2 is needed",
            f"switch it to RoCE v2, or set MC_GID_INDEX={gid.index} if all peers are on the same link",
        )
    return None


def _verbs_fault(device: RdmaDevice, machine: Machine) -> Fault | None:
    if not device.uverbs:
        return Fault(f"{device.name} has no verbs device", "load the kernel module ib_uverbs")
    for node in (machine.dev / "infiniband" / name for name in device.uverbs):
        if not os.access(node, os.R_OK | os.W_OK):
            state = "cannot be read and written by this user" if node.exists() else "is not there"
            return Fault(
                f"{device.name}: {node} {state}",
                "pass it into the container (docker: --device /dev/infiniband), with access for this user",
            )
    library_fault = verbs_library_fault(machine)
    if library_fault is None and device.name not in machine.verbs_devices():
        return Fault(
            f"{device.name}: libibverbs has no driver for it",
            "install the package ibverbs-providers (Debian, Ubuntu) or rdma-core",
        )
    return library_fault


# --- sysfs ------------------------------------------------------------------------------------------------


def _uverbs_by_device(machine: Machine) -> dict[str, list[str]]:
    """Return the character devices of each RDMA device, as libibverbs finds them; software devices count."""
    found: dict[str, list[str]] = {}
    for path in sorted(_children(machine.sys / "class" / "infiniband_verbs")):
        if name := read_text(path / "ibdev"):  # there is also a file abi_version
            found.setdefault(name, []).append(path.name)
    return found


def _read_device(path: Path, uverbs: tuple[str, ...], environ: Mapping[str, str]) -> RdmaDevice:
    ports = {int(port.name): port for port in _numbered(path / "ports")}
    opened = ports.get(port_number(environ))
    port = _read_port(opened, chosen_gid_index(environ)) if opened is not None else None
    return RdmaDevice(path.name, tuple(ports), port, uverbs)


def _read_port(path: Path, gid_index: int | None) -> Port:
    gids = []
    for entry in _numbered(path / "gids"):
        try:
            address = IPv6Address(read_text(entry))
        except AddressValueError:
            continue
        if int(address):
            types, netdevs = path / "gid_attrs" / "types", path / "gid_attrs" / "ndevs"
            gid_type, netdev = read_text(types / entry.name), read_text(netdevs / entry.name)
            gids.append(Gid(int(entry.name), address, gid_type, netdev))
    state, link_layer = read_text(path / "state"), read_text(path / "link_layer")
    return Port(int(path.name), state, link_layer, tuple(gids), gid_index)


def _numbered(directory: Path) -> list[Path]:
    """Return the entries of a sysfs directory that have a number as name, in numeric order."""
    return sorted((path for path in _children(directory) if path.name.isdecimal()), key=lambda p: int(p.name))


def _children(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _small_number(text: str | None, default: int) -> int:
    """Parse a variable as Mooncake does: text that is no number counts as 0, and numbers outside [0, 256)
    are ignored."""
    try:
        number = int(text) if text is not None else default
    except ValueError:
        number = 0
    return number if 0 <= number < 256 else default
