"""The GPU memory that ``tools.bench.decode_step`` takes, by part, beside what a decode node plans for each.

It shows whether ``decode_node/sizing.py`` plans enough: ``MemoryByPart`` reads the memory in use at each
stage, and ``planned_weights`` and ``planned_pools`` have the plan. ``tools.bench.whole_node`` uses it, too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.core.memory.device import DeviceMemory
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.stored_weights import weight_files
from hisparse_pd.core.model.weight_reader import WeightFiles
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.sizing import device_demand, entry_bytes

RESERVE = ("graphs and workspaces", "steps")
"""The last two parts that ``Bench`` and ``measure`` mark. Their sum is compared with what a node plans for
both, the "reserve" of ``planned_pools``: the reserve for activations and the runner's counts of tokens."""


class MemoryByPart:
    """Growth of a GPU's used memory from mark to mark, all processes together; the first mark counts all that
    is in use by then. Empty on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.gb: dict[str, float] = {}
        self._device = device
        self._used_bytes = 0

    def mark(self, part: str) -> None:
        """Count the memory that was taken since the last mark as ``part``'s."""
        if self._device.type != "cuda":
            return
        torch.cuda.synchronize(self._device)
        used_bytes = DeviceMemory.read(self._device).used_bytes
        self.gb[part] = self.gb.get(part, 0.0) + (used_bytes - self._used_bytes) / 1e9
        self._used_bytes = used_bytes


def planned_weights(model_path: Path) -> float:
    """Return the GB of a checkpoint's weights."""
    with WeightFiles(weight_files(model_path)) as files:
        return files.num_bytes / 1e9


def planned_pools(settings: DecodeSettings, spec: ModelSpec, totals: SlotCounts) -> dict[str, float]:
    """Return the GB that ``decode_node.sizing`` counts for pools of these sizes, by part: "tables", "pools"
    and "reserve"."""
    sizes = {
        "host_pool_tokens": totals.host,
        "device_pool_tokens": totals.device,
        "index_pool_tokens": totals.index,
    }
    demand = device_demand(settings.model_copy(update=sizes), spec)
    fixed = dict(demand.fixed)
    plan = {
        "tables": fixed.pop("per-request tables") + totals.device * entry_bytes(spec),
        "reserve": fixed.pop("reserve for activations") + fixed.pop("counts of tokens"),
    }
    plan["pools"] = sum(fixed.values()) + totals.device * (demand.bytes_per_token - entry_bytes(spec))
    return {part: num_bytes / 1e9 for part, num_bytes in plan.items()}


def show(found: dict[str, float], plan: dict[str, float]) -> str:
    """Return ``found`` as text, in the order of its marks, with the plan in brackets."""
    parts = [
        f"{part} {gb:.2f}" + (f" ({plan[part]:.2f})" if part in plan else "") for part, gb in found.items()
    ]
    reserved = sum(found.get(part, 0.0) for part in RESERVE)
    return f"{', '.join(parts)}; the last two {reserved:.2f} ({plan['reserve']:.2f} reserved)"
