"""Sampling on the GPU: the CPU's tokens and logprobs, also with penalties, without waiting for the device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hisparse_pd.base.vocabulary import SamplingParams, pack_logit_bias
from hisparse_pd.core.model.sampling import Sampled, enqueue_sample
from hisparse_pd.core.model.token_counts import CountedRows, TokenCounts, to_device
from tests.gpu.support import no_waiting
from tests.sampling import sample

pytestmark = [
    pytest.mark.I5,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: this samples on one"),
]

EOS = (3,)
CHOICES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "min_new_tokens": 5, "stop_token_ids": (7, 9)},
    {"temperature": 1.0},
    {"temperature": 0.3, "num_logprobs": 3},
    {"top_p": 0.9},
    {"top_k": 40, "num_logprobs": 0},
    {"temperature": 0.7, "top_k": 100, "top_p": 0.5, "num_logprobs": 3},
    {"temperature": 0.7, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
]
PENALTIES: list[dict[str, object]] = [
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": -0.25},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_new_tokens": 99, "stop_token_ids": (7, 9)},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 0.8, "frequency_penalty": -1.0},
    {"temperature": 1.0, "logit_bias": pack_logit_bias([(each, each % 7 - 3.0) for each in range(90)])},
    {"temperature": 0.0, "logit_bias": pack_logit_bias([(0, 100.0), (5, -100.0)]), "num_logprobs": 1},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("vocab_size", [100, 32768])
def test_what_is_sampled_is_what_the_cpu_samples(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((64, vocab_size), generator=generator) * 4
    params = [
        SamplingParams(max_new_tokens=9, seed=row, **CHOICES[row % len(CHOICES)])  # type: ignore[arg-type]
        for row in range(64)
    ]
    indices = [row % 8 for row in range(64)]
    expected, expected_logprobs = sample(logits, params, indices, EOS)
    token_ids, logprobs = sample(logits.cuda(), params, indices, EOS)
    assert token_ids == expected
    for got, wanted in zip(logprobs, expected_logprobs, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in wanted.top]


def test_enqueueing_does_not_wait_for_the_device() -> None:
    logits = torch.randn((len(CHOICES), 1000), device="cuda")
    params = [SamplingParams(max_new_tokens=9, **choice) for choice in CHOICES]  # type: ignore[arg-type]
    indices = [0] * len(CHOICES)
    enqueue_sample(logits, params, indices, EOS)  # the first call may wait for allocations
    with no_waiting():
        sampled = enqueue_sample(logits, params, indices, EOS)
    assert len(sampled.token_ids.tolist()) == len(CHOICES)


@pytest.mark.parametrize("vocab_size", [101, 129_280])
def test_penalties_and_biases_are_those_of_the_cpu(vocab_size: int) -> None:
    """There are more rows than are changed at a time, some rows have drafts, and the table's rows have
    another order."""
    num_rows = 150
    numbers = random.Random(vocab_size)
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(1)) * 4
    params = [
        SamplingParams(max_new_tokens=9, seed=row, **PENALTIES[row % len(PENALTIES)])  # type: ignore[arg-type]
        for row in range(num_rows)
    ]
    likely = logits.topk(20).indices.tolist()
    prompts, outputs, drafts = (
        [[numbers.choice(of_row) for _ in range(numbers.randrange(most))] for of_row in likely]
        for most in (50, 30, 4)
    )
    order = numbers.sample(range(num_rows), num_rows)
    indices = [len(output) + len(of_row) for output, of_row in zip(outputs, drafts, strict=True)]
    drawn, changed = [], []
    for device in (torch.device("cpu"), torch.device("cuda")):
        table = TokenCounts.create(num_rows, vocab_size, device)
        for row in range(num_rows):
            table.start(order[row], params[row], np.array(prompts[row], np.int32))
        rows = [order[row] for row in range(num_rows) for _ in outputs[row]]
        token_ids = [token_id for output in outputs for token_id in output]
        table.add(to_device(rows, device), to_device(token_ids, device))
        counts = CountedRows(table, order, drafts)
        drawn.append(sample(logits.to(device), params, indices, EOS, counts=counts)[0])
        changed.append(counts.change(logits.to(device), params).cpu())
    torch.testing.assert_close(*changed, rtol=1e-6, atol=1e-5)
    assert drawn[0] == drawn[1]
    assert drawn[0] != logits.argmax(dim=1).tolist()


def test_counting_and_penalties_do_not_wait_for_the_device() -> None:
    device = torch.device("cuda")
    logits = torch.randn((len(PENALTIES), 1000), device=device)
    params = [SamplingParams(max_new_tokens=9, **choice) for choice in PENALTIES]  # type: ignore[arg-type]
    rows = list(range(len(PENALTIES)))
    table = TokenCounts.create(len(PENALTIES), 1000, device)

    def draw() -> Sampled:
        for row in rows:
            table.start(row, params[row], np.arange(50, dtype=np.int32))
        table.add(to_device(rows, device), to_device(rows, device))
        counts = CountedRows(table, rows, [[1, 2]] * len(rows))
        return enqueue_sample(logits, params, rows, EOS, counts=counts)

    draw()  # the first call may wait for allocations
    with no_waiting():
        sampled = draw()
    assert len(sampled.token_ids.tolist()) == len(PENALTIES)
