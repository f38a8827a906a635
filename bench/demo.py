"""The demo: a pair and a router on loopback, real requests, and a table of what happened.

    python bench/demo.py --model-path .cache/tiny-v32

Exits with status 1 when a request fails, is served in another mode than it should be, or answers without its
hit and miss counts, and when two modes disagree on the tokens of one prompt.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

START_TIMEOUT_SECS = 180.0
REQUEST_TIMEOUT_SECS = 300.0
STOP_TIMEOUT_SECS = 90.0
METRICS_TIMEOUT_SECS = 5.0
MAX_TOKENS = 48
REPORT_WIDTH = 118
REPO = Path(__file__).resolve().parents[1]

# Small enough that the tiny model (index_topk 64, context 8192) shows everything: a long prompt does not fit
# its hot buffer, and fills so much of the device pool that "auto" prefers hisparse.
PAIR_OPTIONS = {
    "--page-size": 64,
    "--chunked-prefill-size": 512,
    "--kv-pool-tokens": 16384,
    "--device-buffer-size": 192,
    "--device-pool-tokens": 6656,
    "--host-pool-tokens": 32768,
    "--num-threads": 1,
}

SHORT_PROMPT = "A request's KV lands in host memory, and the few tokens it needs next come along. "
LONG_PROMPT = " ".join(
    f"Fact {n}: the indexer scored position {n * 7919 % 6007} highest and {n * 104729 % 5003} lowest."
    for n in range(80)
)


@dataclass(frozen=True)
class Case:
    """One request, and what must be true of its answer."""

    title: str
    api: str
    prompt: str
    hisparse: bool | None
    expected_mode: str
    overflows_hot_buffer: bool = False
    cached: bool = False


CASES = (
    Case("short, hisparse: true", "completions", SHORT_PROMPT, True, "hisparse"),
    Case("short, hisparse: false", "completions", SHORT_PROMPT, False, "dense"),
    Case("short, no flag", "completions", SHORT_PROMPT, None, "dense"),
    Case("chat, hisparse: true", "chat", "What stays on the GPU?", True, "hisparse"),
    Case("long, hisparse: true", "completions", LONG_PROMPT, True, "hisparse", overflows_hot_buffer=True),
    Case("long, hisparse: false", "completions", LONG_PROMPT, False, "dense", cached=True),
    Case(
        "long, no flag", "completions", LONG_PROMPT, None, "hisparse", overflows_hot_buffer=True, cached=True
    ),
    Case("long, native /generate", "generate", LONG_PROMPT, True, "hisparse", True, cached=True),
)


@dataclass
class Outcome:
    """What one request gave. Times are in seconds, ``None`` stands for a value that the answer lacked."""

    case: Case
    text: str = ""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    ttft_secs: float | None = None
    itl_secs: float | None = None
    mode: str | None = None
    hits: int | None = None
    misses: int | None = None
    evictions: int = 0
    moved_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fills ``problems``."""
        case = self.case
        expectations = {
            f"mode {self.mode}, expected {case.expected_mode}": self.mode == case.expected_mode,
            f"{self.num_output_tokens} output tokens, expected {MAX_TOKENS}": self.num_output_tokens
            == MAX_TOKENS,
            "no hits and misses in the answer": self.hits is not None and self.misses is not None,
            "no bytes were moved": self.moved_bytes > 0,
            "nothing came from the prefix cache": not case.cached or bool(self.num_cached_tokens),
        }
        if case.expected_mode == "dense":
            expectations["a dense request has hits or misses"] = not (self.hits or self.misses)
        else:
            expectations["a hisparse request has no hits"] = bool(self.hits)
        if case.overflows_hot_buffer:
            expectations["no misses, although the prompt exceeds the hot buffer"] = bool(self.misses)
            expectations["no evictions, although the prompt exceeds the hot buffer"] = self.evictions > 0
        self.problems += [problem for problem, holds in expectations.items() if not holds]


# --- the pair ----------------------------------------------------------------------------------------


@dataclass
class Pair:
    """The running services."""

    router_url: str
    prefill_url: str
    decode_url: str

    def counter(self, url: str, name: str) -> int:
        """The sum of a counter of a node over its labels."""
        text = httpx.get(f"{url}/metrics", timeout=METRICS_TIMEOUT_SECS, trust_env=False).text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return int(sum(sample.value for sample in samples if sample.name == f"hisparse_pd:{name}"))


class DemoError(Exception):
    """The pair did not start or did not stop."""


@contextmanager
def running_pair(model_path: Path, console: Console) -> Iterator[Pair]:
    """Starts prefill node, decode node and router through the command line. Raises DemoError."""
    router, prefill, decode, bootstrap = _free_ports(4)
    ports = {
        "--port": router,
        "--prefill-port": prefill,
        "--decode-port": decode,
        "--bootstrap-port": bootstrap,
    }
    options = [str(word) for option in {**PAIR_OPTIONS, **ports}.items() for word in option]
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-demo-") as directory:
        log_path = Path(directory) / "pair.log"
        with log_path.open("wb") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "hisparse_pd", "pair", "--model-path", str(model_path), *options],
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                process_group=0,  # Ctrl-C reaches the demo, which stops the pair
            )
        try:
            pair = Pair(*(f"http://127.0.0.1:{port}" for port in (router, prefill, decode)))
            _wait_healthy(process, pair, console)
            yield pair
        except DemoError:
            console.print(log_path.read_text(errors="replace")[-6000:], markup=False, highlight=False)
            raise
        finally:
            status = _stop(process)
        if status != 0:
            console.print(log_path.read_text(errors="replace")[-6000:], markup=False, highlight=False)
            raise DemoError(f"the pair stopped with status {status}")


def _wait_healthy(process: subprocess.Popen[bytes], pair: Pair, console: Console) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECS
    waiting = {"prefill node": pair.prefill_url, "decode node": pair.decode_url, "router": pair.router_url}
    with console.status("") as status:
        while waiting:
            status.update(f"waiting for {', '.join(waiting)}")
            waiting = {name: url for name, url in waiting.items() if not _is_healthy(url)}
            if process.poll() is not None:
                raise DemoError(f"the pair exited with status {process.returncode} while it started")
            if time.monotonic() > deadline:
                raise DemoError(f"not healthy after {START_TIMEOUT_SECS:g} s: {', '.join(waiting)}")
            time.sleep(0.1)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(STOP_TIMEOUT_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


# --- requests ----------------------------------------------------------------------------------------


@dataclass
class Piece:
    """A piece of a streamed answer: new text, or the closing numbers."""

    text: str = ""
    usage: dict[str, Any] | None = None


def stream_openai(client: openai.OpenAI, model: str, case: Case) -> Iterator[Piece]:
    """A request through the official client."""
    extra: dict[str, Any] = {"ignore_eos": True}
    if case.hisparse is not None:
        extra["hisparse"] = case.hisparse
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": extra,
    }
    if case.api == "chat":
        chunks = client.chat.completions.create(messages=[{"role": "user", "content": case.prompt}], **common)
    else:
        chunks = client.completions.create(prompt=case.prompt, **common)
    for chunk in chunks:
        for choice in chunk.choices:
            yield Piece((choice.delta.content if case.api == "chat" else choice.text) or "")
        if chunk.usage is not None:
            usage = chunk.usage.model_dump()
            details = usage.get("prompt_tokens_details") or {}
            yield Piece(usage={**usage, "cached_tokens": details.get("cached_tokens")})


def stream_generate(router_url: str, case: Case) -> Iterator[Piece]:
    """A request to the native endpoint, whose events repeat the whole text so far."""
    body = {
        "text": case.prompt,
        "sampling_params": {"max_new_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    if case.hisparse is not None:
        body["hisparse"] = case.hisparse
    shown = ""
    with httpx.stream(
        "POST", f"{router_url}/generate", json=body, timeout=REQUEST_TIMEOUT_SECS, trust_env=False
    ) as response:
        if response.is_error:
            raise RuntimeError(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield Piece(event["text"].removeprefix(shown), usage=event["meta_info"])
            shown = event["text"]


def run_case(pair: Pair, client: openai.OpenAI, model: str, case: Case, console: Console) -> Outcome:
    """Send one request, show its text as it comes, and collect its numbers."""
    outcome = Outcome(case)
    shown_prompt = case.prompt if len(case.prompt) < 70 else f"{case.prompt[:67]}…"
    console.print(Text.assemble((case.title, "bold"), ("  " + shown_prompt, "dim")))
    moved_before = pair.counter(pair.prefill_url, "kv_transfer_bytes_total")
    evictions_before = pair.counter(pair.decode_url, "swap_in_evictions_total")
    hits_before = pair.counter(pair.decode_url, "swap_in_hits_total")
    started = last = time.perf_counter()
    try:
        pieces = (
            stream_generate(pair.router_url, case)
            if case.api == "generate"
            else stream_openai(client, model, case)
        )
        for piece in pieces:
            if piece.text:
                last = time.perf_counter()
                outcome.ttft_secs = outcome.ttft_secs or last - started
                outcome.text += piece.text
                console.print(Text(piece.text, "green"), end="", soft_wrap=True)
            if piece.usage is not None:
                _take_usage(outcome, piece.usage)
        console.print()
    except (openai.OpenAIError, httpx.HTTPError, RuntimeError, ValueError, KeyError) as error:
        console.print()
        outcome.problems.append(f"{type(error).__name__}: {error}")
        return outcome
    num_gaps = (outcome.num_output_tokens or 1) - 1
    if outcome.ttft_secs is not None and num_gaps > 0:
        outcome.itl_secs = (last - started - outcome.ttft_secs) / num_gaps

    def counters_caught_up() -> bool:
        outcome.moved_bytes = pair.counter(pair.prefill_url, "kv_transfer_bytes_total") - moved_before
        outcome.evictions = pair.counter(pair.decode_url, "swap_in_evictions_total") - evictions_before
        hits = pair.counter(pair.decode_url, "swap_in_hits_total") - hits_before
        return outcome.moved_bytes > 0 and hits >= (outcome.hits or 0)

    deadline = time.monotonic() + METRICS_TIMEOUT_SECS
    while not counters_caught_up() and time.monotonic() < deadline:
        time.sleep(0.1)  # the engines report twice a second
    outcome.check()
    return outcome


def _take_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    outcome.num_prompt_tokens = usage.get("prompt_tokens")
    outcome.num_output_tokens = usage.get("completion_tokens")
    outcome.num_cached_tokens = usage.get("cached_tokens")
    hisparse = usage.get("hisparse") or {}
    outcome.mode, outcome.hits, outcome.misses = (hisparse.get(name) for name in ("mode", "hits", "misses"))


def compare_modes(outcomes: list[Outcome]) -> None:
    """Greedy tokens must not depend on the mode: every other answer to a prompt must equal the first one."""
    first: dict[tuple[str, bool], Outcome] = {}
    for outcome in outcomes:
        reference = first.setdefault((outcome.case.prompt, outcome.case.api == "chat"), outcome)
        if outcome.text != reference.text:
            outcome.problems.append(f"other text than {reference.case.title!r} for the same prompt")


# --- report ------------------------------------------------------------------------------------------


def report(outcomes: list[Outcome]) -> Table:
    table = Table(title="What happened", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True)
    for heading in ("prompt", "cached", "output", "TTFT ms", "ITL ms"):
        table.add_column(heading, justify="right")
    table.add_column("mode")
    for heading in ("bytes moved", "hits", "misses", "evictions"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for outcome in outcomes:
        table.add_row(
            outcome.case.title,
            *(_number(value) for value in (outcome.num_prompt_tokens, outcome.num_cached_tokens)),
            _number(outcome.num_output_tokens),
            _millis(outcome.ttft_secs),
            _millis(outcome.itl_secs),
            outcome.mode or "?",
            *(_number(value) for value in (outcome.moved_bytes, outcome.hits, outcome.misses)),
            _number(outcome.evictions),
            "[red]failed" if outcome.problems else "[green]ok",
        )
    return table


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _millis(secs: float | None) -> str:
    return "?" if secs is None else f"{secs * 1000:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a pair and a router, send requests, and stop.")
    parser.add_argument("--model-path", type=Path, required=True, help="checkpoint directory")
    model_path: Path = parser.parse_args().model_path
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    outcomes: list[Outcome] = []
    try:
        with running_pair(model_path.resolve(), console) as pair:
            console.print(
                f"prefill node, decode node and router are healthy; the API is at {pair.router_url}/v1"
            )
            console.print(
                "The tiny model has made-up weights: its text means nothing, its tokens are exact.\n"
            )
            with openai.OpenAI(
                base_url=f"{pair.router_url}/v1",
                api_key="none",
                timeout=REQUEST_TIMEOUT_SECS,
                max_retries=0,
                http_client=openai.DefaultHttpxClient(trust_env=False),
            ) as client:
                model = client.models.list().data[0].id
                for case in CASES:
                    outcomes.append(run_case(pair, client, model, case, console))
    except DemoError as error:
        console.print(f"[red]{error}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    compare_modes(outcomes)
    console.print()
    console.print(report(outcomes))
    for outcome in outcomes:
        for problem in outcome.problems:
            console.print(Text(f"{outcome.case.title}: {problem}", "red"))
    failed = any(outcome.problems for outcome in outcomes)
    console.print(
        "[red]The demo failed." if failed else "All requests came back right, and everything stopped."
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
