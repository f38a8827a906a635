"""Swap-in on one GPU: time per call in every cell of design.md §7, beside the peer's and the copy peak.

The workload: every request's rows lie together in an 8 GiB pinned pool (wrapping round); 30 steps from an
empty buffer; per step ``miss x 2048`` randomly chosen selected positions are replaced by others that were not
selected before (or, once a context is used up, longest ago), order shuffled. Which of those comes next,
design.md §7 does not say: ``--fresh ascending`` takes them in order, ``--fresh random`` scatters them over
the context, which is harder on host memory with large batches. The first 3 steps run alone, the other 27 are
captured in one CUDA graph that is replayed once between two events: us per call = time / 27. Single calls are
timed by events too, each behind a wait that hides the launch from the clock.

    python bench/swap_in.py [--batch 1 8 ...] [--item 1152 656] [--miss 0 2 ...] [--fresh random]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts, spread
from kernels.hot_state import EVICTIONS, HITS, MISSES, HotBufferState
from kernels.swap_in import swap_in

TOP_K = 2048
CAPACITY = 4096
CONTEXT = 32768
POOL_BYTES = 8 << 30
NUM_STEPS = 30
NUM_WARM_STEPS = 3
PAGE_SIZE = 64
MISS_PERCENTS = (0, 2, 10, 30, 100)

PEER_US = {
    (1152, 1): (15.3, 22.4, 38.5, 81.9, 226),
    (1152, 8): (15.3, 26.8, 56.0, 131, 389),
    (1152, 32): (16.4, 46.9, 167, 465, 1515),
    (1152, 64): (17.6, 75.0, 313, 910, 2997),
    (1152, 128): (18.3, 133, 608, 1796, 5949),
    (656, 1): (14.3, 22.8, 39.1, 79.8, 218),
    (656, 8): (16.0, 24.8, 46.1, 104, 298),
    (656, 32): (17.7, 35.8, 112, 302, 944),
    (656, 64): (16.4, 54.5, 206, 586, 1923),
    (656, 128): (17.7, 92.3, 402, 1161, 3884),
}
"""SGLang 0.5.23, us per call by (item_bytes, batch), in the order of MISS_PERCENTS: design.md §7."""

TARGET_US = {
    **{(1152, batch, 0): 4.0 for batch in (1, 8, 32)},
    **{(656, batch, 0): 4.0 for batch in (1, 8, 32)},
    (1152, 128, 0): 6.0,
    (656, 128, 0): 6.0,
    **{(1152, 1, miss): us for miss, us in ((2, 7.0), (10, 13.0), (30, 22.0), (100, 56.0))},
    **{(1152, 8, miss): us for miss, us in ((2, 14.0), (10, 44.0), (30, 118.0), (100, 380.0))},
}
TARGET_OF_PEAK = {1152: 0.90, 656: 0.85}
"""Of the copy peak, for batch >= 32 with >= 10% misses."""
TARGET_MEAN_RATIO = 0.55


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--item", type=int, nargs="+", default=[1152, 656])
    parser.add_argument("--miss", type=int, nargs="+", default=list(MISS_PERCENTS), choices=MISS_PERCENTS)
    parser.add_argument("--fresh", choices=("ascending", "random"), default="ascending")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-traces", action="store_true", help="leave out the hit-rate table")
    arguments = parser.parse_args()
    pool = pinned_pool()
    peak = copy_peak(pool)
    print(f"copy peak: {peak['median']:.1f} GB/s (pinned host to device, 1 GiB)")
    cells = [
        measure_cell(pool, item, batch, miss, arguments.seed, arguments.fresh)
        for item in arguments.item
        for batch in arguments.batch
        for miss in arguments.miss
    ]
    report: dict[str, Any] = {
        "facts": run_facts(),
        "gpu": torch.cuda.get_device_name(),
        "fresh": arguments.fresh,
        "copy_peak_gb_s": peak,
        "cells": cells,
        "mean_ratio": math.exp(statistics.fmean(math.log(c["ratio"]) for c in cells if c["ratio"])),
    }
    judge(report)
    if not arguments.no_traces:
        report["traces"] = trace_table(pool, arguments.seed)
    OUT.mkdir(parents=True, exist_ok=True)
    name = "swap_in" if arguments.fresh == "ascending" else f"swap_in_{arguments.fresh}"
    (OUT / f"{name}.json").write_text(json.dumps(report, indent=1))
    print_report(report)
    plot(report, OUT / f"{name}.png")


# --- workload ---------------------------------------------------------------------------------------------


def pinned_pool() -> Tensor:
    """POOL_BYTES of noise in pinned memory."""
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8, pin_memory=True)
    chunk = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
    for start in range(0, POOL_BYTES, len(chunk)):
        pool[start : start + len(chunk)] = chunk.roll(start // len(chunk))
    return pool


def selections(batch: int, miss_percent: int, seed: int, fresh: str) -> Tensor:
    """int32 [NUM_STEPS, batch, TOP_K]; the newest position is never selected."""
    random = np.random.default_rng(seed)
    num_new = round(TOP_K * miss_percent / 100)
    steps = np.empty((NUM_STEPS, batch, TOP_K), dtype=np.int32)
    for req in range(batch):
        order = random.permutation(CONTEXT - 1).astype(np.int32)
        if fresh == "ascending":
            order[TOP_K:].sort()
        current = order[:TOP_K].copy()
        used = TOP_K
        steps[0, req] = current
        for step in range(1, NUM_STEPS):
            replaced = random.choice(TOP_K, num_new, replace=False)
            current[replaced] = order[(used + np.arange(num_new)) % len(order)]
            used += num_new
            random.shuffle(current)
            steps[step, req] = current
    return torch.from_numpy(steps)


class Cell:
    """The tables, pools and inputs of one cell, with all buffers empty."""

    def __init__(self, pool: Tensor, item_bytes: int, batch: int, capacity: int = CAPACITY) -> None:
        num_slots = POOL_BYTES // item_bytes
        self.host = pool[: num_slots * item_bytes].view(1, num_slots, item_bytes)
        self.dev = torch.empty((1, batch * capacity, item_bytes), dtype=torch.uint8, device="cuda")
        self.state = HotBufferState.create(1, batch, CONTEXT, capacity, PAGE_SIZE, "cuda")
        for row in range(batch):
            self.state.assign_row(
                row,
                capacity,
                torch.arange(row * capacity, (row + 1) * capacity, device="cuda"),
                (torch.arange(CONTEXT, device="cuda") + row * CONTEXT) % num_slots,
            )
        self.seq_lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
        self.rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.num_real = torch.full((1,), batch, dtype=torch.int32, device="cuda")

    def call(self, selected: Tensor, out: Tensor) -> None:
        swap_in(
            selected, self.seq_lens, self.rows, self.num_real, self.state,
            group=0, layer=0, k_host=self.host, k_dev=self.dev, out=out,
        )  # fmt: skip

    def verify(self, selected: Tensor, out: Tensor) -> None:
        """Every returned slot holds its token's bytes."""
        for row in range(selected.shape[0]):
            slots = self.state.host_slots[row][selected[row].long()].cpu()
            if not torch.equal(self.dev[0, out[row].long()].cpu(), self.host[0, slots]):
                raise RuntimeError(f"wrong bytes in row {row}")


def measure_cell(
    pool: Tensor, item_bytes: int, batch: int, miss_percent: int, seed: int, fresh: str
) -> dict[str, Any]:
    steps = selections(batch, miss_percent, seed, fresh).cuda()
    out = torch.empty_like(steps)
    cell = Cell(pool, item_bytes, batch)
    for step in range(NUM_WARM_STEPS):
        cell.call(steps[step], out[step])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(NUM_WARM_STEPS, NUM_STEPS):
            cell.call(steps[step], out[step])
    before = cell.state.counters.sum(0).tolist()
    graph_us = timed_us(graph.replay) / (NUM_STEPS - NUM_WARM_STEPS)
    counted = [b - a for a, b in zip(before, cell.state.counters.sum(0).tolist(), strict=True)]
    cell.verify(steps[-1], out[-1])
    del graph

    cell = Cell(pool, item_bytes, batch)
    single_us = [timed_us(lambda step=step: cell.call(steps[step], out[step])) for step in range(NUM_STEPS)]
    num_calls = NUM_STEPS - NUM_WARM_STEPS
    peer = PEER_US.get((item_bytes, batch), (None,) * len(MISS_PERCENTS))[MISS_PERCENTS.index(miss_percent)]
    return {
        "item_bytes": item_bytes,
        "batch": batch,
        "miss_percent": miss_percent,
        "us": graph_us,
        "peer_us": peer,
        "ratio": graph_us / peer if peer else None,
        "gb_s": counted[MISSES] / num_calls * item_bytes / graph_us / 1e3,
        "single_us": spread(single_us[NUM_WARM_STEPS:]),
        "hits": counted[HITS],
        "misses": counted[MISSES],
        "evictions": counted[EVICTIONS],
    }


def timed_us(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)  # the GPU waits while the host launches
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_peak(pool: Tensor) -> dict[str, Any]:
    """GB/s of plain copies of 1 GiB."""
    num_bytes = 1 << 30
    dev = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    rates = []
    for repetition in range(6):
        src = pool[repetition * num_bytes : (repetition + 1) * num_bytes]
        us = timed_us(lambda src=src: dev.copy_(src, non_blocking=True))
        rates.append(num_bytes / us / 1e3)
    return spread(rates[1:])


# --- traces -----------------------------------------------------------------------------------------------

TRACE_CAPACITIES = (2049, 3072, 4096, 6144, 8192)
TRACE_STEPS = 60


def synthetic_trace(seed: int, num_steps: int = TRACE_STEPS) -> Tensor:
    """int32 [num_steps, 1, TOP_K]: positions drawn by a score with lasting, drifting and random parts.

    Some positions matter all along, a recent window mostly does, interest in the rest moves slowly (an
    AR(1) process over time with the correlation between neighbours that text has), and a little noise.
    """
    generator = torch.Generator().manual_seed(seed)
    lasting = torch.randn(CONTEXT, generator=generator)
    recency = torch.zeros(CONTEXT)
    drift = torch.randn(CONTEXT // 16, generator=generator)
    steps = torch.empty((num_steps, 1, TOP_K), dtype=torch.int32)
    for step in range(num_steps):
        drift = 0.95 * drift + math.sqrt(1 - 0.95**2) * torch.randn(CONTEXT // 16, generator=generator)
        seq_len = CONTEXT - num_steps + step + 1
        recency = 3 * torch.exp((torch.arange(CONTEXT) - seq_len) / 400.0)
        score = (
            lasting + drift.repeat_interleave(16) + recency + 0.25 * torch.randn(CONTEXT, generator=generator)
        )
        steps[step, 0] = score[:seq_len].topk(TOP_K).indices.to(torch.int32)
    return steps


def trace_table(pool: Tensor, seed: int) -> list[dict[str, Any]]:
    """Hit rate and time per step of a trace, by capacity."""
    steps = synthetic_trace(seed).cuda()
    return [measure_trace(pool, "synthetic", steps, capacity) for capacity in TRACE_CAPACITIES]


def measure_trace(pool: Tensor, name: str, steps: Tensor, capacity: int) -> dict[str, Any]:
    cell = Cell(pool, 1152, 1, capacity)
    out = torch.empty_like(steps)
    times = []
    for step in range(TRACE_STEPS):
        cell.seq_lens.fill_(CONTEXT - TRACE_STEPS + step + 1)
        if step == NUM_WARM_STEPS:
            cell.state.counters.zero_()
        times.append(timed_us(lambda step=step: cell.call(steps[step], out[step])))
    hits, misses, _ = cell.state.counters[0].tolist()
    return {
        "trace": name,
        "capacity": capacity,
        "hit_rate": hits / (hits + misses),
        "us": spread(times[NUM_WARM_STEPS:]),
    }


# --- report -----------------------------------------------------------------------------------------------


def judge(report: dict[str, Any]) -> None:
    """Add the target of every cell, and whether it is met."""
    peak = report["copy_peak_gb_s"]["median"]
    for cell in report["cells"]:
        item, batch, miss = cell["item_bytes"], cell["batch"], cell["miss_percent"]
        target = TARGET_US.get((item, batch, miss), cell["peer_us"])
        if batch >= 32 and miss >= 10:
            num_bytes = cell["misses"] / (NUM_STEPS - NUM_WARM_STEPS) * item
            target = num_bytes / (peak * TARGET_OF_PEAK.get(item, 0.85)) / 1e3
        cell["of_peak"] = cell["gb_s"] / peak
        cell["target_us"] = target
        cell["is_met"] = target is not None and cell["us"] <= target


def print_report(report: dict[str, Any]) -> None:
    print(f"{report['gpu']}, copy peak {report['copy_peak_gb_s']['median']:.1f} GB/s, top-k {TOP_K}, "
          f"hot buffer {CAPACITY}, context {CONTEXT}, fresh positions {report['fresh']}; "
          f"us per call in a graph of {NUM_STEPS - NUM_WARM_STEPS} calls")  # fmt: skip
    print(" item batch miss%    peer    ours  ratio  target       GB/s of peak  single (median)")
    for c in report["cells"]:
        print(
            f"{c['item_bytes']:5} {c['batch']:5} {c['miss_percent']:5} {c['peer_us'] or 0:7.1f} "
            f"{c['us']:7.1f} {c['ratio'] or 0:6.2f} {c['target_us'] or 0:7.1f} "
            f"{'met ' if c['is_met'] else 'MISS'} {c['gb_s']:6.1f} {100 * c['of_peak']:6.0f}% "
            f"{c['single_us']['median']:8.1f}"
        )
    worst = max(c["ratio"] or 0 for c in report["cells"])
    print(f"geometric mean of ours over the peer's: {report['mean_ratio']:.3f} "
          f"(target {TARGET_MEAN_RATIO}); worst cell {worst:.2f} (target 1.0)")  # fmt: skip
    for row in report.get("traces", []):
        print(f"trace {row['trace']}, capacity {row['capacity']}: hit rate {row['hit_rate']:.4f}, "
              f"{row['us']['median']:.1f} us a step")  # fmt: skip


def plot(report: dict[str, Any], path: Path) -> None:
    """Ours and the peer's over the batch, one panel a share of misses."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no PNG")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    misses = sorted({c["miss_percent"] for c in report["cells"]})
    figure, axes = pyplot.subplots(1, len(misses), figsize=(4 * len(misses), 4), squeeze=False)
    for axis, miss in zip(axes[0], misses, strict=True):
        for item, colour in ((1152, "tab:blue"), (656, "tab:orange")):
            cells = [c for c in report["cells"] if c["miss_percent"] == miss and c["item_bytes"] == item]
            if not cells:
                continue
            batches = [c["batch"] for c in cells]
            axis.plot(batches, [c["us"] for c in cells], "o-", color=colour, label=f"{item} B")
            if all(c["peer_us"] for c in cells):
                axis.plot(
                    batches, [c["peer_us"] for c in cells], "x--", color=colour, label=f"{item} B, peer"
                )
        axis.set(xscale="log", yscale="log", title=f"{miss}% misses", xlabel="batch")
    axes[0][0].set_ylabel("us per call")
    axes[0][0].legend()
    figure.suptitle(f"Swap-in on {report['gpu']}, {report['facts']['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
