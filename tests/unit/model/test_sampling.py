"""Sampling: exact greedy, distributions, one seeded stream on both nodes, masks, logprobs, finish reasons."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse_pd.base.vocabulary import FinishReason, SamplingParams
from hisparse_pd.core.model.sampling import finish_reason
from tests.sampling import sample

EOS = (3,)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=10, **changes)  # type: ignore[arg-type]


def one(logits: Tensor, settings: SamplingParams, num_generated: int = 0) -> int:
    token_ids, _ = sample(logits[None], [settings], [num_generated], EOS)
    return token_ids[0]


def test_greedy_is_argmax_and_does_not_change_logits() -> None:
    logits = torch.randn((5, 11), generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    token_ids, logprobs = sample(logits, [params(temperature=0.0, min_new_tokens=1)] * 5, [0] * 5, EOS)
    masked = before.clone()
    masked[:, 3] = float("-inf")
    assert token_ids == masked.argmax(-1).tolist()
    assert torch.equal(logits, before)
    assert logprobs == [None] * 5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.25, 0.09, 0.0225, 0.0025]),
        ({"top_k": 2}, [0.5, 0.3, 0, 0]),
        ({"top_p": 0.7}, [0.5, 0.3, 0, 0]),
        ({"top_p": 0.81}, [0.5, 0.3, 0.15, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0.5, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 100}, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, float], expected: list[float]) -> None:
    logits = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()
    order = [2, 0, 3, 1]
    num_draws = 3000
    rows = [params(seed=seed, **settings) for seed in range(num_draws)]
    drawn, _ = sample(logits.expand(num_draws, 4), rows, [0] * num_draws, EOS)
    counts = Counter(drawn)
    for token_id, weight in zip(order, expected, strict=True):
        share = weight / sum(expected)
        deviation = math.sqrt(share * (1 - share) / num_draws)
        assert abs(counts[token_id] / num_draws - share) <= 4.5 * deviation


@pytest.mark.I5
@settings(derandomize=True, max_examples=30)
@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 10_000), temperature=st.floats(0.01, 2))
def test_seeded_draw_ignores_batch_neighbours(seed: int, index: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(index)
    logits = torch.randn((4, 50), generator=generator) * 3
    mine = params(seed=seed, temperature=temperature, top_p=0.95)
    alone = one(logits[2], mine, index)
    batch = [params(), params(temperature=0.0), mine, params(seed=seed + 1)]
    token_ids, _ = sample(logits, batch, [7, 0, index, 1], EOS)
    assert token_ids[2] == alone


def test_streams_change_with_output_index_and_seed() -> None:
    logits = torch.zeros(1000)
    stream = [one(logits, params(seed=5), index) for index in range(20)]
    assert len(set(stream)) > 15
    assert stream == [one(logits, params(seed=5), index) for index in range(20)]
    assert stream != [one(logits, params(seed=6), index) for index in range(20)]
    assert len({one(logits, params()) for _ in range(20)}) > 15, "without a seed"


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([1e4, 1e4 + 1, -1e4])
    assert one(logits, params(temperature=1e-6, seed=0)) == 1


@pytest.mark.I5
def test_min_new_tokens_masks_what_would_end_the_request() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 9.0, 8.0, 7.0])
    greedy = {"temperature": 0.0, "min_new_tokens": 2, "stop_token_ids": (4, -1, 99)}
    assert one(logits, params(**greedy), 1) == 5
    assert one(logits, params(**greedy), 2) == 3
    assert one(logits, params(**greedy, ignore_eos=True), 1) == 3
    assert one(logits, params(**{**greedy, "temperature": 0.3}, seed=1, top_k=1), 0) == 5
    batch = [params(temperature=0.0), params(**greedy), params(temperature=0.0)]
    assert sample(torch.stack([logits] * 3), batch, [0, 0, 0], EOS)[0] == [3, 5, 3], "a neighbour was masked"


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0], [0.0, 1.0, 2.0, 9.0]])
    batch = [params(temperature=0.0, min_new_tokens=1, num_logprobs=2), params(num_logprobs=0, seed=0)]
    token_ids, logprobs = sample(logits, batch, [0, 0], EOS)
    expected = torch.log_softmax(logits[0], -1).tolist()
    assert token_ids[0] == 2
    first, second = logprobs
    assert first is not None
    assert second is not None
    assert first.token_id == 2
    assert first.logprob == pytest.approx(expected[2])
    assert [token_id for token_id, _ in first.top] == [3, 2]
    assert [value for _, value in first.top] == pytest.approx([expected[3], expected[2]])
    assert second.top == ()


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 params, 2 output lengths"):
        sample(torch.zeros(2, 4), [params()], [0, 0], EOS)


@pytest.mark.parametrize(
    ("token_id", "num_output", "changes", "expected"),
    [
        (3, 1, {}, (FinishReason.STOP, 3)),
        (3, 1, {"ignore_eos": True}, (None, None)),
        (3, 10, {"ignore_eos": True}, (FinishReason.LENGTH, None)),
        (5, 1, {"stop_token_ids": (5,)}, (FinishReason.STOP, 5)),
        (5, 1, {"stop_token_ids": (5,), "ignore_eos": True}, (FinishReason.STOP, 5)),
        (5, 10, {"stop_token_ids": (5,)}, (FinishReason.STOP, 5)),
        (5, 9, {}, (None, None)),
        (5, 10, {}, (FinishReason.LENGTH, None)),
    ],
)
def test_finish_reason(
    token_id: int,
    num_output: int,
    changes: dict[str, object],
    expected: tuple[FinishReason | None, int | None],
) -> None:
    assert finish_reason(token_id, num_output, params(**changes), EOS) == expected
