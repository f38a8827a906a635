"""The states of rooms: which moves are legal, and what is remembered of ended rooms."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.rooms import (
    ENDED,
    MOVES,
    EndedRoom,
    IllegalRoomMove,
    RoomRecord,
    RoomState,
    RoomTable,
)
from hisparse_pd.protocol.messages import Room
from tests.unit.prefill_node.support import bootstrap_of, prompt

ROOM = Room(42)
PEER = Peer("node", "host:1", b"", 16, {}, 0.0)


def opened(table: RoomTable, room: int = ROOM, num_tokens: int = 3, **changes: Any) -> RoomRecord:
    record = RoomRecord(PEER, bootstrap_of(room, prompt(room, num_tokens), **changes), 0.0)
    table.open(record)
    return record


def test_every_illegal_move_names_the_room_and_changes_nothing() -> None:
    for state in RoomState:
        for target in set(RoomState) - MOVES[state]:
            table = RoomTable()
            record = opened(table)
            record.state = state
            with pytest.raises(IllegalRoomMove, match=f"room 42 .*{state.name} to {target.name}"):
                table.move(record, target, 1.0)
            assert record.state is state
            assert table.get(ROOM) is record


def test_every_state_leads_to_an_end() -> None:
    for state in RoomState:
        reachable, frontier = {state}, [state]
        while frontier:
            new = MOVES[frontier.pop()] - reachable
            reachable |= new
            frontier.extend(new)
        assert reachable & ENDED


def test_a_room_is_opened_once_and_queued() -> None:
    table = RoomTable()
    record = opened(table)
    with pytest.raises(IllegalRoomMove, match="room 42 is opened"):
        opened(table)
    table.move(record, RoomState.FAILED, 1.0)
    with pytest.raises(IllegalRoomMove, match="room 42 is opened"):
        opened(table)
    sending = RoomRecord(PEER, bootstrap_of(43, [5, 6, 7]), 0.0, state=RoomState.SENDING)
    with pytest.raises(IllegalRoomMove, match="room 43 cannot start in SENDING"):
        table.open(sending)


def test_an_ended_room_leaves_nothing_but_its_memory() -> None:
    """The room's prompt is freed, too."""
    table = RoomTable()
    record = opened(table, num_tokens=1000)
    record.end_status, record.end_error, record.batch_failed = 502, "peer gone", True
    table.move(record, RoomState.FAILED, 1.0)
    assert table.ended(ROOM) == EndedRoom(502, "peer gone", batch_failed=True)
    assert table.get(ROOM) is None
    assert len(table) == table.count(*RoomState) == table.num_queued_tokens == 0
    ids = weakref.ref(record.token_ids)
    del record
    gc.collect()
    assert ids() is None


def test_the_memory_of_ended_rooms_is_bounded() -> None:
    table = RoomTable(max_ended_rooms=3)
    for number in range(5):
        table.move(opened(table, number), RoomState.FAILED, 0.0)
    assert [table.ended(Room(number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_rooms_of_a_state_come_in_order_of_entry() -> None:
    table = RoomTable()
    records = [opened(table, number) for number in range(3)]
    for record in reversed(records):
        table.move(record, RoomState.COMPUTING, 1.0)
    assert [record.room for record in table.in_state(RoomState.COMPUTING)] == [2, 1, 0]


def test_tokens_count_while_their_rooms_wait() -> None:
    table = RoomTable()
    first, second = opened(table, 1, 30), opened(table, 2, 500)
    assert table.num_queued_tokens == 530
    table.move(first, RoomState.COMPUTING, 1.0)
    assert table.num_queued_tokens == 500
    table.move(second, RoomState.FAILED, 1.0)
    table.move(first, RoomState.SENDING, 1.0)
    assert table.num_queued_tokens == 0


@pytest.mark.I5
@pytest.mark.parametrize(
    ("num_resumed", "first_stepped"),
    [(0, 99), (1, 98), (30, 69), (99, 0)],
    ids=["none", "one", "some", "all"],
)
def test_the_token_before_the_resumed_ones_is_of_a_step_too(num_resumed: int, first_stepped: int) -> None:
    """It was the first step's newest token. Without resumed tokens no computed token is of a step."""
    record = opened(RoomTable(), num_tokens=100, num_resumed_tokens=num_resumed)
    assert record.num_computed_tokens == 99
    assert record.first_stepped == first_stepped
