"""Ties in selections: the lowest positions win, whatever the row's length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.kernels.indexer import index_topk
from hisparse_pd.kernels.selection import ranked_topk, select_topk
from tools.checkpoints.oracle import LowestFirst

SCORES = st.sampled_from([0.0, -0.0, 1.0, 2.5, -1.0, -math.inf, 3e38, 1e-40])


def by_definition(row: list[float], top_k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda position: -row[position])[:top_k]


@pytest.mark.I5
@given(st.lists(SCORES, min_size=1, max_size=40), st.data())
@settings(max_examples=60)
def test_every_selection_has_the_one_rule(row: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(row)))
    num_seen = data.draw(st.integers(0, len(row)))
    scores = torch.tensor([row])
    values, positions = ranked_topk(scores, top_k)
    assert positions[0].tolist() == by_definition(row, top_k)
    assert torch.equal(values, scores.gather(1, positions))
    with LowestFirst():
        assert scores.topk(top_k).indices.sort().values.tolist() == [sorted(by_definition(row, top_k))]
    expected = sorted(by_definition(row[:num_seen], top_k)) + [-1] * max(0, top_k - num_seen)
    assert select_topk(scores, torch.tensor([num_seen]), top_k)[0].tolist() == expected


@pytest.mark.parametrize("seq_len", [500, 512, 700, 4000])
def test_a_selection_does_not_depend_on_what_comes_later(seq_len: int) -> None:
    """The selection of token 300 is the same in chunks of any end, with keys most of which score zero."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn((4000, 24), generator=generator)
    q_index = torch.randn((1, 5, 24), generator=generator)
    weights = torch.randn((1, 5), generator=generator).abs().neg()  # zero is the best score
    position = torch.tensor([300])
    alone = index_topk(q_index, weights, keys[:301], position, 37)
    assert torch.equal(index_topk(q_index, weights, keys[:seq_len], position, 37), alone)
    scores = (q_index[0] @ keys[:301].T).relu().T @ weights[0]
    zeros = (scores == 0).nonzero().flatten()
    assert alone[0, : len(zeros)].tolist() == zeros[:37].tolist() or len(zeros) < 37
