"""Sampling on the GPU: the tokens and logprobs of the CPU, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

from model.sampling import enqueue_sample, sample
from tests.gpu.support import no_waiting
from vocabulary import SamplingParams

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
    enqueue_sample(logits, params, indices, EOS)  # what is allocated first may wait
    with no_waiting():
        sampled = enqueue_sample(logits, params, indices, EOS)
    assert len(sampled.token_ids.tolist()) == len(CHOICES)
