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


@pytest.mark.I5
def test_a_warm_cache_changes_no_logprob(pair: Deployment) -> None:
    pair.flush_prefix_caches()
    prompt = PROMPTS[-1]
    body = {"prompt": prompt, "max_tokens": 0, "logprobs": 2, "echo": True}
    cold = post(pair.url, "/v1/completions", **body)
    assert cold["choices"][0]["finish_reason"] == "length"
    assert cold["usage"]["completion_tokens"] == 0
    warm = post(pair.url, "/v1/completions", **body)
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "its logits had to be computed"
    again = post(pair.url, "/v1/completions", prompt=prompt, max_tokens=0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 128, "its pages were not kept"


def test_prompt_logprobs_by_id_and_echo_of_all_samples(pair: Deployment, expected: list[Tensor]) -> None:
    prompt, logprobs = PROMPTS[-1], expected[-1]
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 2, "n": 2, "echo": True, "prompt_logprobs": 3}
    for choice in post(pair.url, "/v1/completions", **body)["choices"]:
        assert choice["text"].startswith("".join(chr(token) for token in prompt))
        shown = choice["logprobs"]
        assert len(shown["tokens"]) == len(prompt) + 1
        check_close(shown["token_logprobs"][1 : len(prompt)], prompt, logprobs)
        by_id = choice["prompt_logprobs"]
        assert by_id[0] is None
        assert len(by_id) == len(prompt)
        for position, entries in enumerate(by_id[1:], 1):
            own = entries[str(prompt[position])]
            assert own["decoded_token"] == chr(prompt[position])
            assert own["logprob"] == shown["token_logprobs"][position]
            assert own["rank"] == 1 + int(
                (logprobs[position - 1] > logprobs[position - 1, prompt[position]]).sum()
            )
            ranks = {entry["rank"] for entry in entries.values()}
            assert ranks == {1, 2, 3, own["rank"]}


@pytest.mark.parametrize("num_new_tokens", [0, 1, 5])
def test_input_logprobs_of_generate(pair: Deployment, expected: list[Tensor], num_new_tokens: int) -> None:
    prompt, logprobs, start = PROMPTS[2], expected[2], 5
    params = {"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True}
    body = {"sampling_params": params, "return_logprob": True, "logprob_start_len": start}
    answer = post(
        pair.url, "/generate", input_ids=prompt, top_logprobs_num=2, return_text_in_logprobs=True, **body
    )
    meta = answer["meta_info"]
    shown = meta["input_token_logprobs"]
    assert [entry[1:] for entry in shown] == [[token, chr(token)] for token in prompt[start:]]
    assert shown[0][0] is None
    check_close([entry[0] for entry in shown[1:]], prompt, logprobs, first=start + 1)
    assert meta["input_top_logprobs"][0] is None
    best = [entries[0][1] for entries in meta["input_top_logprobs"][1:]]
    assert best == logprobs[start : start + len(best)].argmax(1).tolist()
    assert len(meta["output_token_logprobs"]) == len(answer["output_ids"]) == num_new_tokens
    assert meta["completion_tokens"] == num_new_tokens
    none = post(pair.url, "/generate", input_ids=prompt, **body | {"logprob_start_len": len(prompt)})
    assert none["meta_info"]["input_token_logprobs"] == []
