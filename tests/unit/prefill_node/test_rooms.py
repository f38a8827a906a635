"""The room states: what leads where, and what is remembered."""

from __future__ import annotations

import pytest

from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.engine.messages import Generate
from hisparse_pd.prefill_node.rooms import ENDED, MOVES, EndedRoom, IllegalRoomMove, RoomState, RoomTable
from hisparse_pd.protocol.messages import Room

ROOM = Room(42)


def test_every_illegal_move_names_the_room_and_changes_nothing() -> None:
    for state in RoomState:
        for target in set(RoomState) - MOVES[state]:
            table = RoomTable()
            record = table.open(ROOM, RoomState.WAITING_REQUEST, 0.0)
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


def test_a_room_is_opened_once_and_in_a_waiting_state() -> None:
    table = RoomTable()
    record = table.open(ROOM, RoomState.WAITING_REQUEST, 0.0)
    with pytest.raises(IllegalRoomMove, match="room 42 is opened"):
        table.open(ROOM, RoomState.WAITING_BOOTSTRAP, 0.0)
    table.move(record, RoomState.FAILED, 1.0)
    with pytest.raises(IllegalRoomMove, match="room 42 is opened"):
        table.open(ROOM, RoomState.WAITING_BOOTSTRAP, 0.0)
    with pytest.raises(IllegalRoomMove, match="room 43 cannot start in SENDING"):
        table.open(Room(43), RoomState.SENDING, 0.0)


def test_an_ended_room_leaves_nothing_but_its_memory() -> None:
    table = RoomTable()
    record = table.open(ROOM, RoomState.WAITING_BOOTSTRAP, 0.0)
    table.set_request(record, Generate("request", 42, 1, SamplingParams(1), "host", 1), 0.0)
    assert table.of_request("request") is record
    record.end_status, record.end_error, record.batch_failed = 502, "peer gone", True
    table.move(record, RoomState.FAILED, 1.0)
    assert table.ended(ROOM) == EndedRoom(502, "peer gone", batch_failed=True)
    assert table.get(ROOM) is table.of_request("request") is None
    assert len(table) == table.count(*RoomState) == 0


def test_the_memory_of_ended_rooms_is_bounded() -> None:
    table = RoomTable(max_ended_rooms=3)
    for number in range(5):
        table.move(table.open(Room(number), RoomState.WAITING_REQUEST, 0.0), RoomState.FAILED, 0.0)
    assert [table.ended(Room(number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_rooms_of_a_state_come_in_order_of_entry() -> None:
    table = RoomTable()
    records = [table.open(Room(number), RoomState.WAITING_REQUEST, 0.0) for number in range(3)]
    for record in reversed(records):
        table.move(record, RoomState.QUEUED, 1.0)
    assert [record.room for record in table.in_state(RoomState.QUEUED)] == [2, 1, 0]
