"""The NUMA nodes of the machine that tests run on, and what its kernel says of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import read_nodes
from hisparse_pd.core.memory.numa_binding import policy_fault

_MAPS = Path("/proc/self/numa_maps")
HERE = min((node.number for node in read_nodes(Machine()).values() if node.total_bytes), default=0)
"""A node with memory."""
_FAULT = policy_fault(HERE)
needs_policies = pytest.mark.skipif(
    _FAULT is not None or not _MAPS.exists(), reason=str(_FAULT or f"this kernel has no {_MAPS}")
)


def numa_maps_line(addr: int) -> str:
    """What the kernel says of the mapping that ``addr`` lies in: its policy, and its pages by node."""
    lines = _MAPS.read_text().splitlines()
    starts = [int(line.split()[0], 16) for line in lines]
    return lines[max(i for i, start in enumerate(starts) if start <= addr)]
