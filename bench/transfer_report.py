"""What ``bench.transfer`` measured, as tables and as a picture, against the bounds that it has to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

PLAN_BOUND_SECS = 0.050
BEST_BOUND = 0.9


def print_report(console: Console, report: dict[str, Any]) -> None:
    planning = Table(title="Expansion and planning of one layer", title_justify="left")
    for column in ("landing zone", "tokens", "descriptors", "ms", "ms min-max", "bound"):
        planning.add_column(column, justify="left" if column == "landing zone" else "right")
    for row in report["planning"]:
        secs = row["secs"]
        planning.add_row(
            row["zone"],
            f"{row['num_tokens']:,}",
            f"{row['num_descriptors']:,}",
            f"{secs['median'] * 1e3:.1f}",
            f"{secs['min'] * 1e3:.1f}-{secs['max'] * 1e3:.1f}",
            verdict(secs["median"] < PLAN_BOUND_SECS, f"< {PLAN_BOUND_SECS * 1e3:.0f} ms"),
        )
    console.print(planning)

    wire = Table(title="Wire, GB/s: median (min-max)", title_justify="left")
    for column in (
        "landing zone",
        "item",
        "MB",
        "descriptors",
        "shared memory",
        "sender",
        "same descriptors",
        "Mooncake's best",
    ):
        wire.add_column(column, justify="left" if column == "landing zone" else "right")
    wire.add_column("best with")
    wire.add_column("of best", justify="right")
    for row in report["wire"]:
        median = row["sender_of_best"]["median"]
        wire.add_row(
            row["zone"],
            f"{row['dtype']} {row['item_bytes']} B",
            f"{row['num_bytes'] / 1e6:.0f}",
            f"{row['num_descriptors']:,}",
            gigabytes(row["shared_memory"]),
            gigabytes(row["sender"]),
            gigabytes(row["same_descriptors"]),
            gigabytes(row["best"]),
            row["best"]["how"],
            verdict(median >= BEST_BOUND, f"{median:.2f}") if row["zone"] == "fresh" else f"{median:.2f}",
        )
    console.print(wire)

    cost = Table(title="One descriptor of one item, raw Mooncake", title_justify="left")
    for column in ("how", "us", "us min-max"):
        cost.add_column(column, justify="left" if column == "how" else "right")
    for row in report["descriptor_cost"]:
        micros = row["micros"]
        cost.add_row(row["how"], f"{micros['median']:.1f}", f"{micros['min']:.1f}-{micros['max']:.1f}")
    console.print(cost)


def gigabytes(rates: dict[str, Any]) -> str:
    return f"{rates['median'] / 1e9:.3f} ({rates['min'] / 1e9:.3f}-{rates['max'] / 1e9:.3f})"


def verdict(met: bool, text: str) -> str:
    return f"[green]{text}[/green]" if met else f"[red]{text} missed[/red]"


def draw(report: dict[str, Any], path: Path) -> None:
    """Sender against Mooncake, and plan time against its bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (wire, planning) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 1))
    rows = report["wire"]
    columns = (
        ("shared_memory", "sender, shared memory"),
        ("sender", "sender"),
        ("same_descriptors", "Mooncake, same descriptors"),
        ("best", "Mooncake's best"),
    )
    for number, (key, label) in enumerate(columns):
        medians = np.array([row[key]["median"] for row in rows]) / 1e9
        low = medians - np.array([row[key]["min"] for row in rows]) / 1e9
        high = np.array([row[key]["max"] for row in rows]) / 1e9 - medians
        wire.bar(np.arange(len(rows)) + (number - 1.5) * 0.21, medians, 0.21, yerr=(low, high), label=label)
    wire.set_yscale("log")
    wire.set_xticks(range(len(rows)), [f"{row['zone']}\n{row['dtype']}" for row in rows])
    wire.set_ylabel("GB/s")
    wire.set_title(f"{rows[0]['num_tokens']:,} tokens over loopback TCP and shared memory")
    wire.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    planning.bar(
        [row["zone"] for row in report["planning"]], [r["secs"]["median"] * 1e3 for r in report["planning"]]
    )
    planning.axhline(PLAN_BOUND_SECS * 1e3, color="red", linestyle="--", label="bound")
    planning.set_ylabel("ms")
    planning.set_title(f"plan of {report['planning'][0]['num_tokens']:,} tokens")
    planning.legend(loc="center left")
    facts = report["facts"]
    figure.suptitle(
        f"{facts['cpu']}, {facts['num_cpus']} cores, {facts['date']}, commit {facts['commit'][:12]}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
