"""The demo: a pair and a router on loopback, real requests, and a table of what happened.

    python -m tools.bench.demo --model-path tools/checkpoints/retrieval

Each prompt is a document of notes with questions about some of them. Exits with status 1 when a request
fails, is served in another mode than it should be, or answers without its hit and miss counts, when two modes
disagree on the text of one prompt, and when the retrieval model gives a wrong answer or, in one of the modes,
no request of it has a draft accepted. A checkpoint without an MTP layer is served without drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode_node.drafting import full_buffer
from hisparse_pd.bench.pair import METRICS_TIMEOUT_SECS, Pair, PairError, running_pair
from hisparse_pd.bench.report import make_console, table
from tools.bench.drafts import TRAINED_DRAFTS, drafts_of, has_draft_layer, tokens_per_step
from tools.bench.retrieval import RETRIEVAL_MODEL, Retrieval, judge, retrievals

REQUEST_TIMEOUT_SECS = 300.0
MAX_TOKENS = 64

# Small enough that the retrieval model (index_topk 64, context 8192) shows everything: a long prompt does not
# fit its hot buffer, and fills so much of the device pool that "auto" prefers hisparse. The hot buffer is the
# smallest in which a step verifies three drafts: four positions, each with its own selection, and themselves.
PAIR_OPTIONS = {
    "--page-size": 64,
    "--chunked-prefill-size": 512,
    "--kv-pool-tokens": 16384,
    "--device-buffer-size": full_buffer(TRAINED_DRAFTS, 64),
    "--device-pool-tokens": 6656,
    "--host-pool-tokens": 32768,
    "--num-threads": 1,
}
SHORT_TOKENS, LONG_TOKENS = 160, 5300


@dataclass(frozen=True)
class Case:
    """One request, and what must be true of its answer."""

    title: str
    api: str
    retrieval: Retrieval
    hisparse: bool | None
    expected_mode: str
    overflows_hot_buffer: bool = False
    cached: bool = False

    @property
    def document(self) -> str:
        content: str = self.retrieval.task.messages[0]["content"]
        return content


def make_cases() -> list[Case]:
    short, long = (retrievals(length, 1)[0] for length in (SHORT_TOKENS, LONG_TOKENS))
    return [
        Case("short, hisparse: true", "chat", short, True, "hisparse"),
        Case("short, hisparse: false", "chat", short, False, "dense"),
        Case("short, no flag", "chat", short, None, "dense"),
        Case("short, as plain text", "completions", short, True, "hisparse"),
        Case("long, hisparse: true", "chat", long, True, "hisparse", overflows_hot_buffer=True),
        Case("long, hisparse: false", "chat", long, False, "dense", cached=True),
        Case("long, no flag", "chat", long, None, "hisparse", overflows_hot_buffer=True, cached=True),
        Case("long, native /generate", "generate", long, True, "hisparse", True, cached=True),
    ]


@dataclass
class Outcome:
    """What one request gave. Times are in seconds, ``None`` stands for a value that the answer lacked."""

    case: Case
    text: str = ""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    ttft_secs: float | None = None
    itl_secs: float | None = None
    mode: str | None = None
    hits: int | None = None
    misses: int | None = None
    evictions: int = 0
    moved_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float | None:
        return tokens_per_step(self.num_output_tokens or 0, self.num_accepted)

    @property
    def right(self) -> list[bool]:
        return judge(self.text, self.case.retrieval.task.answers)

    def check(self, knows_the_task: bool) -> None:
        """Fills ``problems``."""
        case = self.case
        expectations = {
            f"mode {self.mode}, expected {case.expected_mode}": self.mode == case.expected_mode,
            "no output tokens": bool(self.num_output_tokens),
            f"{self.right.count(False)} wrong answers": not knows_the_task or all(self.right),
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


# --- requests ----------------------------------------------------------------------------------------


@dataclass
class Piece:
    """A piece of a streamed answer: new text, or the closing numbers."""

    text: str = ""
    usage: dict[str, Any] | None = None


def stream_openai(client: openai.OpenAI, model: str, case: Case) -> Iterator[Piece]:
    """A request through the official client."""
    extra = {} if case.hisparse is None else {"hisparse": case.hisparse}
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": extra,
    }
    if case.api == "chat":
        chunks = client.chat.completions.create(
            messages=[{"role": "user", "content": case.document}], **common
        )
    else:
        chunks = client.completions.create(prompt=f"{case.document}\nAnswer:", **common)
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
        "input_ids": list(case.retrieval.token_ids),
        "sampling_params": {"max_new_tokens": MAX_TOKENS, "temperature": 0},
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


def run_case(
    pair: Pair, client: openai.OpenAI, model: str, case: Case, knows_the_task: bool, console: Console
) -> Outcome:
    """Send one request, show its text as it comes, and collect its numbers."""
    outcome = Outcome(case)
    notes, _, question = case.document.rpartition("\n")
    shown = f"  {notes[:60]}… ({len(notes):,} characters) {question}"
    console.print(Text.assemble((case.title, "bold"), (shown, "dim")), soft_wrap=True)
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
        # Hits first: what is read once they are complete is complete too.
        hits = pair.counter(pair.decode_url, "swap_in_hits_total") - hits_before
        outcome.moved_bytes = pair.counter(pair.prefill_url, "kv_transfer_bytes_total") - moved_before
        outcome.evictions = pair.counter(pair.decode_url, "swap_in_evictions_total") - evictions_before
        return outcome.moved_bytes > 0 and hits >= (outcome.hits or 0)

    deadline = time.monotonic() + METRICS_TIMEOUT_SECS
    while not counters_caught_up() and time.monotonic() < deadline:
        time.sleep(0.1)  # the engines report twice a second
    outcome.check(knows_the_task)
    return outcome


def _take_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    outcome.num_prompt_tokens = usage.get("prompt_tokens")
    outcome.num_output_tokens = usage.get("completion_tokens")
    outcome.num_cached_tokens = usage.get("cached_tokens")
    outcome.num_drafted, outcome.num_accepted = drafts_of(usage)
    hisparse = usage.get("hisparse") or {}
    outcome.mode, outcome.hits, outcome.misses = (hisparse.get(name) for name in ("mode", "hits", "misses"))


def compare_modes(outcomes: list[Outcome]) -> None:
    """Greedy tokens must not depend on the mode: every other answer to a prompt must equal the first one."""
    first: dict[tuple[str, bool], Outcome] = {}
    for outcome in outcomes:
        is_plain = outcome.case.api == "completions"
        reference = first.setdefault((outcome.case.document, is_plain), outcome)
        if outcome.text != reference.text:
            outcome.problems.append(f"other text than {reference.case.title!r} for the same prompt")


def expect_drafts(outcomes: list[Outcome]) -> None:
    """Which steps verify drafts is the node's choice, by its clock: each mode has some, not each request."""
    for mode in sorted({outcome.mode for outcome in outcomes if outcome.mode}):
        of_mode = [outcome for outcome in outcomes if outcome.mode == mode]
        if not any(outcome.num_accepted for outcome in of_mode):
            of_mode[-1].problems.append(f"no draft of a {mode} request was accepted")


# --- report ------------------------------------------------------------------------------------------


def report(outcomes: list[Outcome]) -> Table:
    numbers = ("tok/step", "MB moved", "hits", "misses", "evictions", "right", "")
    columns = ("request", "mode", "prompt", "cached", "output", "TTFT ms", "ITL ms", *numbers)
    rows = [
        [
            outcome.case.title,
            outcome.mode or "?",
            *map(_number, (outcome.num_prompt_tokens, outcome.num_cached_tokens, outcome.num_output_tokens)),
            _millis(outcome.ttft_secs),
            _millis(outcome.itl_secs),
            "?" if outcome.tokens_per_step is None else f"{outcome.tokens_per_step:.2f}",
            f"{outcome.moved_bytes / 1e6:.1f}",
            *map(_number, (outcome.hits, outcome.misses, outcome.evictions)),
            f"{sum(outcome.right)}/{len(outcome.right)}",
            "[red]failed" if outcome.problems else "[green]ok",
        ]
        for outcome in outcomes
    ]
    return table("What happened", columns, rows, num_left=2)


def tell_of_drafts(pair: Pair) -> str:
    names = ("verifying_steps_total", "drafted_tokens_total", "accepted_draft_tokens_total")
    num_steps, num_drafted, num_accepted = (pair.counter(pair.decode_url, name) for name in names)
    return (
        f"{num_steps} steps verified drafts, up to {TRAINED_DRAFTS} as the node found fastest; "
        f"{num_accepted} of {num_drafted} were accepted: "
        f"{1 + num_accepted / max(1, num_steps):.2f} tokens a step of these."
    )


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _millis(secs: float | None) -> str:
    return "?" if secs is None else f"{secs * 1000:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a pair and a router, send requests, and stop.")
    parser.add_argument("--model-path", type=Path, required=True, help="checkpoint directory")
    model_path: Path = parser.parse_args().model_path.resolve()
    knows_the_task = model_path == RETRIEVAL_MODEL
    console = make_console()
    outcomes: list[Outcome] = []
    try:
        num_drafts = TRAINED_DRAFTS if has_draft_layer(model_path) else 0
        options = {**PAIR_OPTIONS, "--speculative-num-steps": num_drafts}
        with running_pair(model_path, options, console) as pair:
            console.print(
                f"prefill node, decode node and router are healthy; the API is at {pair.router_url}/v1"
            )
            console.print("Each prompt holds notes and questions about a few of them.\n")
            with openai.OpenAI(
                base_url=f"{pair.router_url}/v1",
                api_key="none",
                timeout=REQUEST_TIMEOUT_SECS,
                max_retries=0,
                http_client=openai.DefaultHttpxClient(trust_env=False),
            ) as client:
                model = client.models.list().data[0].id
                for case in make_cases():
                    outcomes.append(run_case(pair, client, model, case, knows_the_task, console))
            about_drafts = tell_of_drafts(pair)
    except (PairError, OSError, ValueError) as error:
        console.print(f"[red]{error}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    compare_modes(outcomes)
    if knows_the_task:
        expect_drafts(outcomes)
    console.print()
    console.print(report(outcomes))
    if num_drafts:
        console.print(about_drafts)
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
