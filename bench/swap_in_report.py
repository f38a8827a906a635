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

from bench.facts import OUT, RESULTS
from bench.report import make_console, picture, table_of, when, write_json
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
    console = make_console()
    peak = report["copy_peak_gb_s"]["median"]
    console.print(
        f"{report['gpu']}, copy peak {peak:.1f} GB/s, top-k {TOP_K}, hot buffer {CAPACITY}, "
        f"context {CONTEXT}; us per call in a graph of {NUM_STEPS - NUM_WARM_STEPS} calls, "
        f"{report['num_repeats']} times",
        highlight=False,
    )
    names = ("item_bytes", "batch", "miss_percent", "peer_us", "us", "ratio", "target_us", "is_met", "gb_s")
    for found in report["tables"]:
        cells = [
            {name: cell[name] for name in names}
            | {"of_peak": f"{cell['of_peak']:.0%}", "single_us": cell["single_us"]["median"]}
            | {"repeats_us": "{median:.1f} ({min:.1f}-{max:.1f})".format(**cell["repeats_us"])}
            for cell in found["cells"]
        ]
        console.print(table_of(f"new positions: {found['fresh']}", cells))
        if found["mean_ratio"] is not None:
            console.print(
                f"geometric mean of ours over the peer's, {found['fresh']}: {found['mean_ratio']:.3f} "
                f"(target {TARGET_MEAN_RATIO}); worst cell {found['worst_ratio']:.2f} (target 1.0)",
                highlight=False,
            )
    for row in report["traces"]:
        console.print(describe_trace(row), highlight=False, soft_wrap=True)


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
    paths = []
    for found in report["tables"]:
        paths.append(stem.with_name(f"{stem.name}_{found['fresh']}.png"))
        try:
            _draw(report, found, paths[-1])
        except ModuleNotFoundError as error:
            print(f"no {error.name}, so no pictures: draw them elsewhere with bench/swap_in_report.py")
            return []
    return paths


def _draw(report: dict[str, Any], found: dict[str, Any], path: Path) -> None:
    cells = found["cells"]
    items = list(dict.fromkeys(c["item_bytes"] for c in cells))
    misses = sorted({c["miss_percent"] for c in cells})
    counts, size = (len(items), len(misses)), (3.1 * len(misses) + 0.6, 2.9 * len(items) + 0.9)
    with picture(path, *counts, figsize=size, squeeze=False) as (figure, axes):
        for item, row in zip(items, axes, strict=True):
            for miss, axis in zip(misses, row, strict=True):
                _draw_panel(axis, [c for c in cells if c["item_bytes"] == item and c["miss_percent"] == miss])
                axis.set_title(f"{item} B, {miss}% misses", fontsize=9)
            row[0].set_ylabel("us per call")
        for axis in axes[-1]:
            axis.set_xlabel("batch")
        axes[0][0].legend(fontsize=8)
        mean = f", geometric mean {found['mean_ratio']:.3f} of SGLang" if found["mean_ratio"] else ""
        figure.suptitle(
            f"Swap-in on {report['gpu']}, new positions {found['fresh']}{mean}\n{when(report['facts'])}",
            fontsize=10,
        )


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
    """Write swap-in-DATE.json, without the lists of single values, and its pictures."""
    stem = directory / f"swap-in-{report['facts']['date'][:10]}"
    path = stem.with_suffix(".json")
    write_json(path, _without_lists(report))
    return [path, *plot(report, stem)]


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
