"""Compares answers to the same requests alone and beside others, dense and hisparse.

    python -m tools.bench.same_tokens --url http://127.0.0.1:8000/v1 [--requests 24] [--prompt-tokens 4096] \\
        [--node-urls http://127.0.0.1:8001 http://127.0.0.1:8002]

Asks a running service for greedy answers with logprobs. Each row of the table compares two passes over the
same prompts: how many answers have equal tokens, and equal tokens and logprobs to the last bit, and how many
of an answer's tokens are equal before the first that is not, on average. From the second pass on, the KV of
all prompts but for their last tokens comes from the cache. "Going on" asks for the second half of an answer
with its first half as part of the prompt.

With ``--node-urls``, the prefill and decode nodes' own, there is one more row: a next turn, whose prompt ends
with an answer and new tokens. In its first pass the prefill node reads the answer's KV, which steps computed,
from the decode node; in its second pass nothing is cached or held, and all of it is computed as a prompt.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tools.bench.facts import OUT
from tools.bench.report import make_console, table_of, write_report
from tools.bench.serve import add_token_range

REQUEST_TIMEOUT_SECS = 300.0
LENGTH_STEP = 37
"""Tokens by which each prompt is longer than the one before, so that prompts end anywhere in a page."""
NEXT_TOKENS = 20
"""New tokens of a next turn."""


class Answer(NamedTuple):
    """An answer, token by token, and how many tokens of its prompt were read from the decode node."""

    token_ids: list[int]
    logprobs: list[float]
    num_read: int = 0


def ask(url: str, output_tokens: int, hisparse: bool, prompt: Sequence[int]) -> Answer:
    """Return the greedy answer of exactly ``output_tokens`` to a prompt."""
    body = {
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "hisparse": hisparse,
    }
    response = httpx.post(f"{url}/completions", json=body, timeout=REQUEST_TIMEOUT_SECS)
    response.raise_for_status()
    answer = response.json()
    (choice,) = answer["choices"]
    details = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], details["decode"])


def num_leading(some: Answer, other: Answer) -> int:
    """Return how many tokens of two answers are equal before the first that is not."""
    pairs = zip(some.token_ids, other.token_ids, strict=True)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def compare(question: str, some: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """Return a row of the table: how many answers of two passes are equal, and how many tokens of the prompts
    of the first pass were read from the decode node."""
    pairs = list(zip(some, others, strict=True))
    return {
        "question": question,
        "answers": len(pairs),
        "equal tokens": sum(a.token_ids == b.token_ids for a, b in pairs),
        "equal logprobs": sum(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs),
        "leading equal tokens": sum(num_leading(a, b) for a, b in pairs) / len(pairs),
        "tokens read": sum(a.num_read for a in some),
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Make all passes over the same prompts. Returns the rows of the table."""
    draw = random.Random(options.seed)

    def draw_tokens(num_tokens: int) -> list[int]:
        return [draw.randrange(*options.token_range) for _ in range(num_tokens)]

    prompts = [draw_tokens(options.prompt_tokens + LENGTH_STEP * n) for n in range(options.requests)]
    nexts = [draw_tokens(NEXT_TOKENS) for _ in prompts]

    def one_by_one(hisparse: bool) -> list[Answer]:
        return [ask(options.url, options.output_tokens, hisparse, prompt) for prompt in prompts]

    def at_once(hisparse: bool) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as clients:
            return list(clients.map(partial(ask, options.url, options.output_tokens, hisparse), prompts))

    half = options.output_tokens // 2

    def going_on(answers: Sequence[Answer], hisparse: bool) -> list[Answer]:
        return [
            ask(options.url, options.output_tokens - half, hisparse, [*prompt, *answer.token_ids[:half]])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def second_halves(answers: Sequence[Answer]) -> list[Answer]:
        return [Answer(answer.token_ids[half:], answer.logprobs[half:]) for answer in answers]

    def next_turns(answers: Sequence[Answer], *, flushes: bool) -> list[Answer]:
        found = []
        for prompt, answer, said in zip(prompts, answers, nexts, strict=True):
            for url in options.node_urls if flushes else ():
                httpx.post(f"{url}/flush_cache", timeout=REQUEST_TIMEOUT_SECS).raise_for_status()
            turn = [*prompt, *answer.token_ids, *said]
            found.append(ask(options.url, options.output_tokens, True, turn))
        return found

    computed, cached = one_by_one(False), one_by_one(False)
    dense_at_once, hisparse_at_once = at_once(False), at_once(True)
    hisparse = one_by_one(True)
    rows = [
        compare("dense, alone: prompt computed, prompt cached", computed, cached),
        compare("dense, alone: twice", cached, one_by_one(False)),
        compare("alone: dense, hisparse", cached, hisparse),
        compare("hisparse, alone: twice", hisparse, one_by_one(True)),
        compare("dense: alone, all at once", cached, dense_at_once),
        compare("hisparse: alone, all at once", hisparse, hisparse_at_once),
        compare("hisparse: all at once, twice", hisparse_at_once, at_once(True)),
        compare("dense, alone: second half, going on", second_halves(cached), going_on(cached, False)),
        compare("hisparse, alone: second half, going on", second_halves(hisparse), going_on(hisparse, True)),
    ]
    if options.node_urls:
        read = next_turns(hisparse, flushes=False)
        computed = next_turns(hisparse, flushes=True)
        rows.append(compare("next turn: answer's KV of steps, computed", read, computed))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--node-urls", nargs="+", default=(), help="base addresses of all nodes")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=4096,
        help=f"tokens of the first prompt; each further one has {LENGTH_STEP} more",
    )
    parser.add_argument("--output-tokens", type=int, default=64)
    add_token_range(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT / "same_tokens")
    options = parser.parse_args()
    rows = measure(options)
    write_report(options.out, {"options": vars(options), "rows": rows})
    make_console().print(table_of("", rows))


if __name__ == "__main__":
    main()
