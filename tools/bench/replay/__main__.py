"""Sends a trace of Mooncake's format to a pair, and says what its prefix caches found beside an LRU.

    python -m tools.bench.replay --url http://127.0.0.1:8000/v1 --trace conversation_trace.jsonl \\
        --requests 2000 --concurrency 8 --token-range 1000 30000

The trace is a file such as those in FAST25-release/traces of Mooncake's repository (kvcache-ai/Mooncake), or
one that ``python -m tools.bench.replay.convert`` has made, with ``--trace-block`` tokens a block.
``--block-tokens`` makes blocks shorter, for small models and pools; answers get shorter by the same factor.
``--speed 1`` sends each request at its time in the trace, ``--speed 10`` ten times as fast; with 0 each of
the clients sends the next request when its last one has ended.

The LRU has the capacities of the prefill nodes' KV pools and host tiers, which the router's /status says. It
gets the pages of one prompt after the other, in the order in which they were sent. "computed" are prompt
tokens that no tier had. A decode node that keeps prefixes spares prefill nodes a part of the prompts, which
the LRU knows nothing of: start it with disable_prefix_cache. The status is 1 when a request failed, 130 after
Ctrl-C. The variable OPENAI_API_KEY holds the endpoint's key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tools.bench.facts import OUT
from tools.bench.replay.lru import TieredLru
from tools.bench.replay.trace import TRACE_BLOCK, PromptMaker, Scale, TraceError, TraceRequest, read_trace
from tools.bench.report import make_console, progress, table_of, write_report
from tools.bench.serve import INTERRUPTED, add_number_option, add_token_range, row_of
from tools.bench.streamed_load import Client, EndpointError, Record, closed_loop, distribution, open_loop

# --- requests ---------------------------------------------------------------------------------------------


def bodies(options: argparse.Namespace, model: str, requests: Sequence[TraceRequest]) -> Iterator[bytes]:
    """Yield the requests' bodies, each made when it is sent: those of a whole trace would take gigabytes."""
    scale = Scale(options.block_tokens, options.trace_block)
    maker = PromptMaker(scale, tuple(options.token_range), options.seed)
    for request in requests:
        num_new = max(1, scale.num_tokens(request.output_length))
        body = {
            "model": model,
            "prompt": maker.prompt(request),
            "max_tokens": min(num_new, options.max_output_tokens or num_new),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        yield msgspec.json.encode(body | options.extra_body)


async def replay(options: argparse.Namespace, requests: Sequence[TraceRequest], console: Console) -> Any:
    """Send the requests and return the report. Raises EndpointError."""
    async with Client(options.url, options.timeout_secs, os.environ.get("OPENAI_API_KEY", "")) as client:
        capacities = {"device": options.device_tokens, "host": options.host_tokens}
        if None in capacities.values():
            found = capacities_of(await client.status())
            capacities = {tier: found[tier] if given is None else given for tier, given in capacities.items()}
        contents = bodies(options, options.model or await client.first_model(), requests)
        with progress(console) as start:
            advance = start("requests", len(requests))
            cpu, started = time.process_time(), time.perf_counter()
            if options.speed:
                first = requests[0].timestamp
                starts = [(each.timestamp - first) / 1e3 / options.speed for each in requests]
                records = await open_loop(client, contents, starts, advance)
            else:
                records = await closed_loop(client, contents, options.concurrency, advance)
        cpu_share = (time.process_time() - cpu) / (time.perf_counter() - started)
    scale = Scale(options.block_tokens, options.trace_block)
    return {
        "options": vars(options),
        **summarize(records),
        "lru": of_lru(records, requests, scale, options.page_size, capacities),
        "client_cpu_share": cpu_share,
        "requests": [row_of(record) for record in records],
    }


def capacities_of(status: Any) -> dict[str, int]:
    """Return the tokens that prefill nodes have room for in each tier, all nodes together, by the router's
    /status. Raises EndpointError."""
    totals: Counter[str] = Counter(device=0, host=0)
    try:
        for node in (node for node in status["nodes"] if node["kind"] == "prefill"):
            for rank in node["load"]["ranks"]:
                pools = rank["numbers"]["pool_total_tokens"]
                totals["device"] += int(pools["kv"])
                totals["host"] += int(pools.get("host", 0))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"/status has no pools of prefill nodes ({type(error).__name__}: {error})"
        raise EndpointError("status", f"{problem}; give --device-tokens and --host-tokens") from error
    return dict(totals)


# --- figures ----------------------------------------------------------------------------------------------


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of the requests, JSON-able. Tokens and latencies are those of requests that
    succeeded."""
    answered = [record for record in records if not record.error_class]
    answers = [record.served for record in answered if record.served is not None]
    wall_secs = max(record.ended for record in records) - min(record.started for record in records)
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    num_cached_tokens = sum(answer.num_cached_tokens for answer in answers)
    by_tier: Counter[str] = Counter()
    for answer in answers:
        by_tier.update(answer.cached_by_tier)
    return {
        "num_requests": len(records),
        "num_ok": len(answered),
        "errors": dict(Counter(each.error_class for each in records if each.error_class).most_common()),
        "error_samples": {each.error_class: each.error for each in reversed(records) if each.error_class},
        "wall_secs": wall_secs,
        "requests_per_sec": len(answered) / wall_secs,
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": num_cached_tokens,
        "cached_by_tier": dict(by_tier),
        "computed_tokens": num_prompt_tokens - num_cached_tokens,
        "output_tokens": sum(answer.num_output_tokens for answer in answers),
        "ttft_secs": distribution(record.ttft_secs for record in answered),
        "e2e_secs": distribution(record.e2e_secs for record in answered),
    }


def of_lru(
    records: Sequence[Record],
    requests: Sequence[TraceRequest],
    scale: Scale,
    page_size: int,
    capacities: Mapping[str, int],
) -> dict[str, Any]:
    """Return what an LRU would have found of the requests that succeeded, in tokens.

    ``capacities``: tokens of the tiers "device" and "host".
    """
    lru = TieredLru(capacities["device"] // page_size, capacities["host"] // page_size)
    by_tier: Counter[str] = Counter(device=0, host=0)
    num_prompt_tokens = 0
    for record, request in zip(records, requests, strict=True):
        if record.error_class:
            continue
        num_prompt_tokens += scale.num_tokens(request.input_length)
        for tier, num_pages in lru.use(scale.page_keys(request, page_size))._asdict().items():
            by_tier[tier] += num_pages * page_size
    num_cached_tokens = by_tier.total()
    return {
        "capacity_tokens": dict(capacities),
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": num_cached_tokens,
        "cached_by_tier": dict(by_tier),
        "computed_tokens": num_prompt_tokens - num_cached_tokens,
    }


# --- on the console ---------------------------------------------------------------------------------------


def token_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table: what was served, the LRU, and the difference in percent of the LRU."""
    lru = report["lru"]
    tiers = dict.fromkeys((*report["cached_by_tier"], *lru["cached_by_tier"]))

    def row(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
        counts = {name: figures[f"{name}_tokens"] for name in ("prompt", "cached", "computed")}
        return {"tokens": name, **counts, **{tier: figures["cached_by_tier"].get(tier) for tier in tiers}}

    rows = [row("served", report), row("LRU", lru)]
    difference = {
        name: 100 * (count - of_lru) / of_lru if count is not None and of_lru else None
        for name, count, of_lru in zip(rows[0], rows[0].values(), rows[1].values(), strict=True)
        if name != "tokens"
    }
    return [*rows, {"tokens": "difference, %", **difference}]


def print_report(report: Mapping[str, Any], console: Console) -> None:
    ttft = report["ttft_secs"] or {}
    run = {
        "requests": report["num_requests"],
        "failed": report["num_requests"] - report["num_ok"],
        "secs": report["wall_secs"],
        "req/s": report["requests_per_sec"],
        **{f"TTFT {rank}, ms": ttft[rank] * 1e3 if ttft else None for rank in ("p50", "p99")},
    }
    console.print(table_of("Requests", [run]))
    capacities = report["lru"]["capacity_tokens"]
    console.print(table_of("Prompt tokens", token_rows(report)))
    sizes = f"{capacities['device']:,} tokens on the device, {capacities['host']:,} in main memory"
    console.print(f"LRU: {sizes}", highlight=False)
    for name, number in report["errors"].items():
        problem = f"{number} x {name}: {report['error_samples'][name]}"
        console.print(problem, style="red", markup=False, highlight=False)
    for note in notes(report):
        console.print(note, style="yellow", markup=False, highlight=False)


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know before comparing with the LRU."""
    found = []
    if report["prompt_tokens"] != report["lru"]["prompt_tokens"]:
        found.append(
            f"the endpoint counts {report['prompt_tokens']:,} prompt tokens, and "
            f"{report['lru']['prompt_tokens']:,} were sent: its pages do not end where the LRU's do"
        )
    if num_tokens := report["cached_by_tier"].get("decode"):
        found.append(
            f"the decode node had {num_tokens:,} tokens, which the LRU does not have: start it with "
            "disable_prefix_cache to compare"
        )
    return found


# --- the command ------------------------------------------------------------------------------------------


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.replay",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, add_number = parser.add_argument, partial(add_number_option, parser)

    add("--url", default="http://127.0.0.1:8000/v1", help="endpoint, including /v1")
    add("--model", default="", help="model name in requests; default: the endpoint's first")
    add("--trace", type=Path, required=True, metavar="FILE", help="trace of Mooncake's format")
    add_number("--requests", 0, 0, "requests of the trace, from its beginning; 0: all")
    add_number("--trace-block", TRACE_BLOCK, 1, "tokens of a block in the trace")
    add_number("--block-tokens", None, 1, "tokens of a block in prompts; default: as in the trace")
    add_number("--max-output-tokens", 0, 0, "longest answer, in tokens; 0: as in the trace, scaled")
    add("--speed", type=float, default=0.0, help="speed of the trace's timestamps; 0: without them")
    add_number("--concurrency", 8, 1, "clients with --speed 0")
    add_number("--page-size", 64, 1, "page size of the prefill nodes")
    tiers = "capacity of the LRU's {} tier, in tokens; default: what the router's /status says"
    add_number("--device-tokens", None, 1, tiers.format("first"))
    add_number("--host-tokens", None, 0, tiers.format("second"))
    add_token_range(parser)
    add_number("--seed", 0, 0, "seed of the blocks' tokens")
    add("--timeout-secs", type=float, default=600.0, metavar="SECS", help="time limit of a request")
    add(
        "--extra-body",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further fields of requests",
    )
    add("--out", type=Path, default=OUT / "replay", help="JSON file, without its suffix")
    options = parser.parse_args(words)
    if options.block_tokens is None:
        options.block_tokens = options.trace_block
    if options.speed < 0:
        parser.error(f"--speed {options.speed} is below 0")
    if not isinstance(options.extra_body, dict):
        parser.error(f"--extra-body {options.extra_body!r}: expected a JSON object")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Replay, print and write a report. Returns the exit status."""
    options = parse(words)
    console = make_console()
    try:
        requests = read_trace(options.trace, options.requests, options.trace_block)
        report = asyncio.run(replay(options, requests, console))
    except (TraceError, EndpointError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    print_report(report, console)
    write_report(options.out, report)
    console.print(f"wrote {options.out}.json", markup=False, highlight=False, soft_wrap=True)
    return int(bool(report["errors"]))


if __name__ == "__main__":
    sys.exit(main())
