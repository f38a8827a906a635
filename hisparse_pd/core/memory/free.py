"""Reads how much main memory this process may still take, by the machine and by its control groups.

Engines check their pools against it before they allocate any; the doctor does the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.machine import Fault, Machine, read_text, show_bytes


class FreeMemory(NamedTuple):
    """The free bytes, and ``where`` they are bounded: by the machine, or by a control group."""

    num_bytes: int
    where: str

    def __str__(self) -> str:
        return f"{show_bytes(self.num_bytes)} in {self.where}"


def free_memory(machine: Machine) -> FreeMemory | None:
    """Return the free main memory, or None where the machine does not tell."""
    bounds = {
        "the machine": _available_bytes(machine),
        "the control group (memory limit)": cgroup_available_bytes(machine),
    }
    known = [FreeMemory(free, where) for where, free in bounds.items() if free is not None]
    return min(known, default=None)


def memory_fault(num_bytes: int, machine: Machine) -> Fault | None:
    """Return why a node cannot have ``num_bytes`` of main memory for its pools, or None."""
    free = free_memory(machine)
    if free is None or num_bytes <= free.num_bytes:
        return None
    return Fault(
        f"{free}, {show_bytes(num_bytes)} asked for",
        "lower --host-pool-tokens or --host-cache-tokens (on CPUs --device-pool-tokens and --kv-pool-tokens "
        "too), or raise the limit of the node's container",
    )


def check_host_memory(num_bytes: int, machine: Machine | None = None) -> None:
    """Raise StartError unless ``num_bytes`` of main memory are free, in machine and container."""
    fault = memory_fault(num_bytes, machine or Machine())
    if fault is not None:
        raise StartError(f"the pools in main memory need {num_bytes} bytes, more than are free: {fault}")


def cgroup_available_bytes(machine: Machine) -> int | None:
    """Return the bytes that the memory limits of this process's control groups leave; None without a
    limit."""
    free_bytes = [
        _group_available_bytes(directory, names)
        for directory, names in _memory_groups(machine)
        if (directory / names.limit).is_file()
    ]
    return min((free for free in free_bytes if free is not None), default=None)


def _available_bytes(machine: Machine) -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", read_text(machine.proc / "meminfo"), re.MULTILINE)
    return int(match[1]) << 10 if match else None


class _GroupFiles(NamedTuple):
    """Names of two files in a control group's directory, and of the ``file_cache`` line in its
    memory.stat."""

    limit: str
    usage: str
    file_cache: str


_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def _memory_groups(machine: Machine) -> list[tuple[Path, _GroupFiles]]:
    """Return the directories of this process's memory groups and their ancestors, with the names of their
    files.

    A container sees its own group at the top of the tree, whatever path its process is listed with, so the
    top is always among the ancestors.
    """
    top = machine.sys / "fs" / "cgroup"
    groups: list[tuple[Path, _GroupFiles]] = []
    for line in read_text(machine.proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        # Version 2 has one tree, which is listed without controllers.
        base, names = (top, _V2) if not controllers else (top / "memory", _V1)
        relative = Path(path.lstrip("/"))
        # A group outside the namespace's root is listed with "..", which names no directory of this tree.
        groups += [(base / part, names) for part in (relative, *relative.parents) if ".." not in part.parts]
    return groups


def _group_available_bytes(directory: Path, names: _GroupFiles) -> int | None:
    """Return the limit less the usage, without inactive file pages, which are reclaimable; None: no limit."""
    limit_text, usage_text = read_text(directory / names.limit), read_text(directory / names.usage)
    if not limit_text.isdecimal() or not usage_text.isdecimal():  # "max": no limit
        return None
    match = re.search(rf"^{names.file_cache} (\d+)$", read_text(directory / "memory.stat"), re.MULTILINE)
    reclaimable = int(match[1]) if match else 0
    return max(0, int(limit_text) - int(usage_text) + reclaimable)
