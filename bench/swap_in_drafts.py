"""Swap-in of several new positions a request on one GPU: time by batch, new positions and misses.

Every number of new positions gets the same tokens' selections (``bench/swap_in_workload.py``:
``draft_selections``), 120 of each request: 120 calls of one position, 60 of two, 40 of three or 30 of four.
All drafts count as accepted, so each number misses the same positions in all, and one column says what a
token costs. The calls of the first 12 tokens run alone; the others are captured in one CUDA graph that is
replayed once between two events, as in ``bench/swap_in.py``. ``max_new`` 1 is the code without drafts; the
others are compiled for the largest number. The hot buffer is as large as four need, for all.

    python bench/swap_in_drafts.py [--batch 1 8 ...] [--new 1 2 3 4] [--miss 0 2 ...] [--union 1.9]

Writes bench/out/swap_in_drafts.json. docs/measurements.md has SGLang's kernel on the same selections.
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
from bench.report import make_console, table_of, write_json
from bench.swap_in import copy_peak, host_pool, pinned_pool
from bench.swap_in_workload import CONTEXT, PAGE_SIZE, TOP_K, Cell, draft_selections
from kernels.hot_state import HITS, MISSES

NUM_TOKENS = 120
NUM_WARM_TOKENS = 12
"""Multiples of 1, 2, 3 and 4."""
MOST_NEW = 4
HOT_CAPACITY = MOST_NEW * TOP_K + PAGE_SIZE
"""Serves the union of any four selections and their new positions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--new", type=int, nargs="+", default=[1, 2, 3, 4], choices=range(1, MOST_NEW + 1))
    parser.add_argument(
        "--miss", type=int, nargs="+", default=[0, 2, 10, 30], help="%% of a token's selection"
    )
    parser.add_argument("--item", type=int, nargs="+", default=[1152])
    parser.add_argument("--union", type=float, default=1.9, help="of four tokens' selections, over one's")
    parser.add_argument("--repeat", type=int, default=3, help="times that a cell is built and measured")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pool = pinned_pool()
    most_new = max(arguments.new)
    kinds = [(1, 1), *((most_new, num_new) for num_new in arguments.new if most_new > 1)]
    rows = []
    for batch in arguments.batch:
        for miss in arguments.miss:
            tokens = draft_selections(NUM_TOKENS, batch, miss, arguments.union, arguments.seed)
            for item in arguments.item:
                for max_new, num_new in kinds:
                    cell = {"item_bytes": item, "batch": batch, "miss_percent": miss}
                    cell |= {"max_new": max_new, "num_new": num_new}
                    cell |= measure(host_pool(pool, 1, item), tokens, max_new, num_new, arguments.repeat)
                    rows.append(cell)
    report = {
        "facts": run_facts(),
        "gpu": torch.cuda.get_device_name(),
        "copy_peak_gb_s": copy_peak(pool),
        "num_repeats": arguments.repeat,
        "union_of_four": arguments.union,
        "hot_capacity": HOT_CAPACITY,
        "cells": rows,
    }
    write_json(OUT / "swap_in_drafts.json", report)
    title = (
        f"{report['gpu']}, copy peak {report['copy_peak_gb_s']['median']:.1f} GB/s, top-k {TOP_K}, "
        f"hot buffer {HOT_CAPACITY}, context {CONTEXT}, four selections unite to {arguments.union}; "
        f"medians of {arguments.repeat}"
    )
    make_console().print(table_of(title, rows))


def calls_of(tokens: Tensor, num_new: int) -> Tensor:
    """``tokens`` [num_tokens, batch, top_k] as calls: [num_tokens / num_new, batch * num_new, top_k]."""
    num_tokens, batch, top_k = tokens.shape
    by_call = tokens.view(num_tokens // num_new, num_new, batch, top_k).transpose(1, 2)
    return by_call.reshape(num_tokens // num_new, batch * num_new, top_k)


def measure(host: Tensor, tokens: Tensor, max_new: int, num_new: int, num_repeats: int) -> dict[str, Any]:
    """``tokens``: int32 [NUM_TOKENS, batch, TOP_K] on the CPU."""
    batch = tokens.shape[1]
    calls = calls_of(tokens, num_new).cuda()
    num_warm = NUM_WARM_TOKENS // num_new
    num_calls = len(calls) - num_warm
    seq_lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
    out = torch.empty_like(calls[0])
    graph_us = []
    for _ in range(num_repeats):
        cell = Cell(host, batch, CONTEXT, HOT_CAPACITY, "cuda", max_new)
        cell.prepare(calls[0], seq_lens, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls[num_warm:]:
                cell.call(call, seq_lens, out)
        for call in calls[:num_warm]:
            cell.call(call, seq_lens, out)
        cell.state.counters.zero_()
        graph_us.append(timed_us(graph.replay) / num_calls)
        counted = cell.counted()
        cell.verify(calls[-1], out)
        del graph, cell
    repeats = spread(graph_us)
    us, misses = repeats["median"], counted[MISSES]
    return {
        "us": us,
        "repeats_us": repeats,
        "us_per_token": us / num_new,
        "union": (counted[HITS] + misses) / num_calls / batch / TOP_K,
        "misses_per_token": misses / num_calls / num_new / batch,
        "gb_s": misses / num_calls * host.shape[2] / us / 1e3,
    }


if __name__ == "__main__":
    main()
