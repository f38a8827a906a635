"""Books of the decode node's requests: legal moves, and what is free when a request has ended."""

from __future__ import annotations

from typing import Any

import pytest

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.pools import Holding, Pools, SlotCounts, Stage
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.quarantine import Quarantine, Quarantined
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_index import DuplicateRoom
from hisparse_pd.decode_node.request_states import IllegalMove, RequestState
from hisparse_pd.decode_node.step_plan import Admission, Exchange, StepPlan
from hisparse_pd.protocol.messages import Room
from tests.books import PEER, carry_out, end, enqueue, make_request

TOTALS = SlotCounts(host=100, device=64, index=128, lookup=200, aux=4, req_row=4)
NEED = SlotCounts(host=10, device=17, index=10, lookup=10, aux=1, req_row=1)


def landed(rooms: LiveRequests, mode: Mode = Mode.HISPARSE) -> Request:
    request = enqueue(rooms, make_request())
    admission = Admission(request, mode, NEED, 8 if mode is Mode.HISPARSE else 0)
    carry_out(rooms, StepPlan(admissions=(admission,)))
    return request


@pytest.mark.I2
def test_integrity_finds_a_holding_that_nobody_knows() -> None:
    rooms = LiveRequests(Pools(TOTALS, 16), 1.0)
    rooms.pools.reserve(Room(1), NEED)
    with pytest.raises(PoolIntegrityError, match="landing: 1 found, 0 known"):
        rooms.check_integrity()


def test_an_illegal_move_names_the_room() -> None:
    request = make_request(77)
    with pytest.raises(IllegalMove, match="room 77 cannot go from connecting to running"):
        request.move(RequestState.RUNNING)
    with pytest.raises(IllegalMove, match="room 77 is connecting and owns nothing"):
        _ = request.req_row


@pytest.mark.I1
@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("batch_failed", [False, True])
def test_the_release_path_keeps_exactly_what_may_still_be_written(mode: Mode, batch_failed: bool) -> None:
    rooms = LiveRequests(Pools(TOTALS, 16), quarantine_secs=5.0)
    end(rooms, landed(rooms, mode))
    used = rooms.pools.totals - rooms.pools.free
    kv = SlotCounts(host=16) if mode is Mode.HISPARSE else SlotCounts(device=32)
    assert used == rooms.pools.used(Stage.QUARANTINED) == kv + SlotCounts(index=16, aux=1)
    with pytest.raises(DuplicateRoom, match="quarantined"):
        rooms.open(make_request(1))
    rooms.quarantine.quiet(Room(1), batch_failed, now=1.0)
    assert (rooms.pools.free == rooms.pools.totals) is not batch_failed
    rooms.quarantine.expire(6.0)
    assert rooms.pools.free == rooms.pools.totals


@pytest.mark.I2
@pytest.mark.I7
def test_what_has_landed_is_freed_at_once() -> None:
    rooms = LiveRequests(Pools(TOTALS, 16), quarantine_secs=5.0)
    request = landed(rooms)
    assert rooms.expired(9.0) == [request], "what is on its way has a deadline"
    rooms.start(request)
    assert rooms.pools.used(Stage.RUNNING) == rooms.pools.rounded(NEED) - SlotCounts(aux=1)
    assert rooms.expired(1e9) == [], "who runs ends by itself"
    end(rooms, request)
    assert rooms.pools.free == rooms.pools.totals
    rooms.open(make_request(1))  # The room may be used again.


def test_a_dense_request_leaves_its_pages_for_a_hot_buffer() -> None:
    rooms = LiveRequests(Pools(TOTALS, 16), quarantine_secs=5.0)
    request = landed(rooms, Mode.DENSE)
    rooms.start(request)
    assert request.reserved_tokens == 16, "of 32 device and 16 index slots"
    rooms.replace_device_slots(Exchange(request, hot_capacity=16))
    assert (request.mode, request.hot_capacity, request.num_device_slots) == (Mode.HISPARSE, 16, 16)
    assert request.reserved_tokens == 16
    rooms.grow(request, SlotCounts(host=16, index=16, lookup=16))
    assert (request.reserved_tokens, request.owned_slots.index) == (32, 32)
    rooms.check_integrity()


@pytest.mark.parametrize("state", [RequestState.CONNECTING, RequestState.WAITING])
def test_a_request_that_moves_to_another_rank_keeps_its_place_in_line(state: RequestState) -> None:
    requests = LiveRequests(Pools(TOTALS, 16), 60.0)
    ranks = [PEER._replace(rank=rank) for rank in range(2)]
    for number in range(6):
        peer = ranks[0] if number < 4 else ranks[1]
        requests.open(make_request(number, 20, 4, peer=peer, deadline=10.0))
    moved = [request for request in requests.all() if request.room in (1, 3)]
    for request in moved:
        if state is RequestState.WAITING:
            requests.queue(request, RequestState.WAITING, 100.0)
        requests.queue(request, RequestState.CONNECTING, 20.0, ranks[1])
    assert [request.room for request in requests.queued(RequestState.CONNECTING, ranks[1])] == [1, 3, 4, 5]
    assert [request.room for request in requests.queued(RequestState.CONNECTING, ranks[0])] == [0, 2]
    assert requests.queued_at(RequestState.WAITING) == []
    assert {request.room for request in requests.expired(15.0)} == {0, 2, 4, 5}
    assert {request.room for request in requests.expired(25.0)} == set(range(6))


@pytest.mark.I1
@pytest.mark.parametrize(
    ("happens", "free_at"),
    [
        ([], None),
        ([("failed",), ("quiet", False, 5.0)], 15.0),
        ([("gone", "second", 0.0)], None),
        ([("gone", "first", 100.0), ("gone", "first", 105.0)], 110.0),
    ],
)
def test_a_room_is_in_quarantine_until_nothing_can_land_any_more(
    happens: list[tuple[Any, ...]], free_at: float | None
) -> None:
    """Time alone frees nothing, and a failed batch is not forgotten when the room goes quiet."""
    freed: list[Holding] = []
    quarantine, holding = (
        Quarantine(10.0, lambda entry: freed.append(entry.holding)),
        Holding(Room(1), Stage.QUARANTINED),
    )
    quarantine.add(Quarantined(Room(1), holding, PEER, "first", since=0.0))
    for what, *arguments in happens:
        match what:
            case "quiet":
                quarantine.quiet(Room(1), *arguments)
            case "failed":
                quarantine.failed(Room(1))
            case "gone":
                quarantine.instance_gone(*arguments)
    quarantine.expire(1e9 if free_at is None else free_at - 0.1)
    assert Room(1) in quarantine
    if free_at is not None:
        quarantine.expire(free_at)
        assert (freed, len(quarantine)) == ([holding], 0)
