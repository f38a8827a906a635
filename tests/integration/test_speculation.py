"""Speculation through the real pair: tokens are transformers' own, cold and warm, in every mode.

Mixed batches, cold and warm, with three drafts and without, are ``test_oracle``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.harness import FLAGS, Deployment, at_once, deployment, generated
from tests.unit.decode_node.penalties_support import penalized_tokens
from tests.unit.decode_node.support import random_prompt
from tools.checkpoints.oracle import greedy_tokens

pytestmark = pytest.mark.slow

NUM_NEW = 32
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate([1, 31, 64, 100, 240, 300, 420, 700])]


@pytest.fixture(scope="module")
def checkpoint(drafting_checkpoint: Callable[[str], Path]) -> Path:
    return drafting_checkpoint("v32")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return greedy_tokens(checkpoint, PROMPTS, NUM_NEW)


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    common = ["--page-size", "32", "--context-length", "2048"]
    with deployment(
        checkpoint,
        tmp_path_factory.mktemp("logs"),
        prefill_options=[*common, "--chunked-prefill-size", "150"],
        decode_options=[
            *common,
            *("--speculative-num-steps", "3", "--device-buffer-size", "260"),
        ],
    ) as pair:
        yield pair


def generate(url: str, prompt: tuple[int, ...], hisparse: bool | str, **fields: Any) -> Any:
    params = {"max_new_tokens": NUM_NEW, **fields.pop("params", {})}
    return generated(url, input_ids=prompt, hisparse=hisparse, params=params, **fields)


@pytest.mark.I5
def test_tokens_are_those_of_the_oracle_with_seven_drafts_by_one_selection(
    sharing_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of two ranks, which take part in each other's drafts."""
    checkpoint = sharing_checkpoint("glm")
    expected = greedy_tokens(checkpoint, PROMPTS, NUM_NEW)
    drafting = ("--speculative-num-steps", "7", "--device-buffer-size", "520", "--dp-size", "2")
    with deployment(checkpoint, tmp_path, decode_options=drafting) as pair:
        for shift in range(2):

            def ask(number: int, shift: int = shift) -> Any:
                return generate(pair.url, PROMPTS[number], FLAGS[(number + shift) % 3])["output_ids"]

            assert at_once(ask, range(len(PROMPTS)), len(PROMPTS)) == expected
        assert pair.decode[0].metrics()["hisparse_pd:accepted_draft_tokens_total"] > 0


@pytest.mark.I5
def test_penalties_and_biases_give_the_oracle_s_tokens_with_drafts_and_without(
    pair: Deployment, checkpoint: Path, expected: list[list[int]]
) -> None:
    settings: list[dict[str, Any]] = [
        {"frequency_penalty": 0.3},
        {"repetition_penalty": 1.9, "presence_penalty": -0.5},
        {"repetition_penalty": 0.7, "frequency_penalty": 1.5},
        {"presence_penalty": 2.0, "logit_bias": ((65, 4.0), (101, -100.0))},
    ]
    prompts = PROMPTS[1:5]
    starts = [(prompt, (), setting) for prompt, setting in zip(prompts, settings, strict=True)]
    penalized = penalized_tokens(checkpoint, starts, NUM_NEW)
    assert penalized != expected[1:5]

    def ask(number: int, hisparse: bool, speculative: bool) -> list[int]:
        biases = {str(token_id): bias for token_id, bias in settings[number].get("logit_bias", ())}
        params = settings[number] | {"logit_bias": biases}
        answer = generate(pair.url, prompts[number], hisparse, params=params, speculative=speculative)
        output_ids: list[int] = answer["output_ids"]
        return output_ids

    with ThreadPoolExecutor(16) as threads:
        asked = [
            [threads.submit(ask, number, hisparse, speculative) for number in range(len(prompts))]
            for hisparse in (True, False)
            for speculative in (True, False)
        ]
        beside = threads.submit(generate, pair.url, PROMPTS[5], "auto")
        assert [[one.result() for one in each] for each in asked] == [penalized] * 4
        assert beside.result()["output_ids"] == expected[5]
    forced = generate(pair.url, PROMPTS[2], True, params={"logit_bias": {"77": 100}})
    assert forced["output_ids"] == [77] * NUM_NEW


@pytest.mark.I5
def test_samples_stop_strings_and_logprobs_are_those_without_drafts(pair: Deployment) -> None:
    def complete(prompt: tuple[int, ...], *, speculative: bool) -> list[dict[str, Any]]:
        body = {
            "prompt": list(prompt),
            "max_tokens": NUM_NEW,
            "n": 3,
            "seed": 11,
            "temperature": 0.5,
            "logprobs": 2,
            "stop": ["e", "0", "Q"],
            "min_tokens": 3,
            "speculative": speculative,
        }
        answer = httpx.post(pair.url + "/v1/completions", json=body, timeout=200.0)
        assert answer.status_code == 200, answer.text
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices

    reasons = set()
    for prompt in PROMPTS[1:5]:
        with_drafts, without = (complete(prompt, speculative=each) for each in (True, False))
        for got, expected in zip(with_drafts, without, strict=True):
            assert (got["text"], got["finish_reason"]) == (expected["text"], expected["finish_reason"])
            assert got["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
            logprobs = [choice["logprobs"]["token_logprobs"] for choice in (got, expected)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
            reasons.add(got["finish_reason"])
    assert reasons == {"stop", "length"}
