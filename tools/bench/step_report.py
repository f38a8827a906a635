"""Measures one row of a report about decode steps, and prints the table of such rows.

``tools.bench.decode_step`` and ``tools.bench.whole_node`` make their reports with it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.grammar.token_trie import Grammar
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.spec import ModelSpec
from tools.bench.facts import run_facts
from tools.bench.report import table_of
from tools.bench.step_bench import RESIDENT, Bench
from tools.bench.step_kernels import KINDS, REST, kernels_of
from tools.bench.step_memory import show
from tools.bench.step_options import make_settings
from tools.bench.step_prompt import Prefilled

STEPS_TO_CHOOSE = 64
"""Untimed steps before a row that chooses its number of drafts, in which each number is tried."""


def measure(
    model: DsaModel,
    arguments: argparse.Namespace,
    prompt: Prefilled,
    mode: Mode,
    batch: int,
    num_drafts: int,
    grammar: Grammar | None,
    *,
    chooses_drafts: bool = False,
    is_resident: bool = False,
) -> dict[str, Any]:
    """Measure one row of the report: untimed steps, timed ones, and on a GPU as many for the profiler."""
    settings = make_settings(arguments, batch, num_drafts)
    num_warm = max(2, arguments.steps // 4, STEPS_TO_CHOOSE if chooses_drafts else 0)
    most = max(arguments.steps, num_warm)
    bench = Bench(
        model.spec,
        model,
        settings,
        prompt,
        mode,
        most,
        grammar,
        chooses_drafts=chooses_drafts,
        is_resident=is_resident,
    )
    try:
        bench.run(num_warm)
        before, tokens_before = bench.totals, bench.num_tokens
        secs = bench.run(arguments.steps)
        num_tokens = bench.num_tokens - tokens_before
        hits, misses, _ = (after - old for after, old in zip(bench.totals, before, strict=True))
        num_distinct = len({request.output_token_ids[-1] for request in bench.requests})
        bench.used.mark("steps")
        kernels = kernels_of(bench, arguments.steps) if model.device.type == "cuda" else []
    finally:
        bench.memory.close()

    num_ranks = 1 if model.ranks is None else model.ranks.size
    step_ms = 1e3 * secs / arguments.steps
    miss_bytes = misses / arguments.steps * bench.tables.bytes_per_miss
    swap_in_ms = sum(kernel.ms for kernel in kernels if kernel.kind == "swap-in")
    added_ms: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        added_ms[kernel.kind] += kernel.added_ms
    return {
        "mode": RESIDENT if is_resident else str(mode),
        "batch": batch,
        "num_drafts": num_drafts,
        "chooses_drafts": chooses_drafts,
        "has_grammar": grammar is not None,
        "step_ms": step_ms,
        "tokens_a_step": num_tokens / arguments.steps / batch,
        "tokens_a_second": num_ranks * num_tokens / secs,
        "distinct_tokens": num_distinct,
        "misses_a_token": misses / num_tokens,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "mb_a_step": miss_bytes / 1e6,
        "gpu_ms": dict(added_ms),
        "kernels": [asdict(kernel) for kernel in kernels],
        "num_kernels": sum(kernel.number for kernel in kernels),
        "swap_in_gb_s": miss_bytes / swap_in_ms / 1e6 if swap_in_ms and misses else None,
        "memory_gb": bench.used.gb,
        "planned_gb": bench.planned,
    }


def shared_report(arguments: argparse.Namespace, spec: ModelSpec) -> dict[str, Any]:
    """Return what the reports of this benchmark and of ``whole_node`` begin with."""
    return {
        "facts": run_facts(),
        "model": arguments.model_path.name,
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu",
        "num_layers": spec.num_layers,
        "context": arguments.context,
        "buffer": arguments.buffer,
        "verifies_rows": spec.has_row_checks,
    }


def print_steps(
    title: str, rows: Sequence[Mapping[str, Any]], console: Console, names: Sequence[str]
) -> None:
    """Print a table with a line for each row: the columns ``names``, and a step's parts. Below it, print a
    line of GPU memory for each row that has one."""
    kinds = (*KINDS, REST) if any(row["gpu_ms"] for row in rows) else ()
    lines = [
        {name: row[name] for name in names} | {kind: row["gpu_ms"].get(kind) for kind in kinds}
        for row in rows
    ]
    console.print(table_of(f"{title}; ms a step", lines))
    for row in rows:
        if row["memory_gb"]:
            console.print(
                f"{row['mode']} {row['batch']}: GB {show(row['memory_gb'], row['planned_gb'])}",
                highlight=False,
            )
