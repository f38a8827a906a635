"""The operator's own topology for Mooncake (``MC_CUSTOM_TOPO_JSON``), and which devices it leaves to be used.

The variable names a file that says which devices serve which memory, the preferred ones and the others:
``{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}``. Mooncake then opens the devices of the file, whatever else it is
told. A file that it cannot read it passes over with a warning, and one that it cannot parse leaves it without
devices. So the file's devices are checked like named ones, and one that contradicts ``--ib-device`` is a
fault.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from transfer.machine import Fault, Machine
from transfer.rdma import device_names

VARIABLE = "MC_CUSTOM_TOPO_JSON"

_Topology = dict[str, tuple[list[str], list[str]]]
"""Location of memory -> the devices that it prefers, its other devices."""


def wanted_devices(ib_device: str, machine: Machine) -> tuple[tuple[str, ...], Fault | None]:
    """The devices that are named, by ``ib_device`` or by the operator's topology, in order; none: any.

    The fault says why the topology cannot be used; the names are those of ``ib_device`` then.
    """
    named = device_names(ib_device)
    path = machine.environ.get(VARIABLE)
    if path is None:
        return named, None
    where = f"{VARIABLE}={path}"
    try:
        topology = msgspec.json.decode(Path(path).read_bytes(), type=_Topology)
    except (OSError, msgspec.DecodeError) as error:
        return named, Fault(
            f"{where} is no topology ({error})",
            'correct it, in the form {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}, or unset it',
        )
    lists = [names for pair in topology.values() for names in pair]
    in_file = tuple(dict.fromkeys(name for names in lists for name in names))
    if not in_file:
        return named, Fault(f"{where} names no device", "correct it, or unset it")
    if named and set(named) != set(in_file):
        return named, Fault(
            f"{where} names {', '.join(in_file)}, which Mooncake would use instead of --ib-device "
            f"{','.join(named)}",
            "name the same devices in both, or leave one of them out",
        )
    return in_file, None
