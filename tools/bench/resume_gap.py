"""Measures how long streams stand still when their decode node is killed or drained.

    python -m tools.bench.resume_gap --model-path DIR [--device cuda:0 cuda:0 cuda:1] [--streams 16]
        [--prompt-tokens 32768] [--rounds 3] [--prefill-options="..."] [--decode-options="..."]

One prefill node, two decode nodes and a router run on this machine; nodes may share a device. The streams
first run undisturbed, three times. In each further round the same ones are asked for again, and once all are
under way, one decode node gets SIGKILL or SIGTERM, in turn, and is started again for the next round. A gap is
the longest time between two pieces of a stream of which the second came after the signal; the streams of the
other node show how much of it is due to load. Answers are compared with the undisturbed ones.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np

from hisparse_pd.base.ports import free_port
from hisparse_pd.router.nodes import NodeKind
from tools.bench.facts import OUT, ROOT
from tools.bench.pair import is_healthy, wait_healthy
from tools.bench.report import make_console, table_of, write_report

START_TIMEOUT_SECS = 300.0
REQUEST_TIMEOUT_SECS = 300.0
MIN_PIECES = 48
"""Pieces that every stream has got before the signal is sent."""


@dataclass
class Process:
    """A node or the router."""

    arguments: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "hisparse_pd", *self.arguments, f"--port={self.port}"]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def wait_healthy(self) -> None:
        process = self.process
        assert process is not None
        if not wait_healthy(self.url, START_TIMEOUT_SECS, lambda: process.poll() is not None):
            tail = self.log.read_text(errors="replace")[-6000:]
            raise SystemExit(f"{self.arguments[0]} does not serve within {START_TIMEOUT_SECS:g} s\n{tail}")

    def end(self, number: signal.Signals) -> None:
        """Send SIGKILL to all its processes, or another signal to the first one, and wait until it has
        ended."""
        assert self.process is not None
        if self.process.poll() is None:
            (os.killpg if number is signal.SIGKILL else os.kill)(self.process.pid, number)
        self.process.wait()


@dataclass
class Stream:
    """One streamed answer."""

    arrivals: list[float] = field(default_factory=list)
    """Arrival of each piece with tokens, in seconds of the monotonic clock."""
    node: str = ""
    """URL of the decode node that began the stream."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream(
                "POST", url, json=body, timeout=REQUEST_TIMEOUT_SECS, trust_env=False
            ) as answer:
                self.node = answer.headers.get(NodeKind.DECODE.header, "")
                for line in answer.iter_lines():
                    self._note(line, time.monotonic())
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _note(self, line: str, now: float) -> None:
        if not line.startswith("data: {"):
            return
        event = msgspec.json.decode(line.removeprefix("data: "))
        if "choices" not in event:
            self.error = line
        elif event["choices"]:
            self.arrivals.append(now)
            self.text += event["choices"][0]["text"]
        self.usage = event.get("usage") or self.usage

    def gap(self, since: float) -> float:
        """Return the gap in seconds, or NaN if the stream was over by ``since``."""
        behind = [at for at in self.arrivals if at > since]
        before = [at for at in self.arrivals if at <= since][-1:]
        return float(np.diff([*before, *behind]).max()) if before and behind else float("nan")


def ask(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[list[Stream], list[threading.Thread]]:
    streams = [Stream() for _ in bodies]
    threads = [
        threading.Thread(target=stream.read, args=(f"{url}/v1/completions", body), daemon=True)
        for stream, body in zip(streams, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    return streams, threads


@contextmanager
def running(options: argparse.Namespace, directory: Path) -> Iterator[tuple[list[Process], Process]]:
    """Start everything. Yields the decode nodes and the router."""
    bootstrap = free_port()
    node = ["--model-path", str(options.model_path), "--served-model-name", "model", "--device"]
    devices = [*options.device, *options.device[-1:] * 2]

    def process(kind: str, name: str, *arguments: str) -> Process:
        return Process([kind, *arguments], free_port(), directory / f"{name}.log")

    given = shlex.split(options.prefill_options)
    prefill = process("prefill", "prefill", *node, devices[0], "--bootstrap-port", str(bootstrap), *given)
    decode = [
        process("decode", f"decode-{n}", *node, devices[1 + n], *shlex.split(options.decode_options))
        for n in range(2)
    ]
    urls = [
        "--prefill",
        prefill.url,
        str(bootstrap),
        *(word for each in decode for word in ("--decode", each.url)),
    ]
    router = process("router", "router", *urls)
    with ExitStack() as stack:
        for each in (prefill, *decode, router):
            each.start()
            stack.callback(each.end, signal.SIGKILL)
        for each in (prefill, *decode, router):
            each.wait_healthy()
        yield decode, router


class Round(NamedTuple):
    """A round of streams in which the first decode node got a signal."""

    streams: list[Stream]
    signalled_at: float
    """When the node got the signal, in seconds of the monotonic clock."""
    left_after_secs: float
    """How long the node took to end."""


def one_round(
    decode: Sequence[Process], router: Process, bodies: Sequence[dict[str, Any]], number: signal.Signals
) -> Round:
    """Start all streams, and end the first decode node with a signal once all are under way."""
    streams, threads = ask(router.url, bodies)
    while any(len(stream.arrivals) < MIN_PIECES and not stream.error for stream in streams):
        time.sleep(0.01)
    signalled_at = time.monotonic()
    decode[0].end(number)
    left_after_secs = time.monotonic() - signalled_at
    for thread in threads:
        thread.join()
    return Round(streams, signalled_at, left_after_secs)


def make_bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the bodies of the streams' requests, with different prompts of random bytes."""
    drawn = random.Random(5)
    return [
        {
            "model": "model",
            "prompt": [drawn.randint(32, 126) for _ in range(options.prompt_tokens)],
            "max_tokens": options.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "hisparse": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(options.streams)
    ]


def uses_all_nodes(router: Process) -> bool:
    """Return whether the router finds all nodes healthy."""
    nodes = httpx.get(f"{router.url}/health", timeout=5, trust_env=False).json()["nodes"]
    return all(node["healthy"] for node in nodes)


def measure(
    options: argparse.Namespace, decode: Sequence[Process], router: Process
) -> Iterator[dict[str, Any]]:
    """Yield a row for each round."""
    bodies = make_bodies(options)
    passes: list[list[Stream]] = []
    for _ in range(3):  # the first run compiles kernels and fills the prefix cache
        streams, threads = ask(router.url, bodies)
        for thread in threads:
            thread.join()
        passes.append(streams)
    undisturbed = passes[-1]
    if errors := [stream.error for stream in undisturbed if stream.error]:
        raise SystemExit(f"{len(errors)} undisturbed streams failed: {errors[0]}")
    waits = np.concatenate([np.diff(stream.arrivals) for stream in undisturbed])
    for number in (signal.SIGKILL, signal.SIGTERM) * options.rounds:
        if not is_healthy(decode[0].url):
            decode[0].start()
            decode[0].wait_healthy()
            while not uses_all_nodes(router):
                time.sleep(0.1)
        streams, signalled_at, left_after_secs = one_round(decode, router, bodies, number)
        ended_gaps_ms: list[float] = []  # streams of the node that ended
        other_gaps_ms: list[float] = []
        for stream in streams:
            gaps_ms = ended_gaps_ms if stream.node == decode[0].url else other_gaps_ms
            gaps_ms.append(stream.gap(signalled_at) * 1e3)
        yield {
            "signal": number.name,
            "gaps_ms": ended_gaps_ms,
            "gaps_of_others_ms": other_gaps_ms,
            "left_after_secs": left_after_secs,
            "wait_ms": float(np.median(waits) * 1e3),
            "resumes": [stream.usage.get("hisparse", {}).get("resumes") for stream in streams],
            "equal": num_equal(streams, undisturbed),
            "undisturbed_equal": num_equal(*passes[1:]),  # more can hardly be expected of the round's streams
            "errors": [stream.error for stream in streams if stream.error],
        }


def num_equal(streams: Sequence[Stream], others: Sequence[Stream]) -> int:
    return sum(a.text == b.text for a, b in zip(streams, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument(
        "--device",
        nargs="+",
        default=["cpu"],
        help="devices of the prefill node, the decode node that ends, the one that stays; the last repeats",
    )
    parser.add_argument(
        "--streams", type=int, default=16, help="number of streams, half of them at each decode node"
    )
    parser.add_argument("--prompt-tokens", type=int, default=32768)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="rounds with each signal")
    parser.add_argument(
        "--prefill-options", default="", help="further options of the prefill node, as in a shell"
    )
    parser.add_argument(
        "--decode-options", default="", help="further options of the decode nodes, as in a shell"
    )
    parser.add_argument("--out", type=Path, default=OUT / "resume_gap")
    options = parser.parse_args()
    console, rows = make_console(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as directory, running(options, Path(directory)) as (decode, router):
        for row in measure(options, decode, router):
            rows.append(row)
            console.print(summary(row), highlight=False)
            write_report(options.out, {"options": vars(options), "rows": rows})
    console.print(table_of("", list(map(summary, rows))))


def summary(row: dict[str, Any]) -> dict[str, Any]:
    gaps, others = (np.array(row[name]) for name in ("gaps_ms", "gaps_of_others_ms"))
    return {
        "signal": row["signal"],
        "streams of the node": len(gaps),
        "gap p50, ms": float(np.nanmedian(gaps)),
        "max, ms": float(np.nanmax(gaps)),
        "of others, max, ms": float(np.nanmax(others)),
        "undisturbed, ms": row["wait_ms"],
        "left after, s": row["left_after_secs"],
        "equal": f"{row['equal']} of {len(gaps) + len(others)}",
        "equal when undisturbed": row["undisturbed_equal"],
        "errors": len(row["errors"]),
    }


if __name__ == "__main__":
    main()
