"""Planning on small numbers: mode choice, order, hot-buffer sizes, growth, and which requests sit out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.miss_cost import MissCost
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.sizing import DEFAULT_BUFFER, GROWTH_PAGES
from hisparse_pd.decode_node.step_plan import Exchange, Fill, StepPlan
from hisparse_pd.decode_node.swap_counts import SwapCounts
from tests.books import end, make_request
from tests.unit.decode_node.plan_node import AUTO, FALSE, LIMITS, STEP_BY_STEP, TRUE, Node


@pytest.mark.I6
@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "mode", "need"),
    [
        # Dense takes whole pages of the device pool, and auto all of them while it is alone.
        (FALSE, 100, Mode.DENSE, SlotCounts(device=112, index=112, aux=1, req_row=1)),
        (AUTO, 160, Mode.DENSE, SlotCounts(device=160, index=160, aux=1, req_row=1)),
        # More than the device pool has.
        (AUTO, 161, Mode.HISPARSE, SlotCounts(host=176, device=64, index=176, lookup=176, aux=1, req_row=1)),
        # A hot buffer never exceeds the whole life.
        (TRUE, 30, Mode.HISPARSE, SlotCounts(host=32, device=32, index=32, lookup=32, aux=1, req_row=1)),
        # Not even when the top-k does.
        (TRUE, 5, Mode.HISPARSE, SlotCounts(host=16, device=16, index=16, lookup=16, aux=1, req_row=1)),
    ],
)
def test_what_a_request_gets(
    flag: HisparseFlag, num_prompt_tokens: int, mode: Mode, need: SlotCounts
) -> None:
    node = Node()
    request = node.arrive(flag, num_prompt_tokens)
    (admission,) = node.plan().admissions
    assert admission.mode is mode
    assert node.rooms.pools.rounded(admission.need) == need
    assert admission.hot_capacity == (0 if mode is Mode.DENSE else min(64, num_prompt_tokens))
    assert admission.request is request


def test_auto_takes_what_is_possible_at_all() -> None:
    node = Node(replace(LIMITS, totals=replace(LIMITS.totals, host=100)))
    node.arrive(AUTO, 150)  # Beyond the host pool.
    node.arrive(AUTO, 20)  # It would have too small a hot buffer.
    assert node.plan().admissions[0].mode is Mode.DENSE
    blocked = node.arrive(AUTO, 20)
    blocked.dense_refusal = "page sizes differ"
    assert node.plan().admissions[0].mode is Mode.DENSE


@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "dense_refusal", "parts"),
    [
        (TRUE, 401, "", ["401", "400", "host pool"]),
        (FALSE, 161, "", ["161", "160", "device pool"]),
        (FALSE, 10, "page_size 64 and 16", ["page_size 64 and 16"]),
        (AUTO, 401, "", ["400", "160"]),
        (AUTO, 161, "", []),
        (AUTO, 161, "page sizes differ", []),
        (TRUE, 400, "page sizes differ", []),
    ],
)
def test_a_refusal_names_the_bound(
    flag: HisparseFlag, num_prompt_tokens: int, dense_refusal: str, parts: list[str]
) -> None:
    request = make_request(1, num_prompt_tokens, 1, flag, dense_refusal=dense_refusal)
    error = refusal(LIMITS, request)
    assert bool(error) is bool(parts)
    assert all(part in error for part in parts)


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    node = Node()
    node.arrive(TRUE, 300)
    node.step()
    first, second = node.arrive(TRUE, 200), node.arrive(TRUE, 10)
    assert node.plan().admissions == ()
    assert [first.state, second.state] == [RequestState.WAITING] * 2


def _lose(node: Node, flag: HisparseFlag, num_prompt_tokens: int) -> Request:
    """Return a request that ended at time 0 while its prefill node may still write, and stays silent."""
    lost = node.arrive(flag, num_prompt_tokens)
    (admission,) = node.plan().admissions
    node.rooms.reserve(admission, "lost", 9.0)
    end(node.rooms, lost)
    return lost


@pytest.mark.I7
@pytest.mark.parametrize(("flag", "num_lost", "num_large"), [(TRUE, 150, 300), (FALSE, 100, 60)])
def test_slots_that_may_never_be_free_again_hold_up_only_who_needs_them(
    flag: HisparseFlag, num_lost: int, num_large: int
) -> None:
    node = Node()
    lost = _lose(node, flag, num_lost)
    large, small = node.arrive(flag, num_large), node.arrive(TRUE, 9)
    node.step(now=0.5)
    assert small.state is RequestState.WAITING, "the prefill node may still say that the room is quiet"
    node.step(now=1.0)
    assert [large.state, small.state] == [RequestState.WAITING, RequestState.RUNNING]
    node.rooms.quarantine.quiet(lost.room, False, now=2.0)
    end(node.rooms, small, 2.0)
    late = node.arrive(TRUE, 9)
    node.step(now=2.0)
    assert large.state is RequestState.RUNNING, "it has kept its place"
    end(node.rooms, large, 2.0)
    node.step(now=2.0)
    assert late.state is RequestState.RUNNING


MANY = Limits(
    totals=SlotCounts(host=20000, device=16 * 272, index=40000, lookup=20000, aux=100, req_row=40),
    page_size=16,
    max_context=300,
    index_topk=20,
    device_buffer_size=32,
    growth_tokens=16,
    largest_hot_buffer=128,
)
"""Limits under which 16 dense requests of 272 tokens fill the device pool."""


@pytest.mark.parametrize(
    ("num_requests", "num_dense"), [(1, 1), (16, 16), (17, 15), (24, 8), (32, 1), (34, 0), (100, 0)]
)
def test_auto_is_dense_while_all_others_could_have_the_largest_hot_buffer(
    num_requests: int, num_dense: int
) -> None:
    """With n requests of which d are dense, d * 272 + (n - d) * 128 slots of 4,352 are needed. Only 40 run at
    a time, and the others do not count."""
    node = Node(MANY)
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(num_requests)]
    node.step()
    running = [request for request in requests if request.state is RequestState.RUNNING]
    assert len(running) == min(40, num_requests)
    assert [request.mode for request in running[:num_dense]] == [Mode.DENSE] * num_dense
    assert [request.mode for request in running[num_dense:]] == [Mode.HISPARSE] * (len(running) - num_dense)


def filled_by_auto(limits: Limits = MANY, num_requests: int = 16) -> tuple[Node, list[Request]]:
    """Return a node whose device pool dense requests of ``auto`` fill."""
    node = Node(limits)
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(num_requests)]
    node.step()
    assert {request.mode for request in requests} == {Mode.DENSE}
    return node, requests


@pytest.mark.parametrize(("flag", "num_leaving"), [(AUTO, 1), (TRUE, 1), (FALSE, 2)])
def test_dense_requests_of_auto_leave_their_pages_for_who_waits(flag: HisparseFlag, num_leaving: int) -> None:
    """Those admitted last leave first, for a hot buffer of their share; who must be dense gets the pages of
    two."""
    node, requests = filled_by_auto()
    late = node.arrive(flag, 260, max_new_tokens=10)
    plan = node.step()
    assert [exchange.request for exchange in plan.exchanges] == requests[::-1][:num_leaving]
    assert {exchange.hot_capacity for exchange in plan.exchanges} == {128}
    assert late.state is RequestState.RUNNING
    assert late.mode is (Mode.DENSE if flag is FALSE else Mode.HISPARSE)
    leaving = plan.exchanges[0].request
    assert (leaving.mode, leaving.num_retractions, leaving.has_slots_for_next) == (Mode.HISPARSE, 1, True)


def test_hot_buffers_do_not_become_small_while_dense_requests_of_auto_may_leave() -> None:
    node, requests = filled_by_auto()
    late = [node.arrive(TRUE, 260, max_new_tokens=10) for _ in range(12)]
    plan = node.one_step()
    assert [each.request for each in plan.exchanges] == requests[:-4:-1]
    assert all(request.hot_capacity == 32 for request in late)
    assert all(each.hot_capacity >= 128 for each in plan.exchanges[:1])


def test_who_must_be_dense_or_shares_pages_or_lacks_host_slots_keeps_its_pages() -> None:
    node = Node(replace(MANY, totals=replace(MANY.totals, device=3 * 272, host=400)))
    first = node.arrive(AUTO, 250, 10, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    sharing = node.arrive(AUTO, 250, 10, family=1)
    must_be_dense, of_auto = node.arrive(FALSE, 250, 10), node.arrive(AUTO, 250, 10)
    node.step()
    assert [r.mode for r in (sharing, must_be_dense, of_auto)] == [Mode.DENSE] * 3
    assert sharing.held_prefix_tokens > 0
    late = node.arrive(TRUE, 100, 10)
    (exchange,) = node.plan().exchanges
    assert exchange.request is of_auto
    end(node.rooms, late)
    node.arrive(TRUE, 200, 10)  # 208 of 400 host slots, of which the request of auto would take 272
    assert node.plan() == StepPlan()


def test_a_request_of_auto_does_not_leave_its_pages_for_another_that_could_be_dense() -> None:
    """Without slots in the host pool both could only be dense."""
    node, _ = filled_by_auto(replace(MANY, totals=replace(MANY.totals, host=0)))
    node.arrive(AUTO, 260, max_new_tokens=10)
    assert node.plan() == StepPlan()


def test_first_samples_of_auto_keep_the_pages_that_further_ones_share() -> None:
    node = Node(MANY)
    first, second = (node.arrive(AUTO, 250, 10, family=1) for _ in range(2))
    second.first_sample, first.has_further_samples = first, True
    node.step()
    node.step()
    assert (first.num_shared_pages, second.num_shared_pages) == (15, 15)
    alone = node.arrive(AUTO, 250, 10, family=2)
    node.step()
    assert (alone.mode, alone.num_shared_pages) == (Mode.DENSE, 0)
    assert [node.rooms.held.unused.device, alone.may_leave_pages] == [0, True]


def test_auto_counts_what_others_have_once_the_plan_is_carried_out() -> None:
    """One that leaves its pages gets 128 entries, and 112 slots are left. Beside as many slots of pages, hot
    buffers of 56 entries would do, for which the first one has more than the second lacks."""
    node, requests = filled_by_auto()
    first, second = node.arrive(TRUE, 260, 10), node.arrive(AUTO, 91, 10)
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [(requests[-1], 128)]
    assert [(first.mode, first.hot_capacity), (second.mode, second.num_device_slots)] == [
        (Mode.HISPARSE, 32),
        (Mode.DENSE, 112),
    ]


# --- what misses cost ----------------------------------------------------------------------------------


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
    node = Node(replace(MANY, totals=replace(MANY.totals, device=8 * 64), device_buffer_size=96))
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
    node = Node(replace(MANY, totals=replace(MANY.totals, req_row=72, aux=288)))
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
    node = Node(replace(MANY, totals=replace(MANY.totals, device=160)))
    node.miss_cost = cost_of(1.0)
    requests = [node.arrive(AUTO, num_tokens, 10) for num_tokens in (200, 200, 140)]
    node.step()
    assert [request.mode for request in requests] == [Mode.HISPARSE] * 3
    node = Node(replace(MANY, totals=replace(MANY.totals, device=160)))
    node.miss_cost = cost_of(1.0)
    lost = _lose(node, FALSE, 100)
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


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize("shares_pages", [False, True])
def test_what_is_cache_gives_way_to_a_dense_request_that_grows(is_resident: bool, shares_pages: bool) -> None:
    """It would leave its pages otherwise or, since it cannot where it shares some, sit out until the other
    request ends."""
    limits = replace(STEP_BY_STEP, device_buffer_size=32, largest_hot_buffer=96, keeps_residents=is_resident)
    node = Node(limits)
    if shares_pages:
        first = node.arrive(FALSE, 33, family=1)
        node.step()
        end(node.rooms, first, is_sound=True)
    dense = node.arrive(FALSE, 33, max_new_tokens=80, family=1 if shares_pages else None)
    other = node.arrive(TRUE, 50, max_new_tokens=10)
    node.step()
    assert (dense.num_shared_pages, other.hot_capacity) == (2 * shares_pages, 32)
    if is_resident:
        node.rooms.begin_fill(Fill(other, num_page_slots=64, num_resident_pages=0))
        node.rooms.end_fill(other)
    else:
        node.rooms.replace_device_slots(Exchange(other, 64))
    exchanges: list[Exchange] = []
    while dense.has_next_step:
        plan = node.one_step()
        exchanges += plan.exchanges
        if plan.is_cut:
            node.step()
        assert dense.has_slots_for_next, "it never sits out"
        node.run(dense, 1)
    assert [(each.request, each.hot_capacity) for each in exchanges] == [(other, 32)]
    assert dense.mode is Mode.DENSE


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
    node = Node(replace(MANY, totals=replace(MANY.totals, req_row=72, aux=288)))
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


def test_what_hot_buffers_have_beyond_their_use_is_room_for_auto() -> None:
    """A request of 64 tokens leaves its pages only for hot buffers of less than half as many entries."""
    node = Node(replace(MANY, totals=replace(MANY.totals, device=320)))
    large = [node.arrive(TRUE, 200, max_new_tokens=40) for _ in range(3)]
    node.step()
    settled(node)
    assert [request.hot_capacity for request in large] == [96, 96, 96]
    short, long = node.arrive(AUTO, 60, max_new_tokens=5), node.arrive(AUTO, 200, max_new_tokens=5)
    node.step()
    assert [request.mode for request in (short, long)] == [Mode.DENSE, Mode.HISPARSE]


def test_auto_is_dense_beyond_that_rather_than_waiting_for_the_host() -> None:
    node = Node()
    hisparse = node.arrive(TRUE, 390)
    node.step()
    (admission,) = (node.arrive(AUTO, 80), node.plan().admissions)[1]
    assert (admission.mode, admission.need.device) == (Mode.DENSE, 80)
    # A request that does not get all its pages, or cannot be dense, waits for the host.
    node.step()
    long, unequal = node.arrive(AUTO, 15, max_new_tokens=40), node.arrive(AUTO, 15)
    unequal.dense_refusal = "page sizes differ"
    assert node.plan().admissions == ()
    end(node.rooms, hisparse)
    assert [admission.request for admission in node.plan().admissions] == [long, unequal]


def test_hot_buffers_shrink_before_anybody_waits_for_one_and_grow_back() -> None:
    """160 device slots are 64 + 64 + 32; the fourth needs 32, which the latest large buffer gives up."""
    node = Node()
    requests = [node.arrive(TRUE, 80, max_new_tokens=10) for _ in range(3)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64, 64, 32]
    fourth = node.arrive(TRUE, 80, max_new_tokens=10)
    plan = node.step()
    assert [exchange.request for exchange in plan.exchanges] == [requests[1]]
    assert [request.hot_capacity for request in requests] == [64, 21, 32]
    assert fourth.hot_capacity == 32
    # 64 of 160 are free again: after an exchange there would be less than a hot buffer for the next one.
    end(node.rooms, requests[0])
    assert node.plan() == StepPlan()
    # With 96 free, the oldest gets its 64 back, the other does not.
    end(node.rooms, fourth)
    waiting = node.arrive(TRUE, 300, max_new_tokens=90)
    assert node.plan().exchanges == (), "not while somebody waits"
    end(node.rooms, waiting)
    node.step()
    assert [request.hot_capacity for request in requests[1:]] == [64, 32]
    assert [request.num_retractions for request in requests] == [0, 1, 0]
    assert node.plan() == StepPlan()


def test_a_hot_buffer_that_misses_nothing_stays_as_it_is() -> None:
    node = Node()
    *long, short = (node.arrive(TRUE, num_prompt_tokens, 60) for num_prompt_tokens in (80, 80, 30))
    node.step()
    assert short.hot_capacity == 32
    for request in long:
        end(node.rooms, request)
    assert node.plan() == StepPlan(), "its 30 tokens are all there"
    node.run(short, 10)
    node.step()
    assert short.hot_capacity == 64


# --- residents ----------------------------------------------------------------------------------------

RESIDENTS = replace(
    STEP_BY_STEP,
    totals=replace(LIMITS.totals, host=2000, device=512, index=2512, lookup=4000),
    keeps_residents=True,
)


AUTOMATIC = replace(RESIDENTS, largest_hot_buffer=128, keeps_residents=False)


def settled(node: Node, miss_share: float = 0.5) -> None:
    """Carry plans out until one exchanges and fills nothing; pages are filled at once. All requests have
    missed ``miss_share`` of their positions so far."""
    for request in node.rooms.select(RequestState.RUNNING):
        request.row_counters = SwapCounts(hits=round(100 * (1 - miss_share)), misses=round(100 * miss_share))
    plan = node.step()
    while plan.exchanges or plan.fills:
        end_fills(node)
        plan = node.step()


def end_fills(node: Node) -> None:
    """Do what a node does once the pages of requests are filled, and a step behind that is read that tells
    nobody anything."""
    for request in node.rooms.select(RequestState.RUNNING):
        if request.num_page_slots:
            node.rooms.end_fill(request)
            request.shares_from = None
    node.rooms.check_integrity()


def residents_of(requests: list[Request]) -> list[bool]:
    return [request.is_resident for request in requests]


def test_hot_buffers_get_their_share_of_the_pool_and_shrink_to_it_for_others() -> None:
    """Three have 128 of 512 slots each. Two more take what is free; a sixth gets what exceeds 96, the share
    of five, and then a dense one what exceeds the full size."""
    node = Node(AUTOMATIC)
    requests = [node.arrive(TRUE, 160, max_new_tokens=40) for _ in range(3)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64] * 3
    settled(node)
    assert [request.hot_capacity for request in requests] == [128] * 3
    later = [node.arrive(TRUE, 100, max_new_tokens=40) for _ in range(3)]
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [
        (requests[2], 96),
        (requests[1], 96),
    ]
    assert [request.hot_capacity for request in later] == [64] * 3
    dense = node.arrive(FALSE, 80, max_new_tokens=16)
    plan = node.step()
    assert [each.hot_capacity for each in plan.exchanges] == [64] * 3
    assert dense.state is RequestState.RUNNING
    assert [request.num_retractions for request in requests] == [1, 2, 2]


def test_hot_buffers_grow_to_their_share_if_they_will_miss_enough_to_fill_it() -> None:
    """In 60 steps 48 of 20 selected positions are missed, fewer than the 64 entries that one would get."""
    node = Node(AUTOMATIC)
    requests = [node.arrive(TRUE, 130, max_new_tokens=60) for _ in range(7)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64] * 7
    for request in requests[4:]:
        end(node.rooms, request)
    settled(node, miss_share=0.04)
    assert [request.hot_capacity for request in requests[:4]] == [64] * 4, "too few misses for that"
    first_slots = [request_slots(request) for request in requests[:4]]
    for request in requests[:4]:
        request.row_counters = SwapCounts(hits=50, misses=50)
    assert [exchange.request for exchange in node.step().exchanges] == requests[:3], "all in one plan"
    assert [request.hot_capacity for request in requests[:4]] == [128, 128, 128, 64]
    assert node.rooms.pools.free.device == 64
    assert [request_slots(request)[:64] for request in requests[:4]] == first_slots
    assert node.plan() == StepPlan()
    dense = node.arrive(FALSE, 80, max_new_tokens=16)
    node.step()
    assert dense.state is RequestState.RUNNING
    assert [request_slots(request)[:64] for request in requests[:4]] == first_slots


def test_hisparse_requests_become_resident_while_slots_are_free() -> None:
    """Each takes 112 of 512 slots for its 81 tokens and 16 more; 64 stay free for a hot buffer. Its hot
    buffer is there until the pages are filled."""
    node = Node(RESIDENTS)
    requests = [node.arrive(TRUE, 80, max_new_tokens=40) for _ in range(4)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64] * 4
    for request in requests:
        request.row_counters = SwapCounts(hits=50, misses=50)
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


def filling(node: Node) -> list[Request]:
    return [request for request in node.rooms.select(RequestState.RUNNING) if request.num_page_slots]


def test_pages_of_several_requests_are_filled_at_once_up_to_a_bound() -> None:
    """Each takes 112 of 800 slots beside its 64, and has 80 tokens; two have fewer than 160."""
    limits = replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=800))
    node = Node(replace(limits, fill_tokens=160))
    requests = [node.arrive(TRUE, 80, max_new_tokens=40) for _ in range(4)]
    node.step()
    for request in requests:
        request.row_counters = SwapCounts(hits=50, misses=50)
    for num_filling in (1, 2, 2):
        node.step()
        assert len(filling(node)) == num_filling
    end_fills(node)
    node.step()
    node.step()
    assert filling(node) == requests[2:]


def test_a_common_beginning_is_filled_once() -> None:
    """Two requests of one family do not fill at once, but one of another family does beside the first."""
    limits = replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=1600), fill_tokens=1000)
    node = Node(limits)
    requests = [node.arrive(TRUE, 160, max_new_tokens=40, family=n) for n in (1, 1, 2)]
    node.step()
    for request in requests:
        request.row_counters = SwapCounts(hits=50, misses=50)
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
def test_pages_that_are_being_filled_are_given_up_for_who_waits_and_hot_buffers_stay() -> None:
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=320)))
    requests = [node.arrive(TRUE, 100, max_new_tokens=20, family=n) for n in range(2)]
    node.step()
    settled(node)
    assert residents_of(requests) == [True, True]
    node.rooms.replace_device_slots(Exchange(requests[0], 64))
    requests[0].row_counters = SwapCounts(hits=50, misses=50)
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


def request_slots(request: Request) -> list[int]:
    slots: list[int] = extents_to_slots(request.owned[PoolKind.DEVICE]).tolist()
    return slots


def test_pages_grow_while_they_are_filled_and_are_given_up_if_there_is_none() -> None:
    """A dense request takes what is left when the first one's pages have grown once."""
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=304)))
    request = node.arrive(TRUE, 80, max_new_tokens=90)
    node.step()
    request.row_counters = SwapCounts(hits=50, misses=50)
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


def share_pages(node: Node) -> None:
    """Do what a node does once steps of its residents are read."""
    for request in node.rooms.select(RequestState.RUNNING):
        if request.is_resident:
            node.rooms.share_resident(request, node.limits.in_pages(node.limits.min_capacity(request)))
    node.rooms.check_integrity()


def test_residents_have_the_pages_of_a_common_beginning_once() -> None:
    """Of 448 slots each of four would take 192. The first shares the 144 of its whole pages, and the others
    take 48 beside them, for what is behind and what they grow into."""
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=448), fill_tokens=1000))
    requests = [node.arrive(TRUE, 160 + n, max_new_tokens=40, family=1) for n in range(4)]
    node.step()
    assert node.rooms.pools.free.device == 448 - 4 * 64
    for request in requests:
        request.row_counters = SwapCounts(hits=50, misses=50)
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
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == []
    end(node.rooms, requests[3])
    node.rooms.check_integrity()
    assert node.rooms.pools.free.device == 448, "nobody keeps what is in the host pool, too"
    node.step()
    assert late.state is RequestState.RUNNING


def test_shared_pages_of_residents_are_counted_on_at_their_last_users_end() -> None:
    """A dense request needs 304 of 400 slots to its end, and two residents have 48 each and 144 together. It
    can be admitted because all of these are free at their end; a third one may share the 144, too."""
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=400)))
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
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=320)))
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
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=320)))
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
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=192, index=192)))
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
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=288)))
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
    node = Node(replace(RESIDENTS, totals=replace(RESIDENTS.totals, device=256)))
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


# --- step by step -------------------------------------------------------------------------------------


@pytest.mark.I8
def test_a_request_gets_slots_before_it_needs_them_and_never_more_than_its_life() -> None:
    node = Node(STEP_BY_STEP)
    request = node.arrive(TRUE, 30, max_new_tokens=48)
    node.step()
    assert (request.owned_slots.host, request.owned_slots.index) == (48, 48)
    assert node.plan() == StepPlan()
    node.run(request, 18)
    assert not request.has_slots_for_next
    (growth,) = node.step().growths
    assert growth.need == SlotCounts(host=16, index=16, lookup=16)
    node.run(request, 16)
    node.step()
    assert (request.owned_slots.host, request.owned_slots.index) == (80, 80)
    assert (request.reserved_tokens, request.life_tokens) == (80, 77)


def test_chats_without_max_tokens_share_a_node_of_the_default_size() -> None:
    """Each chat may fill DeepSeek-V3.2's context, of which the host pool holds one and a half."""
    options, context = DecodeSettings.model_fields, 163_840
    host, page_size = options["host_pool_tokens"].default, options["page_size"].default
    node = Node(
        Limits(
            totals=SlotCounts(
                host=host, device=1 << 20, index=host + (1 << 20), lookup=2 * host, aux=256, req_row=64
            ),
            page_size=page_size,
            max_context=context,
            index_topk=2048,
            device_buffer_size=DEFAULT_BUFFER,
            growth_tokens=GROWTH_PAGES * page_size,
        )
    )
    chats = [node.arrive(TRUE, 4096, max_new_tokens=context - 4095) for _ in range(64)]
    node.step()
    node.step()
    assert sum(chat.state is RequestState.RUNNING for chat in chats) == 20


@pytest.mark.I7
def test_nobody_counts_on_slots_of_kv_that_is_on_its_way() -> None:
    """100 host slots belong to a landing room whose prefill node may vanish for good."""
    node = Node(STEP_BY_STEP)
    landing = node.arrive(TRUE, 84)
    (admission,) = node.plan().admissions
    node.rooms.reserve(admission, "first", 9.0)
    needs_them = node.arrive(TRUE, 20, max_new_tokens=320)
    node.step()
    has_waited = needs_them.state is RequestState.WAITING
    node.rooms.start(landing)
    node.step()
    assert has_waited
    assert needs_them.state is RequestState.RUNNING, "whoever runs ends"


def test_a_dense_request_without_a_page_goes_on_as_hisparse() -> None:
    node = Node(replace(STEP_BY_STEP, totals=replace(LIMITS.totals, device=112)))
    other = node.arrive(FALSE, 47, max_new_tokens=2)
    grower = node.arrive(FALSE, 30, max_new_tokens=70)
    node.step()
    assert [other.mode, grower.mode] == [Mode.DENSE] * 2
    late = node.arrive(TRUE, 40)
    assert node.plan().admissions == (), "the page that the growing request may need is not given away"
    node.run(grower, 18)
    assert [growth.request for growth in node.step().growths] == [grower]
    node.run(grower, 16)
    (exchange,) = node.step().exchanges
    assert exchange == Exchange(grower, 64, SlotCounts(host=80, index=16, lookup=80))
    assert (grower.mode, grower.num_retractions, grower.has_slots_for_next) == (Mode.HISPARSE, 1, True)
    end(node.rooms, other)
    node.step()
    assert late.state is RequestState.RUNNING


def test_a_page_for_everybody_who_will_grow_is_kept_from_those_behind_it() -> None:
    node = Node(STEP_BY_STEP)
    node.arrive(FALSE, 64)
    growing = [node.arrive(FALSE, 14, max_new_tokens=90) for _ in range(2)]
    node.arrive(TRUE, 9)
    plan = node.step()
    assert [admission.request for admission in plan.admissions[1:]] == growing
    assert node.rooms.pools.free.device == 2 * node.limits.page_size
