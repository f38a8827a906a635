"""The parts of the swap-in benchmark that need no GPU: what is selected, and the cells it runs in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.bench.swap_in import (
    CONTEXT,
    DRAFTS_CAPACITY,
    NUM_DRAFTED_TOKENS,
    NUM_TOKENS,
    NUM_WARM_DRAFTED_TOKENS,
    PAGE_SIZE,
    TOP_K,
    Cell,
    calls_of,
    filling,
    selections,
)


@pytest.mark.parametrize(
    "miss_percent", [*(pytest.param(each, marks=pytest.mark.slow) for each in (0, 100)), 10]
)
def test_every_token_replaces_the_given_share_by_what_was_selected_longest_ago_or_never(
    miss_percent: int,
) -> None:
    steps = selections(NUM_TOKENS, 2, miss_percent, 0).numpy()
    assert steps.shape == (NUM_TOKENS, 2, TOP_K)
    num_new = round(TOP_K * miss_percent / 100)
    for req in range(2):
        last_step = np.full(CONTEXT - PAGE_SIZE, -1)
        last_step[steps[0, req]] = 0
        for step in range(1, NUM_TOKENS):
            before, now = steps[step - 1, req], steps[step, req]
            assert len(set(now.tolist())) == TOP_K
            assert (now == before).mean() < 0.05  # shuffled
            new = np.setdiff1d(now, before)
            assert len(new) == num_new
            if num_new:
                unselected = np.setdiff1d(np.arange(CONTEXT - PAGE_SIZE), np.union1d(before, now))
                assert last_step[new].max() <= last_step[unselected].min()
            last_step[now] = step
    assert not np.array_equal(steps[0, 0], steps[0, 1])


def test_hot_buffers_are_filled_with_positions_that_no_call_selects() -> None:
    tokens = selections(4, 2, 10, 0, context=8192)
    filled = filling(tokens, 2 * TOP_K, 8192)
    assert filled.shape == (2, 2, TOP_K)
    assert filled.max() < 8192 - PAGE_SIZE
    for req in range(2):
        assert len(filled[:, req].unique()) == 2 * TOP_K
        assert not np.intersect1d(filled[:, req], tokens[:, req]).size
    cell = Cell(torch.zeros((1, 2 * 8192, 1), dtype=torch.uint8), 2, 8192, 2 * TOP_K, "cpu")
    for call in (*filled, *tokens):
        cell.call(call, torch.tensor([8192, 8192]), torch.empty_like(call))
    evicted = cell.counted()[2]
    # Each of the tokens' misses; and the newest position has an entry, too.
    assert evicted == 2 * (TOP_K + 3 * round(TOP_K / 10) + 1)
    with pytest.raises(ValueError, match=r"5465 of 8192 positions .* take 6144; raise --context"):
        filling(tokens, 3 * TOP_K, 8192)


def test_a_cell_sees_wrong_bytes() -> None:
    host = torch.randint(0, 256, (1, 130, 4), dtype=torch.uint8)
    cell = Cell(host, 2, 12, 5, "cpu")
    with pytest.raises(ValueError, match="3 requests of 12 tokens do not fit in 130 host slots"):
        Cell(host, 3, 12, 5, "cpu")
    selected = torch.tensor([[3, 8, 1], [10, 9, 0]], dtype=torch.int32)
    out = torch.empty_like(selected)
    cell.prepare(selected, torch.tensor([12, 12]), out)
    assert cell.counted() == [0, 0, 0]
    assert not cell.dev.any()
    cell.call(selected, torch.tensor([12, 12]), out)
    cell.verify(selected, out)
    assert cell.counted() == [0, 6, 0]
    cell.dev[0, out[1, 2]] += 1
    with pytest.raises(RuntimeError, match="row 1"):
        cell.verify(selected, out)


@pytest.mark.parametrize("miss_percent", [pytest.param(0, marks=pytest.mark.slow), 30])
def test_tokens_of_drafts_unite_and_miss_as_they_promise_in_calls_of_any_number(miss_percent: int) -> None:
    tokens = selections(NUM_DRAFTED_TOKENS, 1, miss_percent, 0, 1.9)
    unions = [len(tokens[step : step + 4].unique()) / TOP_K for step in range(0, NUM_DRAFTED_TOKENS - 4, 7)]
    assert unions == pytest.approx([1.9] * len(unions), abs=0.001)
    assert all(len(token.unique()) == TOP_K for token in tokens)
    num_misses = round(TOP_K * miss_percent / 100) * (NUM_DRAFTED_TOKENS - NUM_WARM_DRAFTED_TOKENS)
    for num_new in (1, 3, 4):
        cell = Cell(torch.zeros((1, CONTEXT, 1), dtype=torch.uint8), 1, CONTEXT, DRAFTS_CAPACITY, "cpu", 4)
        calls = calls_of(tokens, num_new)
        assert torch.equal(calls.view(tokens.shape), tokens)
        for number, call in enumerate(calls):
            if number == NUM_WARM_DRAFTED_TOKENS // num_new:
                cell.state.counters.zero_()
            cell.call(call, torch.tensor([CONTEXT]), torch.empty_like(call))
        assert cell.counted()[1] == num_misses
        assert not cell.state.error_flags.any()
    with pytest.raises(
        ValueError, match=r"31% misses: a token replaces 614 of 2048 positions at a union of 1\.9"
    ):
        selections(2, 1, 31, 0, 1.9)
