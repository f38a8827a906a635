"""Plans by which hisparse requests become resident, share pages, and leave them for others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.decode_node.making_room import make_room
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.reserve import order_ends
from hisparse_pd.decode_node.step_plan import Exchange, Fill, StepPlan
from hisparse_pd.decode_node.swap_counts import SwapCounts
from tests.books import carry_out, end
from tests.unit.decode_node.plan_node import (
    FALSE,
    RESIDENTS,
    TRUE,
    Node,
    end_fills,
    have_missed,
    request_slots,
    settled,
)


def node_with_device(num_slots: int, **limits: Any) -> Node:
    """Return a node with ``num_slots`` device slots. ``limits``: others than those of RESIDENTS."""
    return Node(replace(RESIDENTS, totals=structs.replace(RESIDENTS.totals, device=num_slots), **limits))


def filling(node: Node) -> list[Request]:
    return [request for request in node.rooms.select(RequestState.RUNNING) if request.num_page_slots]


def share_pages(node: Node) -> None:
    """Do what a node does once steps of its residents are read."""
    for request in node.rooms.select(RequestState.RUNNING):
        if request.is_resident:
            node.rooms.share_resident(request, node.limits.in_pages(node.limits.min_capacity(request)))
    node.rooms.check_integrity()


def residents_of(requests: list[Request]) -> list[bool]:
    return [request.is_resident for request in requests]


def test_hisparse_requests_become_resident_while_slots_are_free() -> None:
    """Each takes 112 of 512 slots for its 81 tokens and 16 more; 64 stay free for a hot buffer. Its hot
    buffer is there until the pages are filled."""
    node = Node(RESIDENTS)
    requests = [node.arrive(TRUE, 80, max_new_tokens=40) for _ in range(4)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64] * 4
    have_missed(requests)
    plan = node.step()
    assert [(each.request, each.num_page_slots) for each in plan.fills] == [(requests[0], 112)]
    assert (requests[0].num_device_slots, requests[0].hot_capacity) == (64 + 112, 64)
    assert node.plan() == StepPlan(), "one at a time without a bound in tokens"
    end_fills(node)
    assert (requests[0].num_device_slots, requests[0].is_resident) == (112, True)
    requests[1].is_filling = True
    assert node.plan() == StepPlan(), "rows come before pages"
    requests[1].is_filling = False
    settled(node)
    assert residents_of(requests) == [True, True, True, True]
    assert [request.num_retractions for request in requests] == [0] * 4
    assert node.rooms.pools.free.device == 64
    for request in requests:
        assert request.has_slots_for_next


def test_pages_of_several_requests_are_filled_at_once_up_to_a_bound() -> None:
    """Each takes 112 of 800 slots beside its 64, and has 80 tokens; two have fewer than 160."""
    node = node_with_device(800, fill_tokens=160)
    requests = [node.arrive(TRUE, 80, max_new_tokens=40) for _ in range(4)]
    node.step()
    have_missed(requests)
    for num_filling in (1, 2, 2):
        node.step()
        assert len(filling(node)) == num_filling
    end_fills(node)
    node.step()
    node.step()
    assert filling(node) == requests[2:]


def test_a_common_beginning_is_filled_once() -> None:
    """Two requests of one family do not fill at once, but one of another family does beside the first."""
    node = node_with_device(1600, fill_tokens=1000)
    requests = [node.arrive(TRUE, 160, max_new_tokens=40, family=n) for n in (1, 1, 2)]
    node.step()
    have_missed(requests)
    for _ in range(3):
        node.step()
    assert filling(node) == [requests[0], requests[2]]
    node.rooms.end_fill(requests[0])
    assert requests[0].will_share
    assert node.plan() == StepPlan(), "the next step shares the pages"
    share_pages(node)
    node.step()
    assert (requests[1].num_resident_pages, requests[1].num_page_slots) == (9, 48)


@pytest.mark.I2
def test_pages_that_a_fill_shares_outlive_the_request_that_filled_them() -> None:
    """It may be released by a failure within the plan, before the fill has its turn."""
    node = node_with_device(1600, fill_tokens=1000)
    first, second = (node.arrive(TRUE, 160, max_new_tokens=40, family=1) for _ in range(2))
    node.step()
    have_missed([first, second])
    node.step()
    node.rooms.end_fill(first)
    share_pages(node)
    (fill,) = node.plan().fills
    assert (fill.request, fill.num_resident_pages) == (second, 9)
    node.rooms.use_resident(fill)
    end(node.rooms, first)
    node.rooms.begin_fill(fill)
    assert (second.num_resident_pages, second.num_page_slots) == (9, fill.num_page_slots)
    node.rooms.check_integrity()


@pytest.mark.I2
def test_pages_that_residents_share_are_free_once_when_the_last_of_them_leaves() -> None:
    """They count as free at the plan's end, and no more at the ends of those that have left them."""
    node = node_with_device(1600, fill_tokens=1000)
    residents = [node.arrive(TRUE, 160, max_new_tokens=40, family=1) for _ in range(2)]
    node.step()
    for _ in residents:
        have_missed(residents)
        node.step()
        end_fills(node)
        share_pages(node)
    assert [request.num_resident_pages for request in residents] == [9, 9]
    draft = node.draft()
    for number, request in enumerate(residents):
        gain = request.num_device_slots - 32
        available = draft.available.device
        draft.make_hot_buffer(Exchange(request, 32), SlotCounts(device=gain))
        assert draft.available.device - available == gain + number * 144
    assert order_ends(draft.available, ((r, draft._claim(r)) for r in residents), {}, 16).left[1] == 1600
    carry_out(node.rooms, StepPlan(exchanges=tuple(draft.exchanges.values())), limits=node.limits)
    assert node.rooms.available == draft.available


@pytest.mark.I2
def test_pages_that_are_being_filled_are_given_up_for_who_waits_and_hot_buffers_stay() -> None:
    node = node_with_device(320)
    requests = [node.arrive(TRUE, 100, max_new_tokens=20, family=n) for n in range(2)]
    node.step()
    settled(node)
    assert residents_of(requests) == [True, True]
    node.rooms.replace_device_slots(Exchange(requests[0], 64))
    have_missed(requests[:1])
    node.step()
    hot_buffer = request_slots(requests[0])[:64]
    assert filling(node) == requests[:1]
    later = node.arrive(TRUE, 100, max_new_tokens=20)
    assert [(each.request, each.hot_capacity) for each in node.plan().exchanges] == [(requests[0], 64)]
    node.step()
    assert (requests[0].hot_capacity, requests[0].num_page_slots) == (64, 0)
    assert request_slots(requests[0]) == hot_buffer
    assert residents_of([*requests, later]) == [False, True, False]
    assert requests[0].num_retractions == 1, "that of the exchange in this test"
    end(node.rooms, later)
    node.rooms.check_integrity()


def test_pages_grow_while_they_are_filled_and_are_given_up_if_there_is_none() -> None:
    """A dense request takes what is left when the first one's pages have grown once."""
    node = node_with_device(304)
    request = node.arrive(TRUE, 80, max_new_tokens=90)
    node.step()
    have_missed([request])
    node.step()
    assert request.num_page_slots == 112
    node.run(request, 32)
    node.step()
    assert request.num_page_slots == 128
    assert request.owned_slots.host == 128
    dense = node.arrive(FALSE, 112, max_new_tokens=1)
    node.step()
    assert dense.state is RequestState.RUNNING
    assert node.rooms.pools.free.device == 0
    node.run(request, 16)
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [(request, 64)]
    assert (request.num_page_slots, request.num_device_slots) == (0, 64)
    assert request.has_slots_for_next


def test_residents_have_the_pages_of_a_common_beginning_once() -> None:
    """Of 448 slots each of four would take 192. The first shares the 144 of its whole pages, and the others
    take 48 beside them, for what is behind and what they grow into."""
    node = node_with_device(448, fill_tokens=1000)
    requests = [node.arrive(TRUE, 160 + n, max_new_tokens=40, family=1) for n in range(4)]
    node.step()
    assert node.rooms.pools.free.device == 448 - 4 * 64
    have_missed(requests)
    node.step()
    end_fills(node)
    assert residents_of(requests) == [True, False, False, False]
    assert (requests[0].num_device_slots, requests[0].num_resident_pages) == (192, 0)
    share_pages(node)
    assert (requests[0].num_device_slots, requests[0].num_resident_pages) == (48, 9)
    settled(node)
    assert residents_of(requests) == [True] * 4
    assert [request.num_resident_pages for request in requests] == [9] * 4
    assert [request.num_device_slots for request in requests] == [48] * 4
    for request in requests:
        assert request.has_slots_for_next
        assert request.extents(PoolKind.DEVICE)[0].start == requests[0].extents(PoolKind.DEVICE)[0].start
    for request in requests[:3]:
        end(node.rooms, request)
        node.rooms.check_integrity()
    assert node.rooms.pools.free.device == 448 - 144 - 48, "the last user keeps them"
    late = node.arrive(FALSE, 300)
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [(requests[3], 64)]
    assert late.state is RequestState.RUNNING
    assert (requests[3].num_device_slots, requests[3].num_resident_pages) == (64, 0)
    end(node.rooms, requests[3])
    node.rooms.check_integrity()
    free = 448 - late.num_device_slots
    assert node.rooms.pools.free.device == free, "nobody keeps what is in the host pool, too"


def test_a_resident_gives_up_pages_that_it_would_share_before_others_shrink() -> None:
    """It has most slots, though only 48 of them are its own; the full size of 64 is 16 more than these."""
    node = node_with_device(320)
    resident = node.arrive(TRUE, 160, max_new_tokens=40, family=1)
    node.step()
    settled(node)
    share_pages(node)
    assert (resident.num_device_slots, resident.num_resident_pages) == (48, 9)
    others = [node.arrive(TRUE, 160, max_new_tokens=40) for _ in range(3)]
    plan = node.step()
    assert [each.request for each in plan.exchanges] == [resident]
    assert [request.hot_capacity for request in (resident, *others)] == [64] * 4
    assert node.rooms.pools.free.device == 320 - 4 * 64


def test_a_plan_counts_what_residents_leave_who_share_with_each_other_alone() -> None:
    """Both leave in one plan: the shared pages are free then, and each owns a hot buffer of 64."""
    node = node_with_device(512)
    residents = []
    for _ in range(2):
        residents.append(node.arrive(TRUE, 160, max_new_tokens=130, family=1))
        node.step()
        settled(node)
        share_pages(node)
    assert [request.num_resident_pages for request in residents] == [9, 9]
    for _ in range(6):
        for request in residents:
            node.run(request, 12)
        node.step()
    draft = node.draft()
    assert all(request.num_device_slots > 64 for request in residents)
    num_own = min(request.num_device_slots for request in residents) - 64
    assert make_room(draft, draft.spare_device() + num_own + 1, dense_may_leave=False)
    assert set(draft.exchanges) == set(residents)
    carry_out(node.rooms, StepPlan(exchanges=tuple(draft.exchanges.values())))
    assert draft.available.device == node.rooms.available.device == 512 - 2 * 64
    assert [draft._changed[request].owned.device for request in residents] == [64, 64]


@pytest.mark.I3
def test_a_resident_keeps_pages_of_its_own_that_another_one_shares_already() -> None:
    """Both became resident before either shared, as local requests that begin at once do. Steps find the
    second one's items in its own pages, so it cannot take the first one's for them."""
    node = node_with_device(448)
    first, second = (node.arrive(TRUE, 160, max_new_tokens=40, family=1) for _ in range(2))
    node.step()
    for request in (first, second):
        node.rooms.begin_fill(Fill(request, num_page_slots=144, num_resident_pages=0))
        node.rooms.end_fill(request)
    pages = second.extents(PoolKind.DEVICE)
    share_pages(node)
    assert [request.num_resident_pages for request in (first, second)] == [7, 0]
    assert second.extents(PoolKind.DEVICE) == pages
    for request in (first, second):
        end(node.rooms, request)
    node.rooms.check_integrity()
    assert node.rooms.pools.free.device == 448


def test_shared_pages_of_residents_are_counted_on_at_their_last_users_end() -> None:
    """A dense request needs 304 of 400 slots to its end, and two residents have 48 each and 144 together. It
    can be admitted because all of these are free at their end; a third one may share the 144, too."""
    node = node_with_device(400)
    residents = [node.arrive(TRUE, 160, max_new_tokens=40, family=1) for _ in range(2)]
    node.step()
    settled(node)
    share_pages(node)
    settled(node)
    assert [request.num_device_slots for request in residents] == [48, 48]
    dense = node.arrive(FALSE, 64, max_new_tokens=240)
    node.step()
    assert dense.state is RequestState.RUNNING
    third = node.arrive(TRUE, 160, max_new_tokens=40, family=1)
    num_steps = 0
    while running := node.rooms.select(RequestState.RUNNING):
        for request in running:
            if not request.has_next_step:
                end(node.rooms, request)
            elif request.has_slots_for_next:
                node.run(request, 1)
        node.step()
        settled(node)
        share_pages(node)
        num_steps += 1
        assert num_steps < 400
    assert third.state is RequestState.ENDED
    assert node.rooms.available == node.limits.totals


def test_the_one_that_saves_most_for_its_slots_becomes_resident_first() -> None:
    """The third misses most, and needs more slots; the fourth misses as the second, and ends sooner."""
    node = Node(RESIDENTS)
    lives = ((80, 60), (80, 60), (160, 60), (80, 30))
    requests = [node.arrive(TRUE, length, max_new_tokens=num) for length, num in lives]
    node.step()
    for request, num_misses in zip(requests, (20, 50, 55, 50), strict=True):
        request.row_counters = SwapCounts(hits=100 - num_misses, misses=num_misses)
    (fill,) = node.step().fills
    assert fill.request is requests[1]


@pytest.mark.parametrize(
    ("num_tokens", "max_new_tokens", "miss_share", "is_resident"),
    [
        (100, 20, 0.5, True),
        (100, 10, 0.5, False),
        (100, 20, 0.2, False),
        (100, 20, 0.0, False),
        (40, 2, 0.0, False),
    ],
)
def test_pages_are_filled_only_if_that_saves_as_many_copies(
    num_tokens: int, max_new_tokens: int, miss_share: float, is_resident: bool
) -> None:
    """Of 20 selected positions a step misses half, in up to 19 steps: 190 for 100."""
    node = Node(RESIDENTS)
    request = node.arrive(TRUE, num_tokens, max_new_tokens)
    node.step()
    settled(node, miss_share)
    assert request.is_resident == is_resident


def test_residents_make_room_for_who_waits_before_hot_buffers_shrink() -> None:
    node = node_with_device(320)
    requests = [node.arrive(TRUE, 100, max_new_tokens=20) for _ in range(2)]
    node.step()
    settled(node)
    assert residents_of(requests) == [True, True]
    later = [node.arrive(TRUE, 100, max_new_tokens=20) for _ in range(3)]
    plan = node.step()
    assert [exchange.request for exchange in plan.exchanges] == [requests[1], requests[0]]
    assert [request.hot_capacity for request in (*requests, *later)] == [64] * 5
    assert [request.num_retractions for request in requests] == [1, 1]
    for request in later:
        end(node.rooms, request)
    settled(node)
    assert residents_of(requests) == [True, True]


def test_residents_make_room_for_dense_requests_but_hot_buffers_do_not_shrink_for_them() -> None:
    node = node_with_device(320)
    resident = node.arrive(TRUE, 100, max_new_tokens=20)
    node.step()
    settled(node)
    assert resident.is_resident
    dense = [node.arrive(FALSE, 112, max_new_tokens=10) for _ in range(3)]
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [(resident, 64)]
    assert [request.state is RequestState.RUNNING for request in dense] == [True, True, False]
    assert node.plan() == StepPlan()


def test_a_resident_stays_where_other_slots_than_its_pages_are_missing() -> None:
    node = Node(replace(RESIDENTS, totals=structs.replace(RESIDENTS.totals, device=192, index=192)))
    resident = node.arrive(TRUE, 100, max_new_tokens=12)
    node.step()
    settled(node)
    assert resident.is_resident
    for flag in (FALSE, TRUE):
        waiting = node.arrive(flag, 100, max_new_tokens=12)
        assert node.plan() == StepPlan()
        end(node.rooms, waiting)


def test_a_resident_leaves_its_pages_when_there_is_none_for_its_next_token() -> None:
    """Its items are in the host pool, so it needs no further slots for that."""
    node = node_with_device(288)
    resident = node.arrive(TRUE, 80, max_new_tokens=90)
    node.step()
    settled(node)
    assert resident.is_resident
    node.arrive(FALSE, 100, max_new_tokens=20)
    node.step()
    while resident.is_resident:
        assert resident.has_slots_for_next
        node.run(resident, 1)
        node.step()
    assert resident.next_seq_len == 161
    assert resident.hot_capacity == 64
    assert resident.has_slots_for_next


def test_held_pages_are_not_given_up_for_residents() -> None:
    node = node_with_device(256)
    dense = node.arrive(FALSE, 96, max_new_tokens=10, family=1)
    node.step()
    end(node.rooms, dense, is_sound=True)
    assert node.rooms.held.unused.device == 96
    request = node.arrive(TRUE, 80, max_new_tokens=40)
    node.step()
    settled(node)
    assert not request.is_resident
    node.rooms.held.flush()
    settled(node)
    assert request.is_resident


def test_with_a_bound_nobody_is_resident() -> None:
    node = Node(replace(RESIDENTS, keeps_residents=False))
    request = node.arrive(TRUE, 80, max_new_tokens=40)
    node.step()
    settled(node)
    assert request.hot_capacity == 64
