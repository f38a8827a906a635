"""Measures dense and hisparse requests over HTTP, in turn: latencies, throughput and hit rates.

    python -m tools.bench.serve --url http://127.0.0.1:8000/v1 --metrics-url http://127.0.0.1:30001/metrics \\
        --hisparse false true -c 1 8 32 --input-tokens 8192 --output-tokens 256 --token-range 1000 30000

Each of the clients sends its next request when the last one has ended. For each number of clients the values
of --hisparse are measured in turn, so that a machine's drift affects all of them; a number of clients with
one of these values is a *point*. Prompts are random token ids. Requests set ``ignore_eos``, so that answers
have exactly --output-tokens; a note on the console says so if an endpoint ends some earlier.

TTFT is the time to the first chunk with text, ITL the time between chunks with text, which may carry several
tokens each. TPOT is a request's time from its first to its last chunk, divided by its tokens but one. "tok/s
full": see ``full_load``. The variable OPENAI_API_KEY holds the endpoint's key. The status is 1 when a request
failed or nothing could be measured, 130 after Ctrl-C; what had been measured is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
from rich.console import Console

from tools.bench.facts import OUT, gpus, run_facts
from tools.bench.pair import METRICS_TIMEOUT_SECS, counters_in
from tools.bench.report import make_console, progress, table, write_json
from tools.bench.streamed_load import (
    PERCENTILES,
    Client,
    EndpointError,
    Record,
    closed_loop,
    distribution,
    full_load,
)

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
WARM_UP_TOKENS = 16
"""Output tokens of requests before a point."""
METRICS_SETTLE_SECS = 1.0
"""Wait before counters are read, because nodes publish them up to 0.4 s late."""
COUNTERS = (
    *(f"swap_in_{name}_total" for name in ("hits", "misses", "bytes", "evictions")),
    *("generation_tokens_total", "retractions_total"),
)
"""Counters of decode nodes, without their prefix ``hisparse_pd:``."""
HISPARSE: dict[str, bool | str | None] = {"true": True, "false": False, "auto": "auto", "none": None}
"""Values of the field ``hisparse``, by the words of the option; None omits the field."""

# --- requests ---------------------------------------------------------------------------------------------


def contents(
    options: argparse.Namespace, model: str, hisparse: str, prompt_set: int, count: int, max_tokens: int
) -> list[bytes]:
    """Return the bodies of ``count`` requests, encoded beforehand because a long prompt takes milliseconds.

    ``prompt_set``: a number; other numbers give other prompts, unless --distinct-prompts limits them.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if HISPARSE[hisparse] is not None:
        body["hisparse"] = HISPARSE[hisparse]
    num_distinct = options.distinct_prompts
    found: list[bytes] = []
    for number in range(min(count, num_distinct or count)):
        rng = np.random.default_rng((options.seed, 0 if num_distinct else prompt_set + 1, number))
        low, high = options.token_range
        prompt = rng.integers(low, high, options.input_tokens)
        common = np.random.default_rng(options.seed).integers(low, high, options.shared_tokens)
        prompt[: options.shared_tokens] = common
        found.append(msgspec.json.encode(body | {"prompt": prompt.tolist()} | options.extra_body))
    return [found[number % len(found)] for number in range(count)]


async def measure(options: argparse.Namespace, measured: dict[str, Any], console: Console) -> None:
    """Measure all points into ``measured``, which has all finished ones when interrupted.

    Raises EndpointError.
    """
    api_key = os.environ.get("OPENAI_API_KEY", "")
    async with Client(options.url, options.timeout_secs, api_key) as client:
        measured["model"] = model = options.model or await client.first_model()
        points = [(clients, hisparse) for clients in options.concurrency for hisparse in options.hisparse]
        for number, (num_clients, hisparse) in enumerate(points):
            # Two sets of prompts a point, so that no prompt of a warm-up comes again.
            warm_up_tokens = min(WARM_UP_TOKENS, options.output_tokens)
            first = contents(options, model, hisparse, 2 * number + 1, options.warmup, warm_up_tokens)
            count = options.num_requests or max(8, 4 * num_clients)
            bodies = contents(options, model, hisparse, 2 * number, count, options.output_tokens)
            await warm_up(client, first, num_clients)

            before = await read_counters(options.metrics_url)
            cpu, started = time.process_time(), time.perf_counter()
            with progress(console) as start:
                advance = start(f"hisparse {hisparse}, {num_clients} clients", count)
                records = await closed_loop(client, bodies, num_clients, advance)
            cpu_share = (time.process_time() - cpu) / (time.perf_counter() - started)
            after = await read_counters(options.metrics_url)
            grown = {name: after[name] - before[name] for name in after}

            point = {
                "hisparse": hisparse,
                "concurrency": num_clients,
                **summarize(num_clients, records, grown),
                "client_cpu_share": cpu_share,
            }
            line = ", ".join(f"{name} {text}" for name, text in cells(point).items() if text)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            measured["points"].append(point)
            measured["requests"].append([row_of(record) for record in records])


async def warm_up(client: Client, bodies: Sequence[bytes], num_clients: int) -> None:
    """Send requests before a point. Raises EndpointError when all of them fail, as the point's would."""
    records = await closed_loop(client, bodies, num_clients)
    if records and all(record.error_class for record in records):
        raise EndpointError(records[0].error_class, f"warm-up: {records[0].error_class}: {records[0].error}")


async def read_counters(urls: Sequence[str]) -> dict[str, float]:
    """Return COUNTERS summed over the nodes and their labels, after they have caught up with the last point.

    A node without one of the counters adds nothing. Raises EndpointError where a node does not answer.
    """
    if not urls:
        return {}
    await asyncio.sleep(METRICS_SETTLE_SECS)
    totals: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=METRICS_TIMEOUT_SECS, trust_env=False) as client:
        for url in urls:
            try:
                totals.update(counters_in((await client.get(url)).raise_for_status().text, COUNTERS))
            except (httpx.HTTPError, ValueError) as error:
                problem = f"--metrics-url {url}: {type(error).__name__}: {error}"
                raise EndpointError("metrics", problem) from error
    return dict(totals)


# --- figures ----------------------------------------------------------------------------------------------


def summarize(num_clients: int, records: Sequence[Record], counters: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one point, JSON-able.

    ``counters``: growth of the nodes' counters; empty without nodes. Latencies are those of requests that
    succeeded; throughput counts the tokens of failed ones, too, because the endpoint made them.
    """
    done = [record for record in records if not record.error_class]
    answers = [record.served for record in done if record.served is not None]
    wall_secs = max(r.ended for r in records) - min(r.started for r in records)
    num_tokens = sum(record.num_tokens for record in records)
    hits: float = sum(a.hits for a in answers)
    misses: float = sum(a.misses for a in answers)
    if counters:
        hits, misses = counters["swap_in_hits_total"], counters["swap_in_misses_total"]
    return {
        "num_requests": len(records),
        "num_ok": len(done),
        "errors": dict(Counter(r.error_class for r in records if r.error_class).most_common()),
        "error_samples": {r.error_class: r.error for r in reversed(records) if r.error_class},
        "wall_secs": wall_secs,
        "requests_per_sec": len(done) / wall_secs,
        "output_tokens": num_tokens,
        "output_tokens_per_sec": num_tokens / wall_secs,
        "full_load": full_load(num_clients, records),
        "ttft_secs": distribution(r.ttft_secs for r in done),
        "itl_secs": distribution(gap for r in done for gap in r.itl_secs),
        "tpot_secs": distribution(r.tpot_secs for r in done if r.tpot_secs is not None),
        "e2e_secs": distribution(r.e2e_secs for r in done),
        "mean_tokens_per_chunk": _mean([r.num_tokens / len(r.arrivals) for r in done]),
        "mean_prompt_tokens": _mean([a.num_prompt_tokens for a in answers]),
        "mean_cached_tokens": _mean([a.num_cached_tokens for a in answers]),
        "mean_output_tokens": _mean([a.num_output_tokens for a in answers]),
        "modes": dict(Counter(a.mode for a in answers)),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "swap_in_bytes_per_sec": counters["swap_in_bytes_total"] / wall_secs if counters else None,
        "counters": dict(counters),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def row_of(record: Record) -> dict[str, Any]:
    """Return a request of the report, without its arrivals, which are as many as its tokens."""
    answer = asdict(record.served) if record.served is not None else {}
    row = {**answer, "error_class": record.error_class, "error": record.error}
    found: dict[str, Any] = {name: value for name, value in row.items() if value}
    if record.arrivals:
        found |= {"ttft_secs": round(record.ttft_secs, 6), "num_chunks": len(record.arrivals)}
    return found | {"e2e_secs": round(record.e2e_secs, 6)}


# --- on the console ---------------------------------------------------------------------------------------


def cells(point: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table by its columns."""
    full, swapped = point["full_load"], point["swap_in_bytes_per_sec"]
    num_failed = point["num_requests"] - point["num_ok"]
    return {
        "hisparse": point["hisparse"],
        "clients": str(point["concurrency"]),
        "req/s": f"{point['requests_per_sec']:.2f}",
        "tok/s": f"{point['output_tokens_per_sec']:.1f}",
        "tok/s full": f"{full['output_tokens_per_sec']:.1f}" if full else "",
        "TTFT": _millis(point["ttft_secs"]),
        "ITL": _millis(point["itl_secs"]),
        "TPOT": _millis(point["tpot_secs"]),
        "end to end": _millis(point["e2e_secs"]),
        "hit rate": f"{point['hit_rate']:.1%}" if point["hit_rate"] is not None else "",
        "swap-in": f"{swapped / 1e6:,.1f} MB/s" if swapped is not None else "",
        "failed": f"{num_failed} of {point['num_requests']}" if num_failed else "",
    }


def _millis(found: Mapping[str, float] | None) -> str:
    values = [found[f"p{rank}"] * 1e3 for rank in PERCENTILES] if found else []
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)


def print_report(report: Mapping[str, Any], console: Console) -> None:
    points: list[dict[str, Any]] = report["points"]
    options = report["options"]
    sizes = f"{options['input_tokens']:,} tokens in, {options['output_tokens']:,} out"
    rows = [cells(point) for point in points]
    title = f"{report['model']}: {sizes}; latencies p50 / p90 / p99, ms"
    console.print(table(title, list(rows[0]), ([*row.values()] for row in rows)))
    for point in points:
        for name, number in point["errors"].items():
            where = f"hisparse {point['hisparse']}, {point['concurrency']} clients"
            problem = f"{where}: {number} x {name}: {point['error_samples'][name]}"
            console.print(problem, style="red", markup=False, highlight=False)
    for note in notes(report):
        console.print(note, style="yellow", markup=False, highlight=False)


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know before trusting the figures."""
    found = []
    wanted = report["options"]["output_tokens"]
    if any((point["mean_output_tokens"] or wanted) < wanted for point in report["points"]):
        found.append(f"some answers are shorter than {wanted} tokens: the endpoint ends them earlier")
    busiest = max(point["client_cpu_share"] for point in report["points"])
    if busiest > 0.8:
        found.append(
            f"this client was busy for {busiest:.0%} of a point: it, and not the endpoint, may be the limit"
        )
    return found


# --- the command ------------------------------------------------------------------------------------------


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.serve",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, add_number = parser.add_argument, partial(add_number_option, parser)

    clients, modes = [1, 2, 4, 8, 16], ["false", "true"]
    add("--url", default="http://127.0.0.1:8000/v1", help="endpoint, including /v1")
    add("--model", default="", help="model name in requests; default: the endpoint's first")
    add("--metrics-url", nargs="+", action="extend", default=[], help="URLs of the decode nodes' /metrics")
    add(
        "--hisparse",
        nargs="+",
        choices=HISPARSE,
        default=modes,
        help="values of the field hisparse; none omits it",
    )
    add(
        "-c",
        "--concurrency",
        nargs="+",
        type=at_least(1),
        default=clients,
        metavar="N",
        help="numbers of clients",
    )
    add_number("--num-requests", None, 1, "requests of a point; default: 4 for each client, at least 8")
    add_number("--warmup", 2, 0, "requests before each point")
    add("--timeout-secs", type=float, default=600.0, metavar="SECS", help="time limit of a request")
    add_number("--input-tokens", 1024, 1, "tokens of a prompt")
    add_number("--output-tokens", 128, 1, "tokens of an answer")
    add_token_range(parser)
    distinct = "number of prompts that repeat in all points, for prefix caches to find; 0: all differ"
    add_number("--distinct-prompts", 0, 0, distinct)
    add_number("--shared-tokens", 0, 0, "tokens with which all prompts begin alike")
    add_number("--seed", 0, 0, "seed of prompts")
    add("--temperature", type=float, default=0.0, help="temperature of requests")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields of requests")
    add("--out", type=Path, default=OUT / "serving", help="JSON file, without its suffix")
    options = parser.parse_args(words)
    url = urlsplit(options.url)
    if options.shared_tokens > options.input_tokens:
        parser.error(
            f"--shared-tokens {options.shared_tokens} exceeds --input-tokens {options.input_tokens}; "
            "give fewer"
        )
    if url.scheme not in ("http", "https") or not url.netloc:
        parser.error(f"--url {options.url}: expected http://HOST:PORT/v1")
    if not isinstance(options.extra_body, dict):
        parser.error(f"--extra-body {options.extra_body!r}: expected a JSON object")
    return options


def add_number_option(
    parser: argparse.ArgumentParser, name: str, default: int | None, least: int, explained: str
) -> None:
    """Add an option that takes a whole number of at least ``least``."""
    parser.add_argument(name, type=at_least(least), default=default, metavar="N", help=explained)


def add_token_range(parser: argparse.ArgumentParser) -> None:
    """Add the option --token-range of benchmarks whose prompts are random token ids."""
    parser.add_argument(
        "--token-range",
        nargs=2,
        type=int,
        default=[3, 250],
        action=_TokenRange,
        metavar=("LOW", "HIGH"),
        help="range of the prompts' token ids",
    )


class _TokenRange(argparse.Action):
    """Refuses a range without a token."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        word: str | None = None,
    ) -> None:
        low, high = values
        if not 0 <= low < high:
            parser.error(f"{word} {low} {high} has no token; HIGH is exclusive and must be above LOW")
        setattr(namespace, self.dest, values)


def at_least(least: int) -> Callable[[str], int]:
    def number(word: str) -> int:
        if int(word) < least:
            raise argparse.ArgumentTypeError(f"{word} is below {least}, the least that it can be")
        return int(word)

    return number


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write a report. Returns the exit status."""
    options = parse(words)
    console = make_console()
    measured: dict[str, Any] = {"model": options.model, "points": [], "requests": []}
    status = 0
    try:
        asyncio.run(measure(options, measured, console))
    except EndpointError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    if not measured["points"]:
        return status or 1
    report = {"facts": run_facts() | {"gpus": gpus()}, "options": vars(options), **measured}
    print_report(report, console)
    out = Path(f"{options.out}.json")
    write_json(out, report)
    console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)
    return status or int(any(point["errors"] for point in report["points"]))


if __name__ == "__main__":
    sys.exit(main())
