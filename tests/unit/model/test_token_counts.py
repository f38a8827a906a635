"""Penalties, biases and min_p against loops over tokens in float64; and that nobody else's tokens change."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import MAX_LOGIT_BIAS, SamplingParams, pack_logit_bias
from hisparse_pd.core.model import token_counts
from hisparse_pd.core.model.sampling import uniform_number
from hisparse_pd.core.model.token_counts import CountedRows, TokenCounts
from tests.sampling import sample

EOS = (3,)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One row of logits: what its request asks for and has, and the drafts before its position."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafts: list[int]

    @property
    def text(self) -> list[int]:
        return self.output + self.drafts


def params(**changes: object) -> SamplingParams:
    """``logit_bias``: pairs."""
    changes["logit_bias"] = pack_logit_bias(changes.get("logit_bias", ()))  # type: ignore[arg-type]
    return SamplingParams(max_new_tokens=99, **{"temperature": 0.0, **changes})  # type: ignore[arg-type]


def table_of(rows: Sequence[Row], vocab_size: int, order: Sequence[int]) -> TokenCounts:
    """Rows of logits have the rows ``order`` of the table."""
    table = TokenCounts.create(len(rows), vocab_size, CPU)
    for row, at in zip(rows, order, strict=True):
        table.start(at, row.params, np.array(row.prompt, np.int32))
        table.add(torch.full((len(row.output),), at), torch.tensor(row.output, dtype=torch.int64))
    return table


def sampled(logits: Tensor, rows: Sequence[Row], order: Sequence[int] = ()) -> list[int]:
    order = order or range(len(rows))
    counted = CountedRows(table_of(rows, logits.shape[1], order), order, [row.drafts for row in rows])
    settings = [row.params for row in rows]
    return sample(logits, settings, [len(row.text) for row in rows], EOS, counts=counted)[0]


def expected(logits: list[float], row: Row) -> int:
    """The definition, a token at a time."""
    wants, text = row.params, row.text
    num_biases = len(wants.logit_bias) // 8
    unpacked = struct.unpack(f"<{num_biases}i{num_biases}f", wants.logit_bias)
    biases = dict(zip(unpacked[:num_biases], unpacked[num_biases:], strict=True))
    values = []
    for token_id, value in enumerate(logits):
        if token_id in text or token_id in row.prompt:
            value = value / wants.repetition_penalty if value > 0 else value * wants.repetition_penalty
        value -= wants.frequency_penalty * text.count(token_id)
        value -= wants.presence_penalty * (token_id in text)
        value += biases.get(token_id, 0.0)
        is_ending = token_id in wants.stop_token_ids or (token_id in EOS and not wants.ignore_eos)
        values.append(-math.inf if is_ending and len(text) < wants.min_new_tokens else value)
    if wants.temperature == 0:
        return values.index(max(values))
    weights = [math.exp((value - max(values)) / wants.temperature) for value in values]
    is_cut = 0 < wants.top_k < len(values) or wants.top_p < 1
    candidates = list(range(len(values)))
    if is_cut:
        candidates.sort(key=lambda token_id: -values[token_id])
        candidates = candidates[: wants.top_k or None]
        total, before = sum(weights[token_id] for token_id in candidates), 0.0
        kept = []
        for token_id in candidates:
            if before / total < wants.top_p:
                kept.append(token_id)
            before += weights[token_id]
        candidates = kept
    candidates = [token_id for token_id in candidates if weights[token_id] >= wants.min_p]
    drawn = uniform_number(wants.seed, len(text)) * sum(weights[token_id] for token_id in candidates)
    for token_id in candidates:
        drawn -= weights[token_id]
        if drawn < 0:
            return token_id
    return candidates[-1]


def random_row(generator: random.Random, vocab_size: int) -> Row:
    def some(most: int) -> list[int]:
        common = generator.randrange(vocab_size)
        return [generator.choice((common, generator.randrange(vocab_size))) for _ in range(most)]

    biased = generator.sample(range(vocab_size), generator.choice((0, 1, vocab_size // 2, vocab_size)))
    draws = {
        "temperature": generator.choice((0.3, 1.0, 1.7)),
        "top_k": generator.choice((0, 0, 3, vocab_size)),
        "top_p": generator.choice((1.0, 1.0, 0.8)),
        "min_p": generator.choice((0.0, 0.05, 0.5)),
    }
    return Row(
        params(
            presence_penalty=generator.choice((0.0, generator.uniform(-2, 2))),
            frequency_penalty=generator.choice((0.0, generator.uniform(-2, 2))),
            repetition_penalty=generator.choice((1.0, generator.uniform(0.01, 2))),
            logit_bias=tuple(
                (token_id, generator.choice((-100.0, 100.0, generator.uniform(-5, 5)))) for token_id in biased
            ),
            min_new_tokens=generator.choice((0, 30)),
            stop_token_ids=tuple(generator.sample(range(vocab_size), 1)),
            seed=generator.randrange(1000),
            **generator.choice(({}, draws)),
        ),
        some(generator.randrange(20)),
        some(generator.randrange(20)),
        some(generator.randrange(4)),
    )


@pytest.mark.I5
@pytest.mark.parametrize("vocab_size", [5, 31, 64, 257])
def test_tokens_are_those_of_the_definition(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counts, "ROWS_AT_A_TIME", 7)
    generator = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    for _ in range(8):
        rows = [random_row(generator, vocab_size) for _ in range(20)]
        logits = torch.randn((len(rows), vocab_size)) * 4
        before = logits.clone()
        order = generator.sample(range(len(rows)), len(rows))
        wanted = [expected(of_row, row) for of_row, row in zip(logits.tolist(), rows, strict=True)]
        assert sampled(logits, rows, order) == wanted
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 1),
        ({"presence_penalty": 1.0}, 1),  # 5 - 1 = 4 = the next, whose id is higher
        ({"presence_penalty": 1.5}, 2),
        ({"frequency_penalty": 0.5}, 1),  # twice there: the same tie
        ({"frequency_penalty": 0.75}, 2),
        ({"repetition_penalty": 1.25}, 1),
        ({"repetition_penalty": 2.0}, 2),
        ({"repetition_penalty": 2.0, "logit_bias": ((4, 1.0),)}, 2),  # 3 + 1: equal, and behind it
        ({"logit_bias": ((0, 5.0),)}, 0),  # 0 + 5: equal, and before it
        ({"logit_bias": ((1, -100.0), (2, -100.0))}, 4),
        ({"presence_penalty": -2.0, "frequency_penalty": 2.0}, 2),  # 5 + 2 - 4
        ({"repetition_penalty": 0.5, "logit_bias": ((1, -6.0),)}, 1),  # 10 - 6
        ({"repetition_penalty": 0.5, "logit_bias": ((1, -6.5),)}, 2),
    ],
)
def test_of_equal_logits_the_lower_id_still_comes_first(changes: dict[str, object], wanted: int) -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, -1.0, 3.0]])
    row = Row(params(**changes), prompt=[], output=[1, 1], drafts=[])
    assert sampled(logits, [row]) == [wanted]


@pytest.mark.I5
def test_rows_that_ask_for_nothing_have_the_bits_that_they_have_without_the_others() -> None:
    generator = random.Random(1)
    logits = torch.randn((24, 301), generator=torch.Generator().manual_seed(1)) * 4
    settings = [
        {"num_logprobs": 2},
        {"temperature": 1.0, "num_logprobs": 1},
        {"temperature": 0.7, "top_p": 0.9, "num_logprobs": 0},
        {"temperature": 0.7, "top_k": 9, "min_new_tokens": 50},
    ]
    plain = [
        Row(params(seed=number, **one), [], [1] * number, [])  # type: ignore[arg-type]
        for number, one in enumerate(itertools.islice(itertools.cycle(settings), 12))
    ]
    indices = [len(row.text) for row in plain]
    alone = sample(logits[::2], [row.params for row in plain], indices, EOS)
    penalized = [random_row(generator, 301) for _ in plain]
    rows = [row for pair in zip(plain, penalized, strict=True) for row in pair]
    counted = CountedRows(table_of(rows, 301, range(24)), range(24), [row.drafts for row in rows])
    tokens, logprobs = sample(
        logits, [row.params for row in rows], [len(row.text) for row in rows], EOS, counts=counted
    )
    assert (tokens[::2], logprobs[::2]) == alone
    of_plain = [row.params for row in plain]
    assert counted.change(logits[:12], of_plain).data_ptr() == logits.data_ptr(), "a copy for nothing"


def test_logprobs_are_of_the_logits_without_penalties() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    row = Row(params(num_logprobs=1, frequency_penalty=2.0, logit_bias=((3, -100.0),)), [], [2], [])
    counted = CountedRows(table_of([row], 4, [0]), [0])
    (token_id,), (logprob,) = sample(logits, [row.params], [1], (), counts=counted)
    raw = torch.log_softmax(logits[0], 0).tolist()
    assert token_id == 1
    assert logprob is not None
    assert logprob.logprob == pytest.approx(raw[1])
    ((top_id, top_logprob),) = logprob.top
    assert top_id == 3
    assert top_logprob == pytest.approx(raw[3])


def test_a_row_that_is_started_again_has_nothing_of_the_request_before() -> None:
    first = Row(
        params(repetition_penalty=2.0, logit_bias=((2, 100.0),), frequency_penalty=2.0), [1, 2], [0, 0], []
    )
    table = table_of([first], 4, [0])
    table.start(0, params(frequency_penalty=2.0), np.array([3], np.int32))
    assert not table.counts.any()
    assert not table.biases.any()
    assert not table.bias_ids.any()


def test_all_biases_that_a_request_may_have() -> None:
    vocab_size = MAX_LOGIT_BIAS + 1
    logits = torch.zeros((2, vocab_size))
    logits[:, -1] = 50.0
    rows = [
        Row(params(logit_bias=tuple((token_id, bias) for token_id in range(MAX_LOGIT_BIAS))), [], [], [])
        for bias in (100.0, -100.0)
    ]
    assert sampled(logits, rows) == [0, vocab_size - 1]


@pytest.mark.parametrize("penalty", [1e-320, 1e-38, 1e-30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_smallest_repetition_penalties_leave_logits_finite(penalty: float, temperature: float) -> None:
    """An infinite logit has no probability, so that the token with the lowest id would be drawn."""
    wants = params(repetition_penalty=penalty, temperature=temperature, seed=1)
    row = Row(wants, prompt=[2, 4, 5], output=[], drafts=[])
    logits = torch.tensor([[3.0, -2.0, 9.0, 12.0, 0.0, 8.0]])
    counted = CountedRows(table_of([row], 6, [0]), [0])
    assert counted.change(logits, [wants]).isfinite().all()
    assert sampled(logits, [row]) == [2]
