"""What ``bench.transfer`` measured, as tables and as a picture, against the bounds that it has to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.report import picture, table, when

PLAN_BOUND_SECS = 0.050
BEST_BOUND = 0.9


def print_report(console: Console, report: dict[str, Any]) -> None:
    planning = [
        [
            row["zone"],
            f"{row['num_tokens']:,}",
            f"{row['num_descriptors']:,}",
            *figures(row["secs"], 1e3),
            verdict(row["secs"]["median"] < PLAN_BOUND_SECS, f"< {PLAN_BOUND_SECS * 1e3:.0f} ms"),
        ]
        for row in report["planning"]
    ]
    columns = ("landing zone", "tokens", "descriptors", "ms", "ms min-max", "bound")
    console.print(table("Expansion and planning of one layer", columns, planning))
    wire = []
    for row in report["wire"]:
        median = row["sender_of_best"]["median"]
        wire.append(
            [
                row["zone"],
                f"{row['dtype']} {row['item_bytes']} B",
                f"{row['num_bytes'] / 1e6:.0f}",
                f"{row['num_descriptors']:,}",
                *(gigabytes(row[key]) for key in ("shared_memory", "sender", "same_descriptors", "best")),
                row["best"]["how"],
                verdict(median >= BEST_BOUND, f"{median:.2f}") if row["zone"] == "fresh" else f"{median:.2f}",
            ]
        )
    senders = ("shared memory", "sender", "same descriptors", "Mooncake's best", "best with", "of best")
    columns = ("landing zone", "item", "MB", "descriptors", *senders)
    console.print(table("Wire, GB/s: median (min-max)", columns, wire))
    cost = [[row["how"], *figures(row["micros"], 1)] for row in report["descriptor_cost"]]
    console.print(table("One descriptor of one item, raw Mooncake", ("how", "us", "us min-max"), cost))


def figures(spread: dict[str, Any], factor: float) -> tuple[str, str]:
    """Median, and smallest to largest."""
    median, low, high = (spread[name] * factor for name in ("median", "min", "max"))
    return f"{median:.1f}", f"{low:.1f}-{high:.1f}"


def gigabytes(rates: dict[str, Any]) -> str:
    return f"{rates['median'] / 1e9:.3f} ({rates['min'] / 1e9:.3f}-{rates['max'] / 1e9:.3f})"


def verdict(met: bool, text: str) -> str:
    return f"[green]{text}[/green]" if met else f"[red]{text} missed[/red]"


def draw(report: dict[str, Any], path: Path) -> None:
    """Sender against Mooncake, and plan time against its bound."""
    with picture(path, 1, 2, figsize=(12, 4.5), width_ratios=(3, 1)) as (figure, (wire, planning)):
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
            places = np.arange(len(rows)) + (number - 1.5) * 0.21
            wire.bar(places, medians, 0.21, yerr=(low, high), label=label)
        wire.set_yscale("log")
        wire.set_xticks(range(len(rows)), [f"{row['zone']}\n{row['dtype']}" for row in rows])
        wire.set_ylabel("GB/s")
        wire.set_title(f"{rows[0]['num_tokens']:,} tokens over loopback TCP and shared memory")
        wire.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        plans = report["planning"]
        planning.bar([plan["zone"] for plan in plans], [plan["secs"]["median"] * 1e3 for plan in plans])
        planning.axhline(PLAN_BOUND_SECS * 1e3, color="red", linestyle="--", label="bound")
        planning.set_ylabel("ms")
        planning.set_title(f"plan of {plans[0]['num_tokens']:,} tokens")
        planning.legend(loc="center left")
        facts = report["facts"]
        figure.suptitle(f"{facts['cpu']}, {facts['num_cpus']} cores, {when(facts)}", fontsize=9)
