"""Which drafts a step takes."""

from __future__ import annotations

from typing import Any

import pytest

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.decode_node.drafting import max_verifiable
from hisparse_pd.decode_node.request import Request
from tests import books

TOP_K, MAX_NEW, MAX_CONTEXT = 64, 4, 1000


def make_request(num_prompt_tokens: int, max_new_tokens: int = 100, **values: Any) -> Request:
    values.setdefault("output_token_ids", [5])
    values.setdefault("reserved_tokens", 2000)
    return books.make_request(1, num_prompt_tokens, max_new_tokens, **values)


def verifiable(request: Request, num_drafts: int = 3) -> int:
    return max_verifiable(request, num_drafts, top_k=TOP_K, max_new=MAX_NEW, max_context=MAX_CONTEXT)


@pytest.mark.I6
def test_a_dense_request_needs_slots_below_the_contexts_end() -> None:
    dense: dict[str, Any] = {"mode": Mode.DENSE}
    assert verifiable(make_request(100, **dense)) == 3
    assert [verifiable(make_request(100, reserved_tokens=101 + n, **dense)) for n in range(4)] == [0, 1, 2, 3]
    assert verifiable(make_request(100, reserved_tokens=100, **dense)) == 0
    assert [verifiable(make_request(999 - n, **dense)) for n in range(4)] == [0, 1, 2, 3]
    assert verifiable(make_request(100, is_speculative=False, **dense)) == 0


@pytest.mark.I3
def test_a_hot_buffer_has_room_for_all_that_may_be_selected_or_for_the_sequence() -> None:
    capacities = [TOP_K + 4, 2 * TOP_K + 3, 2 * TOP_K + 4, 3 * TOP_K + 4, 4 * TOP_K + 3, 4 * TOP_K + 4]
    assert [verifiable(make_request(500, hot_capacity=each)) for each in capacities] == [0, 0, 1, 2, 2, 3]
    # A hot buffer that holds all new positions at their own places needs nothing more.
    assert verifiable(make_request(96, hot_capacity=100)) == 3
    assert verifiable(make_request(97, hot_capacity=100)) == 0


def test_drafts_are_taken_once_and_not_behind_the_last_token() -> None:
    request = make_request(10, max_new_tokens=4, draft_token_ids=[1, 2, 3])
    assert request.take_drafts(3) == [1, 2]
    assert request.take_drafts(3) == []
    request.draft_token_ids = [1, 2, 3]
    assert request.take_drafts(1) == [1]
    request.draft_token_ids, request.num_in_flight = [1, 2, 3], 1
    assert request.take_drafts(3) == [1]
