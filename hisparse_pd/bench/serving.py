"""Load on any OpenAI-compatible endpoint: throughput and latencies over concurrency or request rate.

    hisparse-pd bench serve --url http://127.0.0.1:8000/v1 --concurrency 1 8 32 --hisparse true false
    hisparse-pd bench serve --request-rate 0.5 1 2 --input-tokens 4096 --duration-secs 120
    hisparse-pd bench serve --start-pair DIR --pair-options "--page-size 64" --hisparse true

Prompts are random token ids, drawn from a seed. A closed loop (--concurrency) has so many clients that each
send their next request when the last one has ended; an open loop (--request-rate) sends at Poisson arrivals,
however many are under way. The values of --hisparse are compared point by point, so that a machine's drift
meets all of them.

TTFT: to the first chunk with text. ITL: between chunks with text, which may carry several tokens each. TPOT:
a request's time from its first to its last chunk, over its tokens but one. "tok/s full": while all clients
of a closed loop were busy and had their first token.

The status is 1 when a request failed or nothing could be measured, 2 for a wrong option, 130 after Ctrl-C;
what had been measured until then is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from hisparse_pd.bench.facts import OUT, ROOT, run_facts
from hisparse_pd.bench.pair import PairError, counters_in, running_pair
from hisparse_pd.bench.report import make_console, progress, write_json
from hisparse_pd.bench.serving_load import (
    Client,
    EndpointError,
    HisparseValue,
    Point,
    Record,
    Workload,
    run_point,
    warm_up,
)
from hisparse_pd.bench.serving_report import plot, print_report, series_name, summarize

USAGE_ERROR = 2
INTERRUPTED = 130
DEFAULT_URL = "http://127.0.0.1:8000/v1"
CONCURRENCY = (1, 2, 4, 8, 16)
OPEN_LOOP_REQUESTS = 100
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


class MetricsError(Exception):
    """A node's /metrics cannot be read."""


# --- points -----------------------------------------------------------------------------------------------


def make_points(options: argparse.Namespace) -> list[Point]:
    """The points in the order in which they are measured: all series of a load, then the next load."""
    loads: list[dict[str, Any]] = (
        [{"request_rate": rate} for rate in options.request_rate]
        if options.request_rate
        else [{"concurrency": number} for number in options.concurrency or CONCURRENCY]
    )
    points: list[Point] = []
    for load in loads:
        if options.duration_secs is not None:
            size: dict[str, Any] = {"duration_secs": options.duration_secs}
        else:
            default = max(8, 4 * load["concurrency"]) if "concurrency" in load else OPEN_LOOP_REQUESTS
            size = {"num_requests": options.num_requests or default}
        for value in options.hisparse:
            points.append(Point(_HISPARSE[value], stream=len(points), **load, **size))
    return points


def make_workload(options: argparse.Namespace, model: str) -> Workload:
    return Workload(
        model=model,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        token_range=tuple(options.token_range),
        as_text=options.prompt_format == "text",
        num_prompts=options.distinct_prompts,
        seed=options.seed,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        extra_body=options.extra_body,
    )


async def measure(
    options: argparse.Namespace,
    url: str,
    metrics_urls: Sequence[str],
    measured: dict[str, Any],
    console: Console,
) -> None:
    """Measure all points into ``measured``, which has what is known when it is interrupted.

    Raises EndpointError, MetricsError.
    """
    api_key = os.environ.get(options.api_key_env, "")
    async with Client(url, options.timeout_secs, api_key) as client:
        measured["model"] = options.model or await client.first_model()
        workload = make_workload(options, measured["model"])
        for point in make_points(options):
            if options.warmup:
                await warm_up(
                    client, workload, point, options.warmup, min(WARM_UP_TOKENS, options.output_tokens)
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

    Raises MetricsError where a node does not answer; a node that has not got a counter adds nothing.
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
                raise MetricsError(f"--metrics-url {url}: {type(error).__name__}: {error}") from error
            totals = {name: total + found[name] for name, total in totals.items()}
    return totals


# --- command line -----------------------------------------------------------------------------------------


def _at_least(least: float, kind: Callable[[str], Any], *, above: bool = False) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if value < least or (above and value == least):
            raise argparse.ArgumentTypeError(
                f"{text}: expected {'more than' if above else 'at least'} {least:g}"
            )
        return value

    return parse


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {type(value).__name__}")
    return value


def make_parser() -> argparse.ArgumentParser:
    count, natural, positive = _at_least(1, int), _at_least(0, int), _at_least(0, float, above=True)
    parser = argparse.ArgumentParser(
        prog="hisparse-pd bench serve",
        usage="hisparse-pd bench serve [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("endpoint")
    where.add_argument("--url", help=f"up to and with /v1; default: {DEFAULT_URL}")
    where.add_argument("--model", help="default: the endpoint's first")
    where.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", help="variable that holds the key; default: %(default)s"
    )
    where.add_argument(
        "--metrics-url",
        action="append",
        default=[],
        metavar="URL",
        help="/metrics of a decode node, for hit rate and swap-in; repeatable",
    )
    where.add_argument(
        "--start-pair",
        type=Path,
        metavar="DIR",
        help="start a pair with this checkpoint on this machine, and stop it",
    )
    where.add_argument(
        "--pair-options", default="", metavar="TEXT", help='of that pair, as in "--page-size 64"'
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        *("--concurrency", "-c"),
        type=count,
        nargs="+",
        help=f"clients of closed loops; default: {CONCURRENCY}",
    )
    load.add_argument(
        "--request-rate", type=positive, nargs="+", help="requests a second of open loops, instead"
    )
    load.add_argument(
        "--num-requests",
        type=count,
        help=f"of a point; default: 4 a client, 8 at least; {OPEN_LOOP_REQUESTS} in an open loop",
    )
    load.add_argument("--duration-secs", type=positive, help="instead: start requests for so long")
    load.add_argument(
        "--hisparse",
        nargs="+",
        choices=tuple(_HISPARSE),
        default=["none"],
        help="the request's field, several to compare; none: leave it out; default: none",
    )
    load.add_argument(
        "--warmup", type=natural, default=2, help="requests before each point; default: %(default)s"
    )
    load.add_argument(
        "--timeout-secs", type=positive, default=600.0, help="of a whole request; default: %(default)g"
    )
    load.add_argument("--seed", type=natural, default=0, help="of prompts and arrivals; default: %(default)s")

    what = parser.add_argument_group("requests")
    what.add_argument("--input-tokens", type=count, default=1024, help="of a prompt; default: %(default)s")
    what.add_argument("--output-tokens", type=count, default=128, help="of an answer; default: %(default)s")
    what.add_argument(
        "--prompt-format",
        choices=("ids", "text"),
        default="ids",
        help="text: words, about a token each, for endpoints that take no token ids; default: %(default)s",
    )
    what.add_argument(
        "--token-range",
        type=natural,
        nargs=2,
        default=[3, 250],
        metavar=("LOW", "END"),
        help="random ids are LOW to END - 1; default: 3 250, which every model has",
    )
    what.add_argument(
        "--distinct-prompts",
        type=natural,
        default=0,
        metavar="N",
        help="send N prompts in turns in all points, for a prefix cache to find; default: 0, all differ",
    )
    what.add_argument("--temperature", type=_at_least(0, float), default=0.0, help="default: %(default)g")
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send ignore_eos, for answers of exact length; off for endpoints that refuse it",
    )
    what.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of a request"
    )
    default_out = (OUT if (ROOT / "pyproject.toml").exists() else Path.cwd()) / "serving"
    parser.add_argument(
        "--out", type=Path, default=default_out, help="JSON and PNG, without suffix; default: %(default)s"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    options = parser.parse_args(given)
    if problem := _conflict(options):
        parser.exit(USAGE_ERROR, f"{parser.prog}: error: {problem}\n")
    console = make_console()
    started = time.monotonic()
    measured: dict[str, Any] = {"model": options.model, "points": [], "requests": []}
    status = 0
    try:
        if options.start_pair:
            words = shlex.split(options.pair_options)
            with running_pair(options.start_pair.resolve(), words, console) as pair:
                metrics_urls = [*options.metrics_url, f"{pair.decode_url}/metrics"]
                asyncio.run(measure(options, f"{pair.router_url}/v1", metrics_urls, measured, console))
        else:
            asyncio.run(measure(options, options.url or DEFAULT_URL, options.metrics_url, measured, console))
    except (EndpointError, MetricsError, PairError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    if not measured["points"]:
        return status or 1
    facts = run_facts() | {"command": shlex.join(["hisparse-pd", "bench", "serve", *given]), "gpus": _gpus()}
    report = {
        "facts": facts,
        "settings": vars(options),
        "secs": round(time.monotonic() - started, 3),
        **measured,
    }
    print_report(report, console)
    write(report, options.out, console)
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


def _conflict(options: argparse.Namespace) -> str:
    """What two options do not allow together, or nothing."""
    low, end = options.token_range
    if options.concurrency and options.request_rate:
        return "--concurrency and --request-rate exclude each other: a loop is closed or open"
    if options.num_requests and options.duration_secs:
        return "--num-requests and --duration-secs exclude each other"
    if options.start_pair and options.url:
        return "--start-pair and --url exclude each other: the pair is the endpoint"
    if options.pair_options and not options.start_pair:
        return "--pair-options needs --start-pair"
    if low >= end:
        return f"--token-range {low} {end} has no token; END is exclusive and must be above LOW"
    with suppress(httpx.InvalidURL):
        if httpx.URL(options.url or DEFAULT_URL).scheme in ("http", "https"):
            return ""
    return f"--url {options.url}: expected http://HOST:PORT/v1"


def _gpus() -> list[str]:
    """Name and driver of this machine's GPUs, which are the endpoint's only where it runs here."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
