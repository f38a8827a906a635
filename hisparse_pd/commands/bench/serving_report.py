"""What ``hisparse_pd.commands.bench.serving`` measured: the figures of a point, a table and a picture."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hisparse_pd.commands.bench.report import table
from hisparse_pd.commands.bench.serving_load import Point, Record

PERCENTILES = (50, 90, 99)


def summarize(
    point: Point, records: Sequence[Record], node_counters: Mapping[str, float] | None
) -> dict[str, Any]:
    """The figures of one point, JSON-able.

    ``node_counters``: by how much the nodes' counters grew. Latencies are of the requests that succeeded,
    ``itl_secs`` over all gaps between chunks of them; throughput counts failed requests' tokens too, because
    the endpoint made them.
    """
    done = [record for record in records if not record.error_class]
    wall_secs = max(r.ended for r in records) - min(r.started for r in records) if records else 0.0
    num_tokens = sum(_num_tokens(record) for record in records)
    selected = sum(r.hits + r.misses for r in done)
    found: dict[str, Any] = {
        "series": series_name(point),
        "concurrency": point.concurrency,
        "request_rate": point.request_rate,
        "num_requests": len(records),
        "num_ok": len(done),
        "errors": dict(Counter(r.error_class for r in records if r.error_class).most_common()),
        "error_samples": {r.error_class: r.error for r in reversed(records) if r.error_class},
        "wall_secs": wall_secs,
        "requests_per_sec": len(done) / wall_secs if wall_secs else 0.0,
        "output_tokens": num_tokens,
        "output_tokens_per_sec": num_tokens / wall_secs if wall_secs else 0.0,
        "full_load": full_load(point, records),
        "ttft_secs": distribution(r.ttft_secs for r in done),
        "itl_secs": distribution(gap for r in done for gap in r.itl_secs),
        "tpot_secs": distribution(r.tpot_secs for r in done if r.tpot_secs is not None),
        "e2e_secs": distribution(r.e2e_secs for r in done),
        "tokens_counted_by": sorted({"usage" if r.has_usage else "chunks" for r in done}),
        "mean_tokens_per_chunk": _mean([r.num_output_tokens / len(r.arrivals) for r in done]),
        "mean_prompt_tokens": _mean([r.num_prompt_tokens for r in done if r.has_usage]),
        "mean_cached_tokens": _mean([r.num_cached_tokens for r in done if r.has_usage]),
        "mean_output_tokens": _mean([r.num_output_tokens for r in done]),
        "modes": dict(Counter(r.mode for r in done if r.mode)),
        "hit_rate": sum(r.hits for r in done) / selected if selected else None,
        "nodes": None,
    }
    if node_counters is not None:
        found["nodes"] = _of_nodes(node_counters, wall_secs)
        if found["nodes"]["hit_rate"] is not None:
            found["hit_rate"] = found["nodes"]["hit_rate"]
    return found


def series_name(point: Point) -> str:
    return "endpoint" if point.hisparse is None else f"hisparse {str(point.hisparse).lower()}"


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and the largest of ``values``; None without any."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    points = np.percentile(array, PERCENTILES)
    return {
        "mean": float(array.mean()),
        **{f"p{rank}": float(value) for rank, value in zip(PERCENTILES, points, strict=True)},
        "max": float(array.max()),
        "count": int(array.size),
    }


def full_load(point: Point, records: Sequence[Record]) -> dict[str, float] | None:
    """Tokens a second while all clients of a closed loop were busy and had their first token, without ramp-up
    and tail; None for an open loop, or where that never was."""
    if point.concurrency is None or len(records) < point.concurrency:
        return None
    first = [r.arrivals[0] if r.arrivals else r.ended for r in records[: point.concurrency]]
    begin = max(first)
    end = sorted(r.ended for r in records)[len(records) - point.concurrency]
    if end <= begin:
        return None
    tokens = 0.0
    for record in records:
        if inside := sum(begin < arrival <= end for arrival in record.arrivals):
            tokens += inside * _num_tokens(record) / len(record.arrivals)
    return {"secs": end - begin, "output_tokens_per_sec": tokens / (end - begin)}


def _num_tokens(record: Record) -> int:
    """A request that was cut has no usage: its chunks count."""
    return record.num_output_tokens or len(record.arrivals)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _of_nodes(counters: Mapping[str, float], wall_secs: float) -> dict[str, Any]:
    hits, misses = counters.get("swap_in_hits_total", 0.0), counters.get("swap_in_misses_total", 0.0)
    swapped = counters.get("swap_in_bytes_total", 0.0)
    return {
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "swap_in_bytes_per_sec": swapped / wall_secs if wall_secs else 0.0,
        "counters": dict(counters),
    }


# --- on the console ---------------------------------------------------------------------------------------


def print_report(report: Mapping[str, Any], console: Console) -> None:
    points: list[dict[str, Any]] = report["points"]
    title = f"{_title(report)}; latencies p50 / p90 / p99, ms"
    console.print(table(title, _columns(points[0]), map(_row, points)))
    for point in points:
        for name, number in point["errors"].items():
            console.print(
                f"{point['series']}, {_x(point):g}: {number} x {name}: {point['error_samples'][name]}",
                style="red",
                markup=False,
                highlight=False,
            )
    for note in notes(report):
        console.print(note, style="yellow", markup=False, highlight=False)


def line_of(point: Mapping[str, Any]) -> str:
    """Its row of the table in words, for who watches."""
    return ", ".join(
        f"{name} {text}" for name, text in zip(_columns(point), _row(point), strict=True) if text
    )


def _columns(point: Mapping[str, Any]) -> tuple[str, ...]:
    load = "clients" if point["concurrency"] is not None else "req/s due"
    rates, latencies = ("req/s", "tok/s", "tok/s full"), ("TTFT", "ITL", "TPOT", "end to end")
    return ("series", load, *rates, *latencies, "hit rate", "swap-in", "failed")


def _row(point: Mapping[str, Any]) -> list[str]:
    nodes = point["nodes"]
    full = point["full_load"]
    return [
        point["series"],
        f"{_x(point):g}",
        f"{point['requests_per_sec']:.2f}",
        f"{point['output_tokens_per_sec']:.1f}",
        f"{full['output_tokens_per_sec']:.1f}" if full else "",
        *(_millis(point[name]) for name in ("ttft_secs", "itl_secs", "tpot_secs", "e2e_secs")),
        f"{point['hit_rate']:.1%}" if point["hit_rate"] is not None else "",
        f"{nodes['swap_in_bytes_per_sec'] / 1e6:,.1f} MB/s" if nodes else "",
        f"{point['num_requests'] - point['num_ok']} of {point['num_requests']}"
        if point["num_ok"] < point["num_requests"]
        else "",
    ]


def _millis(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    values = [found[f"p{rank}"] * 1e3 for rank in PERCENTILES]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)


def notes(report: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    found = []
    points: list[dict[str, Any]] = report["points"]
    wanted = report["settings"]["output_tokens"]
    if any(p["mean_output_tokens"] is not None and p["mean_output_tokens"] < wanted for p in points):
        found.append(f"some answers are shorter than {wanted} tokens: the endpoint ends them earlier")
    if any("chunks" in p["tokens_counted_by"] for p in points):
        found.append("the endpoint sends no usage: chunks with text are counted as tokens")
    busiest = max(p["client_cpu_share"] for p in points)
    if busiest > 0.8:
        found.append(
            f"this client was busy for {busiest:.0%} of a point: it, and not the endpoint, may be the limit"
        )
    return found


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    return f"{report['model']}: {settings['input_tokens']:,} tokens in, {settings['output_tokens']:,} out"


def _x(point: Mapping[str, Any]) -> float:
    return float(point["concurrency"] if point["concurrency"] is not None else point["request_rate"])


# --- as a picture -----------------------------------------------------------------------------------------


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Throughput, ITL, TTFT and hit rate over the load, a line for each series. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points: list[dict[str, Any]] = report["points"]
    ticks = sorted({_x(point) for point in points})
    load = "concurrent requests" if points[0]["concurrency"] is not None else "requests a second, due"
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5))
    for axis, (label, top, factor, lines) in zip(axes.flat, _PICTURES, strict=True):
        for number, name in enumerate(dict.fromkeys(point["series"] for point in points)):
            own = sorted((point for point in points if point["series"] == name), key=_x)
            for style, suffix, path_of in lines:
                found = [(_x(point), _at(point, path_of)) for point in own]
                known = [(x, factor * value) for x, value in found if value is not None]
                if known:
                    axis.plot(*zip(*known, strict=True), style, color=f"C{number}", label=name + suffix)
        axis.set(ylabel=label, ylim=(0, top), xlabel=load, xscale="log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    facts = report["facts"]
    day_and_commit = f"{facts['date'][:10]}, commit {facts['commit'][:12]}"
    figure.suptitle(f"{_title(report)}\n{day_and_commit}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _at(point: Any, path: Sequence[str]) -> Any:
    """What is in nested dicts at ``path``, or the None that stands on the way."""
    for key in path:
        point = None if point is None else point[key]
    return point


_PICTURES = (
    (
        "output tokens a second",
        None,
        1.0,
        (
            ("o-", "", ("output_tokens_per_sec",)),
            ("^:", ", all clients busy", ("full_load", "output_tokens_per_sec")),
        ),
    ),
    *(
        (label, None, 1e3, (("o-", ", p50", (key, "p50")), ("s--", ", p99", (key, "p99"))))
        for label, key in (("ms between chunks", "itl_secs"), ("ms to the first token", "ttft_secs"))
    ),
    ("hit rate", 1.02, 1.0, (("o-", "", ("hit_rate",)),)),
)
"""Label, top and factor of each picture, and its lines of a series: style, name and where its figure is."""
