"""How long do running requests wait for their tokens while a long prefix is copied to the other mode?

    python -m bench.prefix_copies --model-path DIR [--prefix 75000] [--prefixes 3] [--clients 16]
        [--devices cuda:0 cuda:1] [--token-range 300 32000] [--pair-option kv-cache-dtype=fp8_e4m3 ...]
        [--out DIR]

``--clients`` hisparse streams run all the time. Beside them each prefix is asked for three times, with a few
new tokens: cold, then in the same mode, which takes up what the decode node holds, then in the other mode,
for which the decode node copies that between host and device. Half of the prefixes begin dense. Counted are
the streams' times between tokens from the moment in which a request is sent to its last token, and of
``--alone-secs`` without any. Same and copied differ in the copy alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from bench.facts import OUT, run_facts
from bench.pair import Pair, add_pair_options, options_of_pair, running_pair
from bench.serving_load import Client, EndpointError, Record, Workload

TIMEOUT_SECS = 600.0
NEW_TOKENS = 50
"""Of a request beyond its prefix."""
ANSWER_TOKENS = 8
"""Of a request; with one it could end before its prefix is copied."""
MODES = ("hisparse", "dense")


@dataclass
class Streams:
    """The running requests: when the tokens of each came, in seconds of ``time.perf_counter``."""

    arrivals: list[list[float]]
    tasks: list[asyncio.Task[Record]] = field(default_factory=list)

    def itl_secs(self, start: float, end: float) -> list[float]:
        """Of tokens that came within ``[start, end]``, since the one before."""
        return [
            after - before
            for of_one in self.arrivals
            for before, after in itertools.pairwise(of_one)
            if start <= after <= end
        ]

    def check(self) -> None:
        """Raises EndpointError when one has ended."""
        for task in self.tasks:
            if task.done():
                why = task.result().error or "it has all its tokens: raise --output-tokens"
                raise EndpointError("stream", f"a stream ended early: {why}")


@dataclass
class Window:
    """What was seen beside one request, or beside none."""

    name: str
    itl_secs: list[float]
    ttft_secs: float = 0.0
    num_held_tokens: int = 0


def summary(windows: Sequence[Window]) -> dict[str, dict[str, Any]]:
    """By name, all windows of it together; milliseconds."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(window.name for window in windows):
        of_name = [window for window in windows if window.name == name]
        itl = np.array([secs for window in of_name for secs in window.itl_secs]) * 1e3
        p50, p99 = np.percentile(itl, (50, 99)).tolist() if itl.size else (0.0, 0.0)
        found[name] = {
            "requests": len(of_name),
            "tokens": int(itl.size),
            "itl_p50_ms": p50,
            "itl_p99_ms": p99,
            "itl_max_ms": float(itl.max(initial=0.0)),
            "ttft_ms": [window.ttft_secs * 1e3 for window in of_name],
            "held_tokens": [window.num_held_tokens for window in of_name],
        }
    return found


async def measure(pair: Pair, options: argparse.Namespace) -> list[Window]:
    """Raises EndpointError."""
    tokens = tuple(options.token_range)
    async with Client(f"{pair.router_url}/v1", TIMEOUT_SECS) as client:
        model = await client.first_model()
        running = Workload(model, options.input_tokens, options.output_tokens, tokens, seed=options.seed)
        streams = Streams([[] for _ in range(options.clients)])

        async def send(prompt: list[int], mode: str) -> Record:
            body = {"hisparse": mode == "hisparse", "prompt": prompt}
            asked = Workload(model, 0, ANSWER_TOKENS, tokens, extra_body=body)
            content = await asyncio.to_thread(asked.content, 0, 0, None, ANSWER_TOKENS)
            await asyncio.sleep(options.pause_secs)  # what was encoded is no part of what is measured
            record = await client.send(content)
            if record.error_class:
                raise EndpointError(record.error_class, record.error)
            return record

        drawn = np.random.default_rng(options.seed)
        for mode in MODES:  # kernels are compiled
            await send(drawn.integers(*tokens, options.input_tokens).tolist(), mode)
        try:
            for number, arrivals in enumerate(streams.arrivals):
                content = running.content(0, number, True, options.output_tokens)
                arrived = _Appends(arrivals)
                streams.tasks.append(asyncio.create_task(client.send(content, on_chunk=arrived)))
            while not all(streams.arrivals):
                streams.check()
                await asyncio.sleep(0.05)
            begun = time.perf_counter()
            await asyncio.sleep(options.alone_secs)
            streams.check()
            windows = [Window("alone", streams.itl_secs(begun, time.perf_counter()))]
            for number in range(2 * options.prefixes):
                mode, other = MODES[number % 2], MODES[1 - number % 2]
                prefix = drawn.integers(*tokens, options.prefix).tolist()
                for name, asked_mode in (
                    (f"cold, {mode}", mode),
                    (f"held, {mode}", mode),
                    (f"copied, {mode} to {other}", other),
                ):
                    new = drawn.integers(*tokens, NEW_TOKENS).tolist()
                    record = await send(prefix + new, asked_mode)
                    streams.check()
                    itl_secs = streams.itl_secs(record.started, record.ended)
                    windows.append(Window(name, itl_secs, record.ttft_secs, record.num_held_tokens))
            return windows
        finally:
            for task in streams.tasks:
                task.cancel()
            await asyncio.gather(*streams.tasks, return_exceptions=True)


class _Appends:
    """Called for each chunk: notes the time."""

    def __init__(self, arrivals: list[float]) -> None:
        self._arrivals = arrivals

    def __call__(self) -> None:
        self._arrivals.append(time.perf_counter())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--prefix", type=int, default=75_000, help="tokens")
    parser.add_argument("--prefixes", type=int, default=3, help="of each mode to begin with")
    parser.add_argument("--clients", type=int, default=16, help="streams that run all the time")
    parser.add_argument("--input-tokens", type=int, default=2048, help="of a stream")
    parser.add_argument("--output-tokens", type=int, default=32_768, help="of a stream at most")
    parser.add_argument("--alone-secs", type=float, default=5.0)
    parser.add_argument("--pause-secs", type=float, default=0.5, help="before each request")
    parser.add_argument("--seed", type=int, default=1)
    add_pair_options(parser)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(words)
    console = Console()
    longest = options.prefix + NEW_TOKENS + ANSWER_TOKENS
    num_streamed = options.clients * (options.input_tokens + options.output_tokens)
    pools = {"kv": 3 * longest, "host": 3 * longest + num_streamed, "device": 3 * longest + 65_536}
    with (
        options_of_pair(options, pools) as of_pair,
        running_pair(options.model_path, of_pair, console) as pair,
    ):
        windows = asyncio.run(measure(pair, options))
    figures = summary(windows)
    columns = ("requests", "tokens", "ITL p50", "p99", "max, ms", "TTFT ms", "held")
    table = Table(Column("beside", no_wrap=True), *columns)
    for name, found in figures.items():
        table.add_row(
            *(name, str(found["requests"]), str(found["tokens"])),
            *(f"{found[f'itl_{which}_ms']:.2f}" for which in ("p50", "p99", "max")),
            *(f"{np.median(found['ttft_ms']):.0f}", f"{np.median(found['held_tokens']):.0f}"),
        )
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "prefix_copies.json"
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    path.write_text(json.dumps({"facts": run_facts(), "settings": settings, "beside": figures}, indent=1))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
