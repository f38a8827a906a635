"""Compares answers to the same requests alone and beside others, dense and hisparse.

    python -m tools.bench.same_tokens --url http://127.0.0.1:8000/v1 [--requests 24] [--prompt-tokens 4096]

Asks a running service for greedy answers with logprobs. Each row of the table compares two passes over the
same prompts: how many answers have equal tokens, and equal tokens and logprobs to the last bit. From the
second pass on, the KV of all prompts but for their last tokens comes from the cache. "Going on" asks for the
second half of an answer with its first half as part of the prompt.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tools.bench.facts import OUT
from tools.bench.report import make_console, table_of, write_report

REQUEST_TIMEOUT_SECS = 300.0
LENGTH_STEP = 37
"""Tokens by which each prompt is longer than the one before, so that prompts end anywhere in a page."""


class Answer(NamedTuple):
    """An answer, token by token."""

    token_ids: list[int]
    logprobs: list[float]


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
    (choice,) = response.json()["choices"]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def compare(question: str, some: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """Return a row of the table: how many answers of two passes are equal."""
    pairs = list(zip(some, others, strict=True))
    return {
        "question": question,
        "answers": len(pairs),
        "equal tokens": sum(a.token_ids == b.token_ids for a, b in pairs),
        "equal logprobs": sum(a == b for a, b in pairs),
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Make all passes over the same prompts. Returns the rows of the table."""
    draw = random.Random(options.seed)
    prompts = [
        [draw.randrange(*options.token_range) for _ in range(options.prompt_tokens + LENGTH_STEP * number)]
        for number in range(options.requests)
    ]

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

    computed, cached = one_by_one(False), one_by_one(False)
    dense_at_once, hisparse_at_once = at_once(False), at_once(True)
    hisparse = one_by_one(True)
    return [
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=4096,
        help=f"tokens of the first prompt; each further one has {LENGTH_STEP} more",
    )
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--token-range",
        type=int,
        nargs=2,
        default=(3, 250),
        help="range of the prompts' token ids: LOW to END - 1",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT / "same_tokens")
    options = parser.parse_args()
    rows = measure(options)
    write_report(options.out, {"options": vars(options), "rows": rows})
    make_console().print(table_of("", rows))


if __name__ == "__main__":
    main()
