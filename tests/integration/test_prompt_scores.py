"""Logprobs of a prompt's own tokens through router, prefill and decode node, against transformers'.

Some requests want no new tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.integration.harness import Deployment
from tools.checkpoints import oracle

TOLERANCE = 2e-3
"""Difference of two implementations in float32; scores of a neighbouring position are off by units."""
LENGTHS = (1, 2, 65, 130)


def make_prompt(length: int) -> list[int]:
    generator = random.Random(length)
    return [generator.randint(32, 126) for _ in range(length)]


PROMPTS = [make_prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[[str], Path]) -> list[Tensor]:
    """Logprobs of each prompt and of the token that greedy decoding adds."""
    model = oracle.load(tiny_checkpoint("v32"))
    continued = [
        prompt + tokens
        for prompt, tokens in zip(PROMPTS, oracle.generate(model, PROMPTS, 1, ignore_eos=True), strict=True)
    ]
    return [oracle.prompt_logprobs(model, prompt) for prompt in continued]


def post(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(url + path, json={"temperature": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_close(logprobs: list[float], prompt: list[int], expected: Tensor, first: int = 1) -> None:
    wanted = expected[first - 1 : first - 1 + len(logprobs)].gather(
        1, torch.tensor(prompt[first : first + len(logprobs)])[:, None]
    )[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=0, atol=TOLERANCE)


def check_best(tops: list[dict[str, float]], expected: Tensor) -> None:
    best = torch.tensor([max(top.values()) for top in tops])
    torch.testing.assert_close(best, expected[: len(tops)].amax(1), rtol=0, atol=TOLERANCE)


def test_a_loglikelihood_request_of_lm_eval(pair: Deployment, expected: list[Tensor]) -> None:
    """The request is that of its local-completions model, which reads the answer like this."""
    body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = post(pair.url, "/v1/completions", **body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(PROMPTS)))
    for choice, prompt, logprobs in zip(answer["choices"], PROMPTS, expected, strict=True):
        shown = choice["logprobs"]
        new_token = int(logprobs[-1].argmax())
        assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
        check_close(shown["token_logprobs"][1:], [*prompt, new_token], logprobs)
        check_best(shown["top_logprobs"][1:], logprobs)
        texts = [chr(token) for token in prompt] + shown["tokens"][-1:]
        assert shown["tokens"] == texts
        assert choice["text"].startswith("".join(texts[:-1]))
        assert shown["text_offset"] == list(range(len(prompt) + 1))
    assert answer["usage"]["prompt_tokens"] == sum(LENGTHS)
    assert answer["usage"]["completion_tokens"] == len(PROMPTS)
