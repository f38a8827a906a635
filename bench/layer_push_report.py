"""What ``bench.layer_push`` measured, as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_report(console: Console, report: dict[str, Any]) -> None:
    if report["ttft"]:
        console.print(_ttft_table(report))
    first = report["tails"][0]
    tails = Table(
        title=f"Tail of {first['num_tokens']:,} tokens x {first['num_layers']} layers behind a forward that "
        "sleeps, median (min-max)",
        title_justify="left",
    )
    for column in (
        "landing zone",
        "prompts",
        "ms/layer",
        "push_layers",
        "KiB at least",
        "tail, ms",
        "batches",
    ):
        tails.add_column(column, justify="left" if column == "landing zone" else "right")
    for column in ("hook, us/layer", "plan, us", "forward, ms", "transport, ms"):
        tails.add_column(column, justify="right")
    for row in report["tails"]:
        tails.add_row(
            row["zone"],
            str(row["num_prompts"]),
            f"{row['layer_millis']:g}",
            _setting(row["push_layers"]),
            f"{row['min_batch_bytes'] >> 10}",
            _millis(row["tail"]),
            f"{row['batches']['median']:.0f}",
            f"{row['hooks']['median'] / row['num_layers'] * 1e6:.1f}",
            f"{row['plan']['median'] * 1e6:.0f}",
            f"{row['forward']['median'] * 1e3:.1f}",
            f"{row['transport']['median'] * 1e3:.1f}",
        )
    console.print(tails)


def _ttft_table(report: dict[str, Any]) -> Table:
    table = Table(title="First token through the pair", title_justify="left")
    for column in (
        "prompt tokens",
        "push_layers",
        "TTFT, ms: median (min-max)",
        "saved, ms: median (quartiles)",
    ):
        table.add_column(column, justify="right")
    for row in report["ttft"]:
        saved = row["saved_secs"]
        table.add_row(
            f"{row['num_tokens']:,}",
            _setting(row["push_layers"]),
            _millis(row["secs"]),
            f"{saved['median'] * 1e3:+.1f} ({saved['low'] * 1e3:+.1f} to {saved['high'] * 1e3:+.1f})",
        )
    return table


def _setting(push_layers: int) -> str:
    return "0, whole" if push_layers == 0 else str(push_layers)


def _millis(secs: dict[str, Any]) -> str:
    return f"{secs['median'] * 1e3:.1f} ({secs['min'] * 1e3:.1f}-{secs['max'] * 1e3:.1f})"


def draw(report: dict[str, Any], path: Path) -> None:
    """TTFT by prompt length, and the tail by layers in a batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ttft, tails) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    lengths = sorted({row["num_tokens"] for row in report["ttft"]})
    settings = list(dict.fromkeys(row["push_layers"] for row in report["ttft"]))
    for number, setting in enumerate(settings):
        rows = [row["secs"] for row in report["ttft"] if row["push_layers"] == setting]
        medians = [row["median"] * 1e3 for row in rows]
        low = [(row["median"] - row["min"]) * 1e3 for row in rows]
        high = [(row["max"] - row["median"]) * 1e3 for row in rows]
        offsets = [
            place + (number - (len(settings) - 1) / 2) * 0.8 / len(settings) for place in range(len(rows))
        ]
        label = "whole chunks" if setting == 0 else f"{setting} layers a batch"
        ttft.bar(offsets, medians, 0.8 / len(settings), yerr=(low, high), label=label)
    ttft.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    ttft.set_xlabel("prompt tokens")
    ttft.set_ylabel("ms to the first token, median and range")
    ttft.set_title(f"the pair, {report['num_threads']} torch thread(s) a node")
    if settings:
        ttft.legend()

    for zone in dict.fromkeys(row["zone"] for row in report["tails"]):
        for millis in dict.fromkeys(row["layer_millis"] for row in report["tails"]):
            rows = [
                row
                for row in report["tails"]
                if (row["zone"], row["layer_millis"], row["num_prompts"]) == (zone, millis, 1)
            ]
            tails.plot(
                [_setting(row["push_layers"]) for row in rows],
                [row["tail"]["median"] * 1e3 for row in rows],
                marker="o",
                label=f"{zone}, {millis:g} ms a layer",
            )
    tails.set_yscale("log")
    tails.set_xlabel("layers a batch")
    tails.set_ylabel("ms from the end of the forward until all has landed")
    tails.set_title(f"a sleeping forward of {report['tails'][0]['num_layers']} layers")
    tails.legend()
    facts = report["facts"]
    figure.suptitle(
        f"{facts['cpu']}, {facts['num_cpus']} cores, {facts['date']}, commit {facts['commit'][:12]}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
