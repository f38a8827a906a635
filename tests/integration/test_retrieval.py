"""The trained model through the real pair: its answers lie far back in long prompts, and must be right.

A wrong row paged in, a selection that is off, or a stale hot buffer gives a wrong number here.
"""

from __future__ import annotations

import httpx
import pytest

from tests.integration.harness import Deployment
from tools.bench.accuracy import NUM_CLIENTS, ask_pair
from tools.bench.accuracy_report import Response
from tools.bench.retrieval import Retrieval, retrievals

SAMPLE = {256: 5}
FULL = {2048: 2, 8000: 4}
"""Number of prompts by length. Each asks for several answers; most of the time goes to the longest."""
SHARE_RIGHT = 0.96
"""Least share of right answers. The model's own is 99%; with rows or positions off it is next to 0."""
MODES: tuple[tuple[str, bool | str], ...] = (("hisparse", True), ("dense", False), ("auto", "auto"))


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [SAMPLE, FULL], ids=["sample", "full"])
def test_answers_are_right_and_the_same_in_every_mode(
    trained_pair: Deployment, num_prompts: dict[int, int]
) -> None:
    prompts: list[Retrieval] = [
        found for length, count in num_prompts.items() for found in retrievals(length, count)
    ]
    answers: dict[str, list[Response]] = {system: [] for system, _ in MODES}
    for answer in ask_pair(trained_pair.url, prompts, MODES, lambda: None, NUM_CLIENTS):
        assert not answer.error
        answers[answer.system].append(answer)
    for system, found in answers.items():
        assert len(found) == len(prompts)
        wrong = [(answer.length, answer.text) for answer in found if not all(answer.right)]
        right = [is_right for answer in found for is_right in answer.right]
        assert sum(right) >= SHARE_RIGHT * len(right), (system, wrong)
    tokens = {system: [answer.tokens for answer in found] for system, found in answers.items()}
    assert tokens["hisparse"] == tokens["dense"] == tokens["auto"]
    assert {answer.mode for answer in answers["hisparse"]} == {"hisparse"}
    assert {answer.mode for answer in answers["dense"]} == {"dense"}
    long = [answer for answer in answers["hisparse"] if answer.length == max(num_prompts)]
    assert all(answer.misses > 0 for answer in long)
    assert len(prompts) > NUM_CLIENTS  # requests of all modes met in batches


def test_a_question_in_a_chat_of_ones_own_is_answered(trained_pair: Deployment) -> None:
    content = (
        "Notes: The badge of amber falcon is 58213. The clerk opened a window. The code of calm otter is "
        "4012.\nQuestion: calm otter?"
    )
    answer = httpx.post(
        f"{trained_pair.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32},
        timeout=60,
    ).json()
    assert answer["choices"][0]["message"]["content"] == "Answer: calm otter is 4012."
    assert answer["choices"][0]["finish_reason"] == "stop"
