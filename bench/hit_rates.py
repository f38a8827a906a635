"""Hit rates of recorded selections by hot-buffer capacity: what is implemented beside exact LRU, on the CPU.

    python bench/hit_rates.py [TRACE ...] [--keep NAME]

Traces come from ``bench/record_trace.py``; without one, the synthetic trace stands in. What is implemented
is counted by the CPU reference of the swap-in kernel, whose choice of victims the kernel shares to the entry.
Writes bench/out/hit_rates.json and .png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, RESULTS, run_facts
from bench.report import picture, when, write_json
from bench.swap_in_report import describe_trace
from bench.traces import Trace, hit_rates, kernel_hit_rate, load_trace, synthetic_trace

SELECTIONS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Capacities beyond the smallest, in selections."""


def capacities(trace: Trace) -> list[int]:
    """From the smallest that works up to the context."""
    sizes = [trace.top_k + 1, *(int(trace.top_k * factor) for factor in SELECTIONS)]
    return [size for size in sizes if size < trace.context]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="*")
    parser.add_argument("--keep", metavar="NAME", help="write docs/results/NAME-DATE.json and .png too")
    arguments = parser.parse_args()
    traces = [load_trace(path) for path in arguments.trace] or [synthetic_trace(0)]
    cases = [(trace, capacity) for trace in traces for capacity in capacities(trace)]
    rows: list[dict[str, Any]] = []
    console = Console()
    for trace, capacity in track(cases, "hit rates", console=console, disable=not console.is_terminal):
        rows.append(hit_rates(trace, capacity, kernel_hit_rate(trace, capacity)))
        console.print(describe_trace(rows[-1]), soft_wrap=True, highlight=False)
    report: dict[str, Any] = {"facts": run_facts(), "traces": rows}
    stems = [OUT / "hit_rates"]
    if arguments.keep:
        stems.append(RESULTS / f"{arguments.keep}-{report['facts']['date'][:10]}")
    for stem in stems:
        write_json(stem.with_suffix(".json"), report)
        plot(report, stem.with_suffix(".png"))
        console.print(f"wrote {stem}.json and .png", soft_wrap=True)


def plot(report: dict[str, Any], path: Path) -> None:
    """Hit rate over capacity in selections: a line for each trace, crosses for exact LRU."""
    with picture(path, figsize=(7, 4.2)) as (_, axis):
        rows: list[dict[str, Any]] = report["traces"]
        for name in dict.fromkeys(row["trace"] for row in rows):
            own = [row for row in rows if row["trace"] == name]
            sizes = [row["capacity"] / row["top_k"] for row in own]
            label = f"{name}: top {own[0]['top_k']} of {own[0]['context']:,}"
            (line,) = axis.plot(sizes, [row["hit_rate"] for row in own], "o-", label=label, markersize=4)
            axis.plot(sizes, [row["lru_hit_rate"] for row in own], "x", color=line.get_color(), markersize=8)
        axis.plot([], [], "kx", label="exact LRU")
        axis.set(xscale="log", xlabel="hot buffer, in selections", ylabel="hit rate", ylim=(0, 1.02))
        ticks = (1, 2, 4, 8, 16, 32)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        axis.set_title(when(report["facts"]), fontsize=9)


if __name__ == "__main__":
    main()
