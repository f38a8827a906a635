"""Logprobs of a prompt's tokens on a GPU: the CPU's values, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model.prompt_scores import SLICE_BYTES, score_rows
from tests.gpu.support import needs_gpu

pytestmark = needs_gpu

VOCAB_SIZE, HIDDEN_SIZE, NUM_ROWS = 129_280, 512, 700


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_values_are_the_cpus_and_memory_is_that_of_a_slice(num_top: int) -> None:
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) * HIDDEN_SIZE**-0.5
    hidden = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=generator)
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=generator)

    def scored_on(device: str) -> tuple[Tensor, ...]:
        weight = head.to(device)
        inputs = hidden.to(device), token_ids.to(device)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scored = score_rows(lambda rows: rows @ weight.T, *inputs, num_top, VOCAB_SIZE)
        if device == "cuda":
            torch.cuda.synchronize()
            assert torch.cuda.max_memory_allocated() - before <= 12 * SLICE_BYTES
        return scored.logprobs, scored.top_logprobs, scored.ranks, scored.top_ids

    on_gpu, on_cpu = scored_on("cuda"), scored_on("cpu")
    for ours, theirs in zip(on_gpu[:2], on_cpu[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    # Rounding may exchange two tokens that are about equally likely.
    assert (on_gpu[2] - on_cpu[2]).abs().max() <= 8
    assert (on_gpu[3] != on_cpu[3]).sum() <= on_gpu[3].numel() // 20
