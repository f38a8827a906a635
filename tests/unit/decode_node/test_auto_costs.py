"""Plans for requests of ``auto`` where misses cost time: they get the faster mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.decode_node.miss_cost import MissCost
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import StepPlan
from tests.books import end
from tests.unit.decode_node.plan_node import (
    AUTO,
    FALSE,
    MANY,
    TRUE,
    Node,
    filled_by_auto,
    lose,
)


def cost_of(miss_secs: float, num_missed: int = 10) -> MissCost:
    """Return the cost of ``num_missed`` misses a step with 128 entries, where a request's part of a step
    takes a second."""
    return MissCost(missed_entries=128 * num_missed, miss_secs=miss_secs, request_secs=1.0)


def test_auto_waits_for_pages_where_misses_cost_more_than_a_request_brings() -> None:
    """The first hisparse request would take 128 slots and make another leave its pages: 20 misses."""
    node, requests = filled_by_auto()
    node.miss_cost = cost_of(0.06)
    late = node.arrive(AUTO, 260, max_new_tokens=10)
    assert node.plan() == StepPlan()
    node.miss_cost = cost_of(0.04)
    assert [each.mode for each in node.plan().admissions] == [Mode.HISPARSE]
    node.miss_cost = cost_of(0.06)
    end(node.rooms, requests[3])
    node.step()
    assert late.mode is Mode.DENSE


def test_auto_is_dense_whatever_others_then_lack_where_hisparse_does_not_pay() -> None:
    node = Node(MANY)
    node.miss_cost = cost_of(1.0)
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(24)]
    node.step()
    assert [request.state is RequestState.RUNNING for request in requests] == [True] * 16 + [False] * 8
    assert {request.mode for request in requests[:16]} == {Mode.DENSE}


STEPS = MissCost(missed_entries=1000.0, miss_secs=1e-3, request_secs=1.0, fixed_secs=1.0, growth_secs=0.04)
"""40 hisparse requests make 14 tokens a second, and 16 dense ones 9.8."""


SLOW = replace(STEPS, missed_entries=12000.0)
"""Hisparse requests make 8.4 tokens a second at most."""


@pytest.mark.parametrize(
    ("cost", "num_dense"),
    [
        (STEPS, 0),
        (SLOW, 16),
        (replace(SLOW, fixed_secs=0.0), 0),
        (replace(SLOW, miss_secs=0.0, growth_secs=100.0), 0),
    ],
)
def test_auto_waits_for_pages_where_hot_buffers_make_fewer_tokens_however_many_run(
    cost: MissCost, num_dense: int
) -> None:
    """One more of few hot buffers pays in each case, and their requests would take the pool."""
    node = Node(MANY)
    first = node.arrive(AUTO, 260, max_new_tokens=10)
    node.step()
    assert first.mode is Mode.DENSE
    node.miss_cost = cost
    requests = [first, *(node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(39))]
    node.step()
    modes = [request.mode for request in requests if request.state is RequestState.RUNNING]
    assert modes[1:] == ([Mode.DENSE] * 15 if num_dense else [Mode.HISPARSE] * 39)


def test_hot_buffers_give_way_to_dense_requests_of_auto_where_these_make_more_tokens() -> None:
    node = Node(MANY)
    early = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(34)]
    node.step()
    assert {request.mode for request in early} == {Mode.HISPARSE}
    node.miss_cost = SLOW
    late = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(34)]
    node.step()
    for request in early:
        end(node.rooms, request)
        node.step()
    running = [request for request in late if request.state is RequestState.RUNNING]
    assert [request.mode for request in running] == [Mode.DENSE] * 16


def test_a_short_request_of_auto_begins_with_a_hot_buffer_of_half_of_its_tokens() -> None:
    """A hot buffer of the full size would take nearly as many slots as its pages."""
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, device=8 * 64), device_buffer_size=96))
    requests = [node.arrive(AUTO, 100, max_new_tokens=20) for _ in range(8)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64] * 8
    node = Node(node.limits)
    must_be_hisparse = node.arrive(TRUE, 100, max_new_tokens=20)
    node.step()
    assert must_be_hisparse.hot_capacity == 96


def test_one_request_shows_what_hot_buffers_miss_where_that_is_not_known_any_more() -> None:
    node = Node(MANY)
    node.miss_cost = replace(SLOW, is_stale=True)
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(40)]
    node.step()
    modes = [request.mode for request in requests if request.state is RequestState.RUNNING]
    assert modes == [Mode.HISPARSE] + [Mode.DENSE] * 15


def test_how_many_fit_as_dense_is_told_by_the_lengths_of_all() -> None:
    """The pool would hold 40 of the short ones, and holds 26 of short and long ones by turns."""
    node = Node(MANY)
    first = node.arrive(AUTO, 60, max_new_tokens=10)
    node.step()
    node.miss_cost = SLOW
    requests = [first, *(node.arrive(AUTO, 260 if n % 2 else 60, max_new_tokens=10) for n in range(1, 40))]
    node.step()
    modes = [request.mode for request in requests if request.state is RequestState.RUNNING]
    assert modes == [Mode.DENSE] * 25


def test_auto_waits_where_one_more_hot_buffer_makes_all_of_them_too_small() -> None:
    """With few hot buffers hisparse requests make more tokens than dense ones, and with 60 fewer."""
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, req_row=72, aux=288)))
    node.miss_cost = replace(STEPS, missed_entries=5000.0)
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(60)]
    node.step()
    modes = [request.mode for request in requests if request.state is RequestState.RUNNING]
    assert set(modes) == {Mode.HISPARSE}
    assert 34 < len(modes) < 60
    waiting = node.arrive(TRUE, 260, max_new_tokens=10)
    assert node.plan() == StepPlan()
    assert waiting.state is RequestState.WAITING, "nobody overtakes"
    for request in requests[:10]:
        end(node.rooms, request)
    assert {each.mode for each in node.plan().admissions} == {Mode.HISPARSE}


def test_nobody_waits_for_pages_behind_requests_that_cannot_be_dense() -> None:
    node = Node(MANY)
    must_be_hisparse = node.arrive(TRUE, 260, max_new_tokens=10)
    node.step()
    node.miss_cost = SLOW
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(39)]
    node.step()
    assert {request.mode for request in requests} == {Mode.HISPARSE}
    end(node.rooms, must_be_hisparse)
    late = node.arrive(AUTO, 260, max_new_tokens=10)
    node.step()
    assert late.mode is Mode.DENSE


def test_auto_waits_for_the_end_of_a_dense_request_alone() -> None:
    """None runs here, and pages would make the hot buffers of the others as small as a hot buffer would."""
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, device=160)))
    node.miss_cost = cost_of(1.0)
    requests = [node.arrive(AUTO, num_tokens, 10) for num_tokens in (200, 200, 140)]
    node.step()
    assert [request.mode for request in requests] == [Mode.HISPARSE] * 3
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, device=160)))
    node.miss_cost = cost_of(1.0)
    lost = lose(node, FALSE, 100)
    alone = node.arrive(AUTO, 100, 10)
    node.step(now=1.0)
    assert alone.mode is Mode.HISPARSE, "the pages that it lacks may never be free"
    node.rooms.quarantine.quiet(lost.room, False, now=2.0)


@pytest.mark.parametrize("flag", [TRUE, FALSE])
def test_no_dense_request_leaves_its_pages_where_that_does_not_pay(flag: HisparseFlag) -> None:
    node, requests = filled_by_auto()
    node.miss_cost = cost_of(0.06)
    node.arrive(flag, 100, 10)
    assert node.plan() == StepPlan()
    end(node.rooms, requests[0])
    assert len(node.plan().admissions) == 1


def test_dense_requests_of_auto_leave_their_pages_where_hot_buffers_are_small() -> None:
    """Three of 18 requests share 272 slots, and miss 282 positions a step. One that leaves makes that four in
    544, which miss 212. The next would save none: all can have 128 entries by then."""
    node = Node(replace(MANY, growth_tokens=64))
    dense = [node.arrive(AUTO, 210, max_new_tokens=60) for _ in range(15)]
    node.step()
    hisparse = [node.arrive(TRUE, 210, max_new_tokens=60) for _ in range(3)]
    node.step()
    assert [each.mode for each in (*dense, *hisparse)] == [Mode.DENSE] * 15 + [Mode.HISPARSE] * 3
    assert node.plan() == StepPlan(), "nobody has missed anything so far"
    node.miss_cost = cost_of(0.0, num_missed=4)
    assert node.plan() == StepPlan(), "the copies are more than it would save"
    node.miss_cost = cost_of(0.0, num_missed=100)
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [(dense[-1], 128)]
    dense[-1].is_filling = True
    assert node.plan().exchanges == (), "one at a time sits out"
    dense[-1].is_filling = False
    assert node.plan().exchanges == ()


IN_HALF_OF_ITS_TIME = 4.4
AFTER_HALF_OF_ITS_TIME = 4.5
"""Requests arrive at 0.0, and have 9 seconds to get slots."""


@pytest.mark.parametrize("flag", [AUTO, TRUE, FALSE])
def test_who_has_waited_for_long_gets_room_that_others_can_make_though_it_does_not_pay(
    flag: HisparseFlag,
) -> None:
    node, _ = filled_by_auto()
    node.miss_cost = cost_of(0.06)
    late = node.arrive(flag, 100, 10)
    assert node.plan(IN_HALF_OF_ITS_TIME) == StepPlan()
    assert node.step(AFTER_HALF_OF_ITS_TIME).exchanges
    assert late.mode is (Mode.DENSE if flag is FALSE else Mode.HISPARSE)


@pytest.mark.parametrize(
    ("cost", "fastest"), [(SLOW, Mode.DENSE), (replace(STEPS, missed_entries=5000.0), Mode.HISPARSE)]
)
def test_auto_waits_for_what_is_faster_for_half_of_its_time(cost: MissCost, fastest: Mode) -> None:
    """For pages, where dense requests alone make more tokens, or for the end of others."""
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, req_row=72, aux=288)))
    node.miss_cost = cost
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(60)]
    node.step()
    running = [request for request in requests if request.state is RequestState.RUNNING]
    assert {request.mode for request in running[1:]} == {fastest}
    assert len(running) < len(requests)
    assert node.plan(IN_HALF_OF_ITS_TIME) == StepPlan()
    node.step(AFTER_HALF_OF_ITS_TIME)
    assert {request.state for request in requests} == {RequestState.RUNNING}
    assert {request.mode for request in requests[len(running) :]} == {Mode.HISPARSE}


def test_the_queue_is_looked_at_again_when_its_first_request_has_waited_for_long() -> None:
    node, _ = filled_by_auto()
    plans = NextPlan(node.limits, node.rooms)
    plans.miss_cost = cost_of(0.06)
    late = node.arrive(AUTO, 260, max_new_tokens=10)
    for now in (0.0, IN_HALF_OF_ITS_TIME):
        assert plans.make(now) == StepPlan()
    assert [each.request for each in plans.make(AFTER_HALF_OF_ITS_TIME).admissions] == [late]
