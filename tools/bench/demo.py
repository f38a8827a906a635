"""The demo: starts a pair and a router on loopback, sends real requests, and prints a table of the outcomes.

    python -m tools.bench.demo --model-path tools/checkpoints/retrieval

Each prompt is a document of notes with questions about some of them. The status is 1 when a request fails or
is served in the wrong mode, when two modes disagree on the text of one prompt, when the retrieval model gives
a wrong answer, and when in one of the modes none of its drafts is accepted. A checkpoint without an MTP layer
is served without drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hisparse_pd.decode_node.drafting import full_buffer
from hisparse_pd.decode_node.sizing import MAX_TAIL_STEPS
from tools.bench.documents import RETRIEVAL_MODEL
from tools.bench.pair import METRICS_TIMEOUT_SECS, Pair, PairError, running_pair
from tools.bench.report import make_console, shown, table
from tools.bench.retrieval import Retrieval, judge, retrievals
from tools.bench.served import Served, served, tokens_per_step

REQUEST_TIMEOUT_SECS = 300.0
MAX_TOKENS = 64
"""Longest answer, in tokens; the retrieval model's are shorter."""
NUM_DRAFTS = 3
"""Drafts of a step; the retrieval model's MTP layer was trained for as many."""
SHORT_TAIL = MAX_TAIL_STEPS * (NUM_DRAFTS + 1)
"""Most missing tokens of a prompt that the decode node's steps compute."""

# Small enough that the retrieval model (index_topk 64, context 8192) shows everything: a long prompt does not
# fit its hot buffer, and just fits the device pool, where "auto" is dense while nobody else is there. The hot
# buffer is the smallest in which a step can verify three drafts: four selections, and their four positions.
PAIR_OPTIONS = (
    "--page-size 64 --chunked-prefill-size 512 --kv-pool-tokens 16384 --device-pool-tokens 6656 "
    f"--host-pool-tokens 32768 --num-threads 1 --device-buffer-size {full_buffer(NUM_DRAFTS, 64)}"
)
SHORT_TOKENS, LONG_TOKENS = 160, 5300


@dataclass(frozen=True)
class Case:
    """One request, and what must be true of its answer."""

    title: str
    path: str
    retrieval: Retrieval
    hisparse: bool | None
    """The request's flag; None leaves it out."""
    expected_mode: str
    overflows_hot_buffer: bool = False
    """Whether the prompt exceeds the hot buffer, so that there must be misses and evictions."""
    cached: bool = False
    """Whether an earlier case has left a prefix of the prompt in the cache."""

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"max_new_tokens": MAX_TOKENS, "temperature": 0}
        openais = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream_options": {"include_usage": True}}
        messages = [{"role": "user", "content": self.retrieval.content}]
        own_of_path: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": messages, **openais},
            "/v1/completions": {"prompt": f"{self.retrieval.content}\nAnswer:", **openais},
            "/generate": {"input_ids": self.retrieval.token_ids, "sampling_params": sampling},
        }
        flag = {} if self.hisparse is None else {"hisparse": self.hisparse}
        return own_of_path[self.path] | {"stream": True} | flag


def make_cases() -> list[Case]:
    short, long = (retrievals(length, 1)[0] for length in (SHORT_TOKENS, LONG_TOKENS))
    chat, plain = "/v1/chat/completions", "/v1/completions"
    return [  # each with its title, path, retrieval, hisparse flag and expected mode
        Case("short, hisparse: true", chat, short, True, "hisparse"),
        Case("short, hisparse: false", chat, short, False, "dense"),
        Case("short, no flag", chat, short, None, "dense"),
        Case("short, as plain text", plain, short, True, "hisparse"),
        Case("long, hisparse: true", chat, long, True, "hisparse", overflows_hot_buffer=True),
        Case("long, hisparse: false", chat, long, False, "dense", cached=True),
        Case("long, no flag", chat, long, None, "dense", cached=True),
        Case(
            "long, native /generate",
            "/generate",
            long,
            True,
            "hisparse",
            overflows_hot_buffer=True,
            cached=True,
        ),
    ]


@dataclass
class Outcome:
    """The outcome of one request. Times are in seconds; None is an unknown one."""

    case: Case
    text: str = ""
    served: Served = field(default_factory=Served)
    ttft_secs: float | None = None
    itl_secs: float | None = None
    """Mean time of an output token after the first one."""
    evictions: int = 0
    moved_bytes: int = 0
    """Bytes of KV that the prefill node has sent for it."""
    problems: list[str] = field(default_factory=list)

    @property
    def right(self) -> list[bool]:
        """Whether each of the prompt's answers is in the text."""
        return judge(self.text, self.case.retrieval.answers)

    @property
    def may_move_nothing(self) -> bool:
        """Whether so little of the prompt is missing that the decode node's steps may compute it."""
        return self.served.num_prompt_tokens - self.served.num_cached_tokens <= SHORT_TAIL

    def check(self, knows_the_task: bool) -> None:
        """Add to ``problems`` what is not as the case expects. ``knows_the_task``: answers must be right."""
        case, found = self.case, self.served
        is_dense = case.expected_mode == "dense"
        expectations = {  # by the problem that there is if one does not hold
            f"mode {found.mode}, expected {case.expected_mode}": found.mode == case.expected_mode,
            "no output tokens": found.num_output_tokens > 0,
            f"{self.right.count(False)} wrong answers": not knows_the_task or all(self.right),
            "no bytes were moved": self.moved_bytes > 0 or self.may_move_nothing,
            "nothing came from the prefix cache": not case.cached or found.num_cached_tokens > 0,
            "a dense request has hits or misses": not is_dense or not (found.hits or found.misses),
            "a hisparse request has no hits": is_dense or found.hits > 0,
            "no misses or evictions, although the prompt exceeds the hot buffer": (
                not case.overflows_hot_buffer or min(found.misses, self.evictions) > 0
            ),
        }
        self.problems += [problem for problem, holds in expectations.items() if not holds]


def stream(router_url: str, model: str, case: Case) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield new text of a streamed answer, and at its end its numbers. Raises httpx.HTTPError,
    RuntimeError."""
    body = {"model": model, **case.body} if case.path.startswith("/v1") else case.body
    url, so_far = f"{router_url}{case.path}", ""
    with httpx.stream("POST", url, json=body, timeout=REQUEST_TIMEOUT_SECS, trust_env=False) as response:
        if response.is_error:
            raise RuntimeError(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if case.path == "/generate":  # its events repeat the whole text so far
                yield event["text"].removeprefix(so_far), event["meta_info"]
                so_far = event["text"]
                continue
            for choice in event["choices"]:
                yield (choice["delta"].get("content") if "delta" in choice else choice["text"]) or "", None
            yield "", event.get("usage")


class Counters(NamedTuple):
    """Counters of a pair, or their growth."""

    hits: int
    moved_bytes: int
    evictions: int

    @classmethod
    def read(cls, pair: Pair) -> Counters:
        # Hits are read first: once they are complete, the counters read after them are complete, too.
        hits = pair.counter(pair.decode_url, "swap_in_hits_total")
        moved_bytes = pair.counter(pair.prefill_url, "kv_transfer_bytes_total")
        return cls(hits, moved_bytes, pair.counter(pair.decode_url, "swap_in_evictions_total"))


def run_case(pair: Pair, model: str, case: Case, knows_the_task: bool, console: Console) -> Outcome:
    """Send one request and show its text as it comes. Returns its outcome."""
    outcome = Outcome(case)
    notes, _, question = case.retrieval.content.rpartition("\n")
    about = f"  {notes[:60]}… ({len(notes):,} characters) {question}"
    console.print(Text.assemble((case.title, "bold"), (about, "dim")), soft_wrap=True)
    before = Counters.read(pair)
    started = last = time.perf_counter()
    try:
        for text, usage in stream(pair.router_url, model, case):
            if text:
                last = time.perf_counter()
                outcome.ttft_secs = outcome.ttft_secs or last - started
                outcome.text += text
                console.print(Text(text, "green"), end="", soft_wrap=True)
            if usage is not None:
                outcome.served = served(usage)
        console.print()
    except (httpx.HTTPError, RuntimeError, ValueError, KeyError) as error:
        console.print()
        outcome.problems.append(f"{type(error).__name__}: {error}")
        return outcome
    num_gaps = outcome.served.num_output_tokens - 1
    if outcome.ttft_secs is not None and num_gaps > 0:
        outcome.itl_secs = (last - started - outcome.ttft_secs) / num_gaps
    count_moves(outcome, pair, before)
    outcome.check(knows_the_task)
    return outcome


def count_moves(outcome: Outcome, pair: Pair, before: Counters) -> None:
    """Fill in what the counters have grown by since ``before``, once they are as far as the answer says."""
    deadline = time.monotonic() + METRICS_TIMEOUT_SECS
    while True:
        now = Counters.read(pair)
        outcome.moved_bytes = now.moved_bytes - before.moved_bytes
        outcome.evictions = now.evictions - before.evictions
        has_moved = outcome.moved_bytes > 0 or outcome.may_move_nothing
        has_hits = now.hits - before.hits >= outcome.served.hits
        if (has_moved and has_hits) or time.monotonic() > deadline:
            return
        time.sleep(0.1)  # the engines report twice a second


def compare_modes(outcomes: list[Outcome]) -> None:
    """Record a problem where an answer differs from the first one to the same prompt, in whatever mode."""
    first: dict[tuple[str, bool], Outcome] = {}
    for outcome in outcomes:
        # A prompt as plain text has other tokens than the same one in the chat template.
        key = outcome.case.retrieval.content, outcome.case.path == "/v1/completions"
        if outcome.text != (reference := first.setdefault(key, outcome)).text:
            outcome.problems.append(f"other text than {reference.case.title!r} for the same prompt")


def expect_drafts(outcomes: list[Outcome]) -> None:
    """Record a problem for each mode in which no draft was accepted.

    The node chooses by its clock which steps verify drafts, so that a single request may have none.
    """
    for mode in sorted({outcome.served.mode for outcome in outcomes if outcome.served.mode}):
        of_mode = [outcome for outcome in outcomes if outcome.served.mode == mode]
        if not any(outcome.served.num_accepted for outcome in of_mode):
            of_mode[-1].problems.append(f"no draft of a {mode} request was accepted")


def report(outcomes: list[Outcome]) -> Table:
    numbers = ("tok/step", "MB moved", "hits", "misses", "evictions", "right", "")
    columns = ("request", "mode", "prompt", "cached", "output", "TTFT ms", "ITL ms", *numbers)
    rows = []
    for outcome in outcomes:
        found = outcome.served
        a_step = tokens_per_step(found.num_output_tokens, found.num_accepted)
        millis = [secs and secs * 1e3 for secs in (outcome.ttft_secs, outcome.itl_secs)]
        counts = (found.num_prompt_tokens, found.num_cached_tokens, found.num_output_tokens)
        figures = (*counts, *millis, a_step, outcome.moved_bytes / 1e6, found.hits, found.misses)
        rows.append(
            [
                *(outcome.case.title, found.mode or "?"),
                *(shown(value) or "?" for value in (*figures, outcome.evictions)),
                f"{sum(outcome.right)}/{len(outcome.right)}",
                "[red]failed" if outcome.problems else "[green]ok",
            ]
        )
    return table("What happened", columns, rows, num_left=2)


def describe_drafts(pair: Pair) -> str:
    names = ("verifying_steps_total", "drafted_tokens_total", "accepted_draft_tokens_total")
    num_steps, num_drafted, num_accepted = (pair.counter(pair.decode_url, name) for name in names)
    return (
        f"{num_steps} steps verified drafts, up to {NUM_DRAFTS} as the node found fastest; "
        f"{num_accepted} of {num_drafted} were accepted: "
        f"{1 + num_accepted / max(1, num_steps):.2f} tokens a step of these."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a pair and a router, send requests, and stop.")
    parser.add_argument("--model-path", type=Path, required=True, help="checkpoint directory")
    model_path: Path = parser.parse_args().model_path.resolve()
    knows_the_task = model_path == RETRIEVAL_MODEL
    console = make_console()
    outcomes: list[Outcome] = []
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        num_drafts = NUM_DRAFTS if config.get("num_nextn_predict_layers") else 0
        options = f"{PAIR_OPTIONS} --speculative-num-steps {num_drafts}"
        with running_pair(model_path, options.split(), console) as pair:
            api = f"{pair.router_url}/v1"
            console.print(f"prefill node, decode node and router are healthy; the API is at {api}")
            console.print("Each prompt holds notes and questions about a few of them.\n")
            model = httpx.get(f"{api}/models", trust_env=False).raise_for_status().json()["data"][0]["id"]
            for case in make_cases():
                outcomes.append(run_case(pair, model, case, knows_the_task, console))
            about_drafts = describe_drafts(pair)
    except (PairError, OSError, ValueError, httpx.HTTPError) as error:
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
