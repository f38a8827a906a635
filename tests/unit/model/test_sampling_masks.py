"""Draws under masks of bits: nothing else is drawn, and rows that allow all are as without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import FinishReason, SamplingParams
from hisparse_pd.core.model.sampling import finish_reason
from hisparse_pd.kernels.bit_masks import allowed_logits
from hisparse_pd.kernels.checks import KernelArgumentError
from tests.sampling import sample

EOS = (3,)
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.5, "num_logprobs": 2},
]


def masks_of(allowed: list[set[int]], vocab_size: int) -> Tensor:
    masks = torch.zeros((len(allowed), -(-vocab_size // 32)), dtype=torch.int64)
    for row, token_ids in enumerate(allowed):
        for token_id in token_ids:
            masks[row, token_id // 32] += 1 << token_id % 32
    return masks.to(torch.int32)


@pytest.mark.parametrize("vocab_size", [5, 32, 33, 63, 64, 300])
def test_exactly_the_bits_stay(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((4, vocab_size), generator=generator)
    before = logits.clone()
    sets: list[set[int]] = [set(range(vocab_size)), {0}, {vocab_size - 1}, set(range(0, vocab_size, 3))]
    allowed = allowed_logits(logits, masks_of(sets, vocab_size))
    for row, token_ids in enumerate(sets):
        for token_id in range(vocab_size):
            expected = logits[row, token_id].item() if token_id in token_ids else float("-inf")
            assert allowed[row, token_id] == expected
    assert torch.equal(logits, before)


def test_masks_of_another_shape_or_kind_are_an_error() -> None:
    logits = torch.zeros((2, 40))
    for masks in (torch.zeros((2, 1), dtype=torch.int32), torch.zeros((2, 2), dtype=torch.int64)):
        with pytest.raises(KernelArgumentError, match="masks"):
            allowed_logits(logits, masks)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_a_mask_allows_is_drawn_and_neighbours_draw_as_without(kind: dict[str, object]) -> None:
    vocab_size = 70
    logits = torch.randn((40, vocab_size), generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(max_new_tokens=9, seed=row, **kind) for row in range(40)]  # type: ignore[arg-type]
    sets: list[set[int]] = [{row, 69, 31} if row % 2 else set(range(vocab_size)) for row in range(40)]
    without, without_logprobs = sample(logits, params, [0] * 40, EOS)
    token_ids, logprobs = sample(logits, params, [0] * 40, EOS, masks=masks_of(sets, vocab_size))
    assert all(token_id in allowed for token_id, allowed in zip(token_ids, sets, strict=True))
    assert token_ids[::2] == without[::2]
    assert token_ids != without
    raw = torch.log_softmax(logits, dim=-1)
    for row, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if logprob is not None:
            assert logprob.logprob == pytest.approx(raw[row, token_id].item()), "of the logits as they are"
    assert logprobs[::2] == without_logprobs[::2]


def test_the_ban_of_early_ends_yields_where_a_mask_has_only_ends() -> None:
    logits = torch.zeros((3, 40))
    logits[:, 3] = 9.0
    params = [SamplingParams(max_new_tokens=9, temperature=0.0, min_new_tokens=5, stop_token_ids=(35,))] * 3
    masks = masks_of([{3, 35}, {3, 7}, {35}], 40)
    token_ids, _ = sample(logits, params, [0] * 3, EOS, masks=masks)
    assert token_ids == [3, 7, 35]


def test_an_end_that_a_grammar_allows_ends_even_where_eos_is_ignored() -> None:
    ignoring = SamplingParams(max_new_tokens=9, ignore_eos=True)
    assert finish_reason(3, 1, ignoring, EOS) == (None, None)
    bound = SamplingParams(max_new_tokens=9, ignore_eos=True, grammar='start: "a"')
    assert finish_reason(3, 1, bound, EOS) == (FinishReason.STOP, 3)
