"""Logprobs of given tokens, in slices of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model import prompt_scores
from hisparse_pd.core.model.prompt_scores import SLICE_BYTES, score_rows

VOCAB_SIZE = 50


class Head:
    """An LM head of random weights that notes how many rows it was asked for at a time."""

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB_SIZE, 8, generator=torch.Generator().manual_seed(1))
        self.num_rows: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.num_rows.append(len(hidden))
        return hidden @ self.weight.T


@pytest.mark.parametrize("slice_rows", [1, 3, 4, 11, 1000])
def test_values_are_those_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch, slice_rows: int) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", slice_rows * VOCAB_SIZE * 4)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(11, 8, generator=generator)
    token_ids = torch.randint(0, VOCAB_SIZE, (11,), generator=generator)
    head = Head()
    scored = score_rows(head, hidden, token_ids, 4, VOCAB_SIZE)
    logprobs = torch.log_softmax(hidden @ head.weight.T, dim=-1)
    torch.testing.assert_close(scored.logprobs, logprobs.gather(1, token_ids[:, None])[:, 0])
    order = logprobs.sort(dim=1, descending=True)
    assert torch.equal(scored.top_ids, order.indices[:, :4].int())
    torch.testing.assert_close(scored.top_logprobs, order.values[:, :4])
    ranks = (order.indices == token_ids[:, None]).nonzero()[:, 1] + 1
    assert scored.ranks.tolist() == ranks.tolist()
    assert max(head.num_rows) <= slice_rows
    assert sum(head.num_rows) == 11


def test_a_slice_of_a_large_vocabulary_is_bounded() -> None:
    num_rows: list[int] = []

    def logits_of(hidden: Tensor) -> Tensor:
        num_rows.append(len(hidden))
        return torch.zeros(len(hidden), 129_280)

    score_rows(logits_of, torch.zeros(100, 1), torch.zeros(100, dtype=torch.int64), 0, 129_280)
    assert max(num_rows) * 129_280 * 4 <= SLICE_BYTES
    assert num_rows == [64, 36]


def test_of_equal_tokens_the_lowest_id_is_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    scored = score_rows(lambda rows: logits[: len(rows)], torch.zeros(2, 1), torch.tensor([2, 3]), 9, 4)
    assert scored.ranks.tolist() == [2, 4]
    assert scored.top_ids.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]


def test_no_row_is_no_work() -> None:
    head = Head()
    scored = score_rows(head, torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), 2, VOCAB_SIZE)
    assert scored.logprobs.shape == (0,)
    assert head.num_rows == []
