"""What ``tools.bench.transfer`` measured, as tables, against the bounds that it has to keep."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hisparse_pd.bench.report import table

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
