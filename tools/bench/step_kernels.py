"""The kernels of a step, by torch's profiler: their kinds, and by how much each makes the step longer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.step_bench import Bench

KINDS = {
    "swap-in": "swap_in|copy_planned",
    "row checks": "check_rows",
    "backup": "backup_newest|newest_slots",
    "indexer logits": "_logits_kernel|paged_logits|prompt_logits",
    "top-k": "^topk$",
    "collectives": "nccl|ranks_gather|ranks_sum",
    "attention": "flash_|sparse_attn|attend_kernel|combine_kernel|get_mla_metadata",
    "experts": (
        "^_(int4_)?product_kernel|^int4_experts|^_lay_out|^_round_tokens"
        "|choose_kernel|narrow_kernel|plan_kernel"
    ),
    "linear layers": "nvjet|gemm|^linear_kernel|lift_values|latent_queries|index_queries",
}
"""Kinds of kernels, each with a pattern for their lower-case names; the first pattern that matches counts."""
REST = "the rest"
"""The kind of kernels that match no pattern: norms, rounding, sampling."""


@dataclass
class Kernel:
    """One kernel's launches in a step, on average over the profiled steps."""

    name: str
    kind: str
    """One of ``KINDS``, or ``REST``."""
    number: float = 0.0
    """Launches."""
    ms: float = 0.0
    """Time from the beginnings of launches to their ends."""
    added_ms: float = 0.0
    """Time by which the launches made the step longer: from the latest end of earlier launches to each one's
    own end. Overlaps are not counted twice, and a gap counts for the kernel behind it."""


def kernels_of(bench: Bench, num_steps: int) -> list[Kernel]:
    """Profile ``num_steps`` further steps and return their kernels, those that add most time first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.run(num_steps)
    return kernels_from(
        [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type.name == "CUDA"
        ],
        num_steps,
    )


def kernels_from(launches: Sequence[tuple[str, float, float]], num_steps: int) -> list[Kernel]:
    """Return the kernels of ``launches`` in ``num_steps`` steps, those that add most time first. A launch is
    a kernel's name and the times of its beginning and its end, in microseconds."""
    found: dict[str, Kernel] = {}
    in_order = sorted(launches, key=lambda launch: launch[1])
    latest_end = in_order[0][1] if in_order else 0.0
    for name, start, end in in_order:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), REST)
        kernel = found.setdefault(name, Kernel(name[:90], kind))
        kernel.number += 1 / num_steps
        kernel.ms += (end - start) / 1e3 / num_steps
        kernel.added_ms += max(0.0, end - latest_end) / 1e3 / num_steps
        latest_end = max(latest_end, end)
    return sorted(found.values(), key=lambda kernel: -kernel.added_ms)
