"""Load on any OpenAI-compatible endpoint: throughput and latencies over concurrency or request rate.

    hisparse-pd bench serve --url http://127.0.0.1:8000/v1 --concurrency 1 8 32 --hisparse true false
    hisparse-pd bench serve --request-rate 0.5 1 2 --input-tokens 4096 --duration-secs 120
    hisparse-pd bench serve --start-pair DIR --pair-options "--page-size 64" --hisparse true

A closed loop (--concurrency) has so many clients that each send their next request when the last one has
ended; an open loop (--request-rate) sends at Poisson arrivals. The values of --hisparse are compared point by
point, so that a machine's drift meets all of them.

TTFT: to the first chunk with text. ITL: between chunks with text, which may carry several tokens each. TPOT:
a request's time from its first to its last chunk, over its tokens but one. "tok/s full": see ``full_load``.
The status is 1 when a request failed or nothing could be measured, 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from hisparse_pd.commands.bench.facts import OUT, ROOT, run_facts
from hisparse_pd.commands.bench.pair import PairError, counters_in, running_pair
from hisparse_pd.commands.bench.report import make_console, progress, write_json
from hisparse_pd.commands.bench.serving_load import (
    Client,
    EndpointError,
    HisparseValue,
    Point,
    Record,
    Workload,
    run_point,
    warm_up,
)
from hisparse_pd.commands.bench.serving_report import line_of, plot, print_report, series_name, summarize
from hisparse_pd.commands.bench.settings import DEFAULT_URL, OPEN_LOOP_REQUESTS, ServingSettings

INTERRUPTED = 130
CONCURRENCY = (1, 2, 4, 8, 16)
WARM_UP_TOKENS = 16
METRICS_TIMEOUT_SECS = 10.0
METRICS_SETTLE_SECS = 1.0
"""Nodes publish their counters up to 0.4 s late."""
COUNTERS = (
    *(f"swap_in_{name}_total" for name in ("hits", "misses", "bytes", "evictions")),
    *("generation_tokens_total", "retractions_total"),
)
"""Of the decode nodes, without the prefix ``hisparse_pd:``."""

_HISPARSE: dict[str, HisparseValue] = {"true": True, "false": False, "auto": "auto", "none": None}


# --- points -----------------------------------------------------------------------------------------------


def make_points(settings: ServingSettings) -> list[Point]:
    """The points in the order in which they are measured: all series of a load, then the next load."""
    loads: list[dict[str, Any]] = (
        [{"request_rate": rate} for rate in settings.request_rate]
        if settings.request_rate
        else [{"concurrency": number} for number in settings.concurrency or CONCURRENCY]
    )
    points: list[Point] = []
    for load in loads:
        if settings.duration_secs is not None:
            size: dict[str, Any] = {"duration_secs": settings.duration_secs}
        else:
            default = max(8, 4 * load["concurrency"]) if "concurrency" in load else OPEN_LOOP_REQUESTS
            size = {"num_requests": settings.num_requests or default}
        for value in settings.hisparse:
            points.append(Point(_HISPARSE[value], stream=len(points), **load, **size))
    return points


async def measure(
    settings: ServingSettings,
    url: str,
    metrics_urls: Sequence[str],
    measured: dict[str, Any],
    console: Console,
) -> None:
    """Measure all points into ``measured``, which has what is known when it is interrupted.

    Raises EndpointError.
    """
    api_key = os.environ.get(settings.api_key_env, "")
    async with Client(url, settings.timeout_secs, api_key) as client:
        measured["model"] = settings.model or await client.first_model()
        workload = Workload(measured["model"], settings)
        for point in make_points(settings):
            if settings.warmup:
                await warm_up(
                    client, workload, point, settings.warmup, min(WARM_UP_TOKENS, settings.output_tokens)
                )
            before = await read_counters(metrics_urls)
            cpu, started = time.process_time(), time.perf_counter()
            load = (
                f"{point.concurrency} clients" if point.concurrency else f"{point.request_rate:g} requests/s"
            )
            name = f"{series_name(point)}, {load}"
            with progress(console) as start:
                records = await run_point(client, workload, point, start(name, point.num_requests))
            secs = time.perf_counter() - started
            cpu_share = (time.process_time() - cpu) / secs
            num_chunks = sum(len(record.arrivals) for record in records)
            num_failed = sum(bool(record.error_class) for record in records)
            failed = f", {num_failed} failed" if num_failed else ""
            console.print(f"{name}: {len(records)} requests, {num_chunks} chunks in {secs:.1f} s{failed}")
            after = await read_counters(metrics_urls)
            grown = {name: after[name] - before[name] for name in after} if metrics_urls else None
            figures = {**summarize(point, records, grown), "client_cpu_share": cpu_share}
            console.print(line_of(figures), markup=False, highlight=False, soft_wrap=True)
            measured["points"].append(figures)
            measured["requests"].append([_row(record) for record in records])


def _row(record: Record) -> dict[str, Any]:
    """A request without its arrivals, which are as many as its tokens."""
    row = asdict(record)
    del row["arrivals"], row["started"], row["ended"]
    found = {name: value for name, value in row.items() if value not in ("", 0)}
    if record.arrivals:
        found |= {"ttft_secs": round(record.ttft_secs, 6), "num_chunks": len(record.arrivals)}
    return found | {"e2e_secs": round(record.e2e_secs, 6)}


# --- the nodes' counters ----------------------------------------------------------------------------------


async def read_counters(urls: Sequence[str]) -> dict[str, float]:
    """COUNTERS summed over the nodes and their labels; waits until a point that just ended is in them.

    Raises EndpointError where a node does not answer; a node that has not got a counter adds nothing.
    """
    if not urls:
        return {}
    await asyncio.sleep(METRICS_SETTLE_SECS)
    totals = dict.fromkeys(COUNTERS, 0.0)
    async with httpx.AsyncClient(timeout=METRICS_TIMEOUT_SECS, trust_env=False) as client:
        for url in urls:
            try:
                found = counters_in((await client.get(url)).raise_for_status().text, COUNTERS)
            except (httpx.HTTPError, ValueError) as error:
                raise EndpointError(
                    "metrics", f"--metrics-url {url}: {type(error).__name__}: {error}"
                ) from error
            totals = {name: total + found[name] for name, total in totals.items()}
    return totals


# --- the command ------------------------------------------------------------------------------------------


def run(settings: ServingSettings, words: Sequence[str]) -> int:
    """Measure, print and write. Returns the exit status. ``words``: of the command line, for the report."""
    console = make_console()
    started = time.monotonic()
    measured: dict[str, Any] = {"model": settings.model, "points": [], "requests": []}
    status = 0
    try:
        if settings.start_pair:
            pair_words = shlex.split(settings.pair_options)
            with running_pair(settings.start_pair.resolve(), pair_words, console) as pair:
                metrics_urls = [*settings.metrics_url, f"{pair.decode_url}/metrics"]
                asyncio.run(measure(settings, f"{pair.router_url}/v1", metrics_urls, measured, console))
        else:
            url = settings.url or DEFAULT_URL
            asyncio.run(measure(settings, url, settings.metrics_url, measured, console))
    except (EndpointError, PairError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    if not measured["points"]:
        return status or 1
    facts = run_facts() | {"command": shlex.join(["hisparse-pd", *words]), "gpus": _gpus()}
    report = {
        "facts": facts,
        "settings": settings.model_dump(mode="json"),
        "secs": round(time.monotonic() - started, 3),
        **measured,
    }
    print_report(report, console)
    in_checkout = (ROOT / "pyproject.toml").exists()
    write(report, settings.out or (OUT if in_checkout else Path.cwd()) / "serving", console)
    if any(point["errors"] for point in report["points"]):
        status = status or 1
    return status


def write(report: Mapping[str, Any], out: Path, console: Console) -> None:
    """``out``.json and, where matplotlib is installed, ``out``.png."""
    write_json(Path(f"{out}.json"), report)
    written = f"wrote {out}.json"
    try:
        plot(report, Path(f"{out}.png"))
        written += " and .png"
    except ModuleNotFoundError as error:
        written += f"; no picture: {error.name} is missing (pip install 'hisparse-pd[bench]')"
    console.print(written, markup=False, highlight=False, soft_wrap=True)


def _gpus() -> list[str]:
    """Name and driver of this machine's GPUs, which are the endpoint's only where it runs here."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []
