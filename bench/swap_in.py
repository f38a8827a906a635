"""Swap-in on one GPU: time per call in every cell of a table, beside the peer's, and the hit rates of traces.

The first table, for each reading of the workload's rule (``bench/swap_in_workload.py``): every request's rows
lie together in an 8 GiB pinned pool; 30 steps from an empty buffer. The first 3 steps run
alone, the other 27 are captured in one CUDA graph that is replayed once between two events: us per call =
time / 27. It is captured before the first 3 run, and nothing is allocated or freed from then on: when memory
comes or goes (torch frees what it can when a capture begins) the GPU forgets its translations of host
addresses, which the first 3 have loaded. With ``--repeat N`` a cell is built and measured N times: the first
is its figure, the others show the spread. Single calls are timed by events too, each behind a wait that hides
the launch from the clock.

The second table, for the synthetic trace and each recorded one (``bench/record_trace.py``): hit rate by
capacity beside exact LRU's, and the time of one layer's call. ``bench/hit_rates.py`` counts without a GPU.

    python bench/swap_in.py [--fresh both] [--trace FILE ...] [--batch 1 8 ...] [--item 1152] [--miss 0 2 ...]

Writes bench/out/swap_in.json and, by ``bench/swap_in_report.py``, its pictures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts, spread
from bench.gpu_timing import timed_us
from bench.report import write_json
from bench.swap_in_report import judge, plot, print_report
from bench.swap_in_workload import (
    CAPACITY,
    CONTEXT,
    FRESH,
    MISS_PERCENTS,
    NUM_STEPS,
    NUM_WARM_STEPS,
    Cell,
    selections,
)
from bench.traces import Trace, hit_rates, load_trace, synthetic_trace
from kernels.hot_state import HITS, MISSES

POOL_BYTES = 8 << 30
TRACE_ITEM_BYTES = 1152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fresh", choices=(*FRESH, "both"), default=FRESH[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--item", type=int, nargs="+", default=[1152, 656])
    parser.add_argument("--miss", type=int, nargs="+", default=list(MISS_PERCENTS), choices=MISS_PERCENTS)
    parser.add_argument("--repeat", type=int, default=1, help="times that a cell is built and measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trace", type=Path, nargs="*", default=[], help="recorded traces, beside the synthetic"
    )
    parser.add_argument("--no-traces", action="store_true", help="leave out the second table")
    arguments = parser.parse_args()
    traces = [synthetic_trace(arguments.seed), *map(load_trace, arguments.trace)]
    pool = pinned_pool()
    report: dict[str, Any] = {
        "facts": run_facts(),
        "gpu": torch.cuda.get_device_name(),
        "num_repeats": arguments.repeat,
        "copy_peak_gb_s": copy_peak(pool),
        "tables": [
            {
                "fresh": fresh,
                "cells": [
                    measure_cell(pool, item, batch, miss, arguments.seed, fresh, arguments.repeat)
                    for item in arguments.item
                    for batch in arguments.batch
                    for miss in arguments.miss
                ],
            }
            for fresh in (FRESH if arguments.fresh == "both" else (arguments.fresh,))
        ],
        "traces": []
        if arguments.no_traces
        else [measure_trace(pool, trace, capacity) for trace in traces for capacity in trace.capacities],
    }
    judge(report)
    write_json(OUT / "swap_in.json", report)
    print_report(report)
    plot(report, OUT / "swap_in")


# --- the clock --------------------------------------------------------------------------------------------


def copy_peak(pool: Tensor) -> dict[str, Any]:
    """GB/s of plain copies of 1 GiB, pinned host to device."""
    num_bytes = 1 << 30
    dev = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    rates = []
    for repetition in range(6):
        src = pool[repetition * num_bytes : (repetition + 1) * num_bytes]
        us = timed_us(lambda src=src: dev.copy_(src, non_blocking=True))
        rates.append(num_bytes / us / 1e3)
    return spread(rates[1:])


# --- first table ------------------------------------------------------------------------------------------


def pinned_pool() -> Tensor:
    """POOL_BYTES of noise in pinned memory: made once, seen by every cell."""
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8, pin_memory=True)
    chunk = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
    for start in range(0, POOL_BYTES, len(chunk)):
        pool[start : start + len(chunk)] = chunk.roll(start // len(chunk))
    return pool


def host_pool(pool: Tensor, num_layers: int, item_bytes: int) -> Tensor:
    """``pool`` as uint8 [num_layers, num_slots, item_bytes], with as many slots as it has room for."""
    num_slots = POOL_BYTES // num_layers // item_bytes
    return pool[: num_layers * num_slots * item_bytes].view(num_layers, num_slots, item_bytes)


def measure_cell(
    pool: Tensor, item_bytes: int, batch: int, miss_percent: int, seed: int, fresh: str, num_repeats: int
) -> dict[str, Any]:
    num_calls = NUM_STEPS - NUM_WARM_STEPS
    steps = selections(batch, miss_percent, seed, fresh).cuda()
    seq_lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
    out = torch.empty_like(steps)

    def new_cell() -> Cell:
        return Cell(host_pool(pool, 1, item_bytes), batch, CONTEXT, CAPACITY, "cuda")

    graph_us = []
    for _ in range(num_repeats):
        cell = new_cell()
        cell.prepare(steps[0], seq_lens, out[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in range(NUM_WARM_STEPS, NUM_STEPS):
                cell.call(steps[step], seq_lens, out[step])
        for step in range(NUM_WARM_STEPS):
            cell.call(steps[step], seq_lens, out[step])
        cell.state.counters.zero_()
        graph_us.append(timed_us(graph.replay) / num_calls)
        hits, misses, evictions = cell.counted()
        cell.verify(steps[-1], out[-1])
        del graph, cell

    cell = new_cell()
    single_us = [
        timed_us(lambda step=step: cell.call(steps[step], seq_lens, out[step])) for step in range(NUM_STEPS)
    ]
    return {
        "item_bytes": item_bytes,
        "batch": batch,
        "miss_percent": miss_percent,
        "us": graph_us[0],
        "repeats_us": spread(graph_us),
        "gb_s": misses / num_calls * item_bytes / graph_us[0] / 1e3,
        "single_us": spread(single_us[NUM_WARM_STEPS:]),
        "hits": hits,
        "misses": misses,
        "evictions": evictions,
    }


# --- second table -----------------------------------------------------------------------------------------


def measure_trace(pool: Tensor, trace: Trace, capacity: int) -> dict[str, Any]:
    """One request, a table of its own for each index layer; times are of one layer's call."""
    selected, seq_lens = torch.from_numpy(trace.selected).cuda(), torch.from_numpy(trace.seq_lens).cuda()
    out = torch.empty_like(selected)
    host = host_pool(pool, trace.num_layers, TRACE_ITEM_BYTES)
    calls = [(step, layer) for step in range(trace.num_steps) for layer in range(trace.num_layers)]
    num_warm_calls = NUM_WARM_STEPS * trace.num_layers

    def call(cell: Cell, step: int, layer: int) -> None:
        one = slice(layer, layer + 1)
        cell.call(selected[step, one], seq_lens[step : step + 1], out[step, one], layer)

    cell = Cell(host, 1, trace.context, capacity, "cuda")
    cell.prepare(selected[0, :1], seq_lens[:1], out[0, :1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step, layer in calls[num_warm_calls:]:
            call(cell, step, layer)
    for step, layer in calls[:num_warm_calls]:
        call(cell, step, layer)
    cell.state.counters.zero_()
    us = timed_us(graph.replay) / (len(calls) - num_warm_calls)
    hits, misses = (cell.counted()[column] for column in (HITS, MISSES))
    del graph

    cell = Cell(host, 1, trace.context, capacity, "cuda")
    single_us = [timed_us(lambda where=where: call(cell, *where)) for where in calls]
    return {
        **hit_rates(trace, capacity, hits / (hits + misses)),
        "us": us,
        "single_us": spread(single_us[num_warm_calls:]),
    }


if __name__ == "__main__":
    main()
