"""What ``bench/swap_in.py`` measured, against the other kernel and the targets: tables, pictures, kept
results.

    python bench/swap_in_report.py [bench/out/swap_in.json] [--keep]

draws the pictures of a run again, for one from a machine without matplotlib. ``--keep`` writes them and the
JSON without its long lists to docs/results.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, ROOT
from bench.swap_in_workload import CAPACITY, CONTEXT, MISS_PERCENTS, NUM_STEPS, NUM_WARM_STEPS, TOP_K
from bench.traces import LRU_TOLERANCE_POINTS

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
"""SGLang 0.5.23, us per call by (item_bytes, batch), in the order of MISS_PERCENTS: measured before,
on such a machine and by the same rule.
"""

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

RESULTS = ROOT / "docs" / "results"
MAX_KEPT_BYTES = {".json": 40 << 10, ".png": 150 << 10}


def judge(report: dict[str, Any]) -> None:
    """Add the other kernel's time, the target and whether it is met to every cell, means to every table."""
    peak = report["copy_peak_gb_s"]["median"]
    for table in report["tables"]:
        for cell in table["cells"]:
            _judge_cell(cell, peak)
        ratios = [cell["ratio"] for cell in table["cells"] if cell["ratio"] is not None]
        table["mean_ratio"] = statistics.geometric_mean(ratios) if ratios else None
        table["worst_ratio"] = max(ratios, default=None)


def _judge_cell(cell: dict[str, Any], peak: float) -> None:
    item, batch, miss = cell["item_bytes"], cell["batch"], cell["miss_percent"]
    peer = None
    if (item, batch) in PEER_US:
        peer = PEER_US[item, batch][MISS_PERCENTS.index(miss)]
    target = TARGET_US.get((item, batch, miss), peer)
    if batch >= 32 and miss >= 10:
        num_bytes = cell["misses"] / (NUM_STEPS - NUM_WARM_STEPS) * item
        target = num_bytes / (peak * TARGET_OF_PEAK.get(item, 0.85)) / 1e3
    cell["peer_us"] = peer
    cell["ratio"] = cell["us"] / peer if peer else None
    cell["of_peak"] = cell["gb_s"] / peak
    cell["target_us"] = target
    cell["is_met"] = target is not None and cell["us"] <= target


# --- tables -----------------------------------------------------------------------------------------------


def print_report(report: dict[str, Any]) -> None:
    print(f"{report['gpu']}, copy peak {report['copy_peak_gb_s']['median']:.1f} GB/s, top-k {TOP_K}, "
          f"hot buffer {CAPACITY}, context {CONTEXT}; us per call in a graph of "
          f"{NUM_STEPS - NUM_WARM_STEPS} calls")  # fmt: skip
    for table in report["tables"]:
        _print_table(table, report["num_repeats"])
    for row in report["traces"]:
        print(describe_trace(row))


def _print_table(table: dict[str, Any], num_repeats: int) -> None:
    print(f"\nnew positions: {table['fresh']}")
    print(" item batch miss%    peer    ours  ratio  target       GB/s of peak  single (median)"
          + (f"  median (min-max) of {num_repeats}" if num_repeats > 1 else ""))  # fmt: skip
    for c in table["cells"]:
        line = (
            f"{c['item_bytes']:5} {c['batch']:5} {c['miss_percent']:5} {c['peer_us'] or 0:7.1f} "
            f"{c['us']:7.1f} {c['ratio'] or 0:6.2f} {c['target_us'] or 0:7.1f} "
            f"{'met ' if c['is_met'] else 'MISS'} {c['gb_s']:6.1f} {100 * c['of_peak']:6.0f}% "
            f"{c['single_us']['median']:8.1f}"
        )
        if num_repeats > 1:
            repeats = c["repeats_us"]
            line += f"         {repeats['median']:7.1f} ({repeats['min']:.1f}-{repeats['max']:.1f})"
        print(line)
    if table["mean_ratio"] is not None:
        print(
            f"geometric mean of ours over the peer's, {table['fresh']}: {table['mean_ratio']:.3f} "
            f"(target {TARGET_MEAN_RATIO}); worst cell {table['worst_ratio']:.2f} (target 1.0)"
        )


def describe_trace(row: dict[str, Any]) -> str:
    """One line; without times when there are none."""
    points = row["points_over_lru"]
    flag = "  MORE THAN 1 POINT OFF" if abs(points) > LRU_TOLERANCE_POINTS else ""
    times = f", {row['us']:.1f} us a call ({row['single_us']['median']:.1f} alone)" if "us" in row else ""
    return (
        f"{row['trace']:22} top {row['top_k']:4} of {row['context']:5}, "
        f"steps share {100 * row['overlap']:4.1f}%, "
        f"capacity {row['capacity']:4}: hit rate {100 * row['hit_rate']:5.2f}%, "
        f"LRU {100 * row['lru_hit_rate']:5.2f}%, difference {points:+.2f} points{flag}{times}"
    )


# --- pictures ---------------------------------------------------------------------------------------------


def plot(report: dict[str, Any], stem: Path) -> list[Path]:
    """Ours, the peer's and the targets over the batch, a panel for each item and share of misses.

    One picture for each reading, STEM_FRESH.png; none, and an empty list, without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib, so no pictures: draw them elsewhere with bench/swap_in_report.py")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    facts, paths = report["facts"], []
    for table in report["tables"]:
        cells = table["cells"]
        items = list(dict.fromkeys(c["item_bytes"] for c in cells))
        misses = sorted({c["miss_percent"] for c in cells})
        figure, axes = pyplot.subplots(
            len(items), len(misses), figsize=(3.1 * len(misses) + 0.6, 2.9 * len(items) + 0.9), squeeze=False
        )
        for item, row in zip(items, axes, strict=True):
            for miss, axis in zip(misses, row, strict=True):
                _draw_panel(axis, [c for c in cells if c["item_bytes"] == item and c["miss_percent"] == miss])
                axis.set_title(f"{item} B, {miss}% misses", fontsize=9)
            row[0].set_ylabel("us per call")
        for axis in axes[-1]:
            axis.set_xlabel("batch")
        axes[0][0].legend(fontsize=8)
        mean = f", geometric mean {table['mean_ratio']:.3f} of SGLang" if table["mean_ratio"] else ""
        figure.suptitle(
            f"Swap-in on {report['gpu']}, new positions {table['fresh']}{mean}\n"
            f"{facts['date'][:10]}, commit {facts['commit'][:12]}",
            fontsize=10,
        )
        figure.tight_layout()
        paths.append(stem.with_name(f"{stem.name}_{table['fresh']}.png"))
        figure.savefig(paths[-1], dpi=80)
        pyplot.close(figure)
    return paths


def _draw_panel(axis: Any, cells: list[dict[str, Any]]) -> None:
    batches = [c["batch"] for c in cells]
    for key, style, label in (
        ("peer_us", "x--", "SGLang 0.5.23"),
        ("us", "o-", "ours"),
        ("target_us", "_", "target"),
    ):
        colour = {"us": "tab:blue", "peer_us": "tab:orange", "target_us": "tab:green"}[key]
        values = [c[key] or math.nan for c in cells]
        axis.plot(batches, values, style, color=colour, label=label, markersize=14 if style == "_" else 5)
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)


# --- kept results -----------------------------------------------------------------------------------------


def keep(report: dict[str, Any], directory: Path = RESULTS) -> list[Path]:
    """Write swap-in-DATE.json and its pictures; raises RuntimeError for one that is too large to keep."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"swap-in-{report['facts']['date'][:10]}"
    small = _without_lists(report)
    tables, traces = small.pop("tables"), small.pop("traces")
    parts = [f'"{key}": {json.dumps(value)}' for key, value in small.items()]
    derived = ["ratio", "of_peak"] if report["num_repeats"] > 1 else ["ratio", "of_peak", "repeats_us"]
    for table in tables:
        table["cells"] = [_without(cell, *derived) for cell in table["cells"]]
    # A line for each cell and each trace: short, and easy to compare with the next run's.
    bodies = [
        json.dumps(_without(table, "cells")).removesuffix("}") + f', "cells": {_lines(table["cells"])}}}'
        for table in tables
    ]
    parts += [f'"tables": [{", ".join(bodies)}]', f'"traces": {_lines(traces)}']
    path = stem.with_suffix(".json")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    paths = [path, *plot(report, stem)]
    for kept in paths:
        if kept.stat().st_size > MAX_KEPT_BYTES[kept.suffix]:
            raise RuntimeError(
                f"{kept}: {kept.stat().st_size} bytes; at most {MAX_KEPT_BYTES[kept.suffix]} are kept"
            )
    return paths


def _lines(rows: list[dict[str, Any]]) -> str:
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f"[\n{lines}\n]"


def _without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


def _without_lists(value: Any) -> Any:
    """Numbers of four digits, and no ``values`` of a spread."""
    match value:
        case dict():
            return {key: _without_lists(inner) for key, inner in value.items() if key != "values"}
        case list() | tuple():
            return [_without_lists(inner) for inner in value]
        case float():
            return float(f"{value:.4g}")
        case _:
            return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("json", type=Path, nargs="?", default=OUT / "swap_in.json")
    parser.add_argument("--keep", action="store_true", help="write to docs/results too")
    arguments = parser.parse_args()
    report = json.loads(arguments.json.read_text())
    judge(report)
    print_report(report)
    paths = plot(report, arguments.json.with_suffix(""))
    if arguments.keep:
        paths += keep(report)
    print("wrote", *paths)


if __name__ == "__main__":
    main()
