"""The states of rooms: which moves are legal, and what is remembered of ended rooms."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import (
    ENDED,
    MOVES,
    EndedRequest,
    IllegalPrefillMove,
    PrefillRequest,
    PrefillRequests,
    PrefillState,
)
from hisparse_pd.protocol.messages import Room
from tests.unit.prefill_node.support import bootstrap_of, prompt

ROOM = Room(42)
PEER = Peer("node", "host:1", b"", 16, {}, 0.0)


def opened(table: PrefillRequests, room: int = ROOM, num_tokens: int = 3, **changes: Any) -> PrefillRequest:
    request = PrefillRequest(PEER, bootstrap_of(room, prompt(room, num_tokens), **changes), 0.0)
    table.open(request)
    return request


def test_every_illegal_move_names_the_room_and_changes_nothing() -> None:
    for state in PrefillState:
        for target in set(PrefillState) - MOVES[state]:
            table = PrefillRequests()
            request = opened(table)
            request.state = state
            with pytest.raises(IllegalPrefillMove, match=f"room 42 .*{state.name} to {target.name}"):
                table.move(request, target, 1.0)
            assert request.state is state
            assert table.get(ROOM) is request


def test_every_state_leads_to_an_end() -> None:
    for state in PrefillState:
        reachable, frontier = {state}, [state]
        while frontier:
            new = MOVES[frontier.pop()] - reachable
            reachable |= new
            frontier.extend(new)
        assert reachable & ENDED


def test_a_room_is_opened_once_and_queued() -> None:
    table = PrefillRequests()
    request = opened(table)
    with pytest.raises(IllegalPrefillMove, match="room 42 is opened"):
        opened(table)
    table.move(request, PrefillState.FAILED, 1.0)
    with pytest.raises(IllegalPrefillMove, match="room 42 is opened"):
        opened(table)
    sending = PrefillRequest(PEER, bootstrap_of(43, [5, 6, 7]), 0.0, state=PrefillState.SENDING)
    with pytest.raises(IllegalPrefillMove, match="room 43 cannot start in SENDING"):
        table.open(sending)


def test_an_ended_room_leaves_nothing_but_its_memory() -> None:
    """The room's prompt is freed, too."""
    table = PrefillRequests()
    request = opened(table, num_tokens=1000)
    request.end_status, request.end_error, request.batch_failed = 502, "peer gone", True
    table.move(request, PrefillState.FAILED, 1.0)
    assert table.ended(ROOM) == EndedRequest(502, "peer gone", batch_failed=True)
    assert table.get(ROOM) is None
    assert len(table) == table.count(*PrefillState) == table.num_queued_tokens == 0
    ids = weakref.ref(request.token_ids)
    del request
    gc.collect()
    assert ids() is None


def test_the_memory_of_ended_rooms_is_bounded() -> None:
    table = PrefillRequests(max_ended=3)
    for number in range(5):
        table.move(opened(table, number), PrefillState.FAILED, 0.0)
    assert [table.ended(Room(number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_rooms_of_a_state_come_in_order_of_entry() -> None:
    table = PrefillRequests()
    requests = [opened(table, number) for number in range(3)]
    for request in reversed(requests):
        table.move(request, PrefillState.COMPUTING, 1.0)
    assert [request.room for request in table.in_state(PrefillState.COMPUTING)] == [2, 1, 0]


def test_a_room_that_begins_anew_goes_on_with_that_phase() -> None:
    table = PrefillRequests()
    first, second = opened(table, 1), opened(table, 2)
    table.move(first, PrefillState.COMPUTING, 1.0)
    table.move(first, PrefillState.QUEUED, 2.0)
    assert list(table.in_state(PrefillState.QUEUED)) == [first, second]
    assert table.num_queued_tokens == 6
    table.move(first, PrefillState.COMPUTING, 3.0)
    assert table.num_queued_tokens == 3
    table.move(first, PrefillState.SENDING, 5.0)
    assert (first.phases.secs("queue"), first.phases.secs("prefill")) == (3.0, 2.0)


def test_requests_that_begin_anew_wait_in_order_of_arrival() -> None:
    """Prompts are served, and expire, in this order."""
    table = PrefillRequests()
    arrived = [opened(table, room) for room in range(1, 5)]
    begun = arrived[:1] + arrived[2:]  # the second one waits for the pages of another prompt
    for request in begun:
        table.move(request, PrefillState.COMPUTING, 1.0)
    for request in begun:
        table.move(request, PrefillState.QUEUED, 2.0)
    assert list(table.in_state(PrefillState.QUEUED)) == arrived


def test_tokens_count_while_their_rooms_wait() -> None:
    table = PrefillRequests()
    first, second = opened(table, 1, 30), opened(table, 2, 500)
    assert table.num_queued_tokens == 530
    table.move(first, PrefillState.COMPUTING, 1.0)
    assert table.num_queued_tokens == 500
    table.move(second, PrefillState.FAILED, 1.0)
    table.move(first, PrefillState.SENDING, 1.0)
    assert table.num_queued_tokens == 0


@pytest.mark.I5
@pytest.mark.parametrize(
    ("num_resumed", "first_stepped"),
    [(0, 96), (3, 96), (4, 80), (30, 64), (99, 0)],
    ids=["none", "same page", "page before", "some", "all"],
)
def test_the_page_of_the_token_before_the_resumed_ones_is_of_steps(
    num_resumed: int, first_stepped: int
) -> None:
    """That token was the newest one of the first step, and what the page has before it was the prompt's tail.
    The decode node's pages count."""
    request = opened(PrefillRequests(), num_tokens=100, num_resumed_tokens=num_resumed)
    assert request.num_computed_tokens == 99
    assert request.first_stepped == first_stepped
