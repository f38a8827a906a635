"""Planning on small numbers: mode choice, order, hot-buffer sizes, growth and its victims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node.pools import Pools, SlotCounts
from decode_node.request import PeerAddress, Request, RequestState
from decode_node.rooms import Landing, Rooms
from decode_node.scheduler import Admission, Limits, StepPlan, plan_step, refusal
from protocol.engine_messages import HisparseFlag, Mode, SamplingParams
from protocol.messages import Room

LIMITS = Limits(
    totals=SlotCounts(host=400, device=160, index=560, aux=16, req_row=8),
    page_size=16,
    max_context=300,
    index_topk=20,
    device_buffer_size=64,
    auto_dense_margin=0.25,
)
TRUE, FALSE, AUTO = HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO


class Node:
    """Books plus planner, with deliveries at once."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.rooms = Rooms(Pools(limits.totals, limits.page_size), 1.0)
        self.num_requests = 0

    def arrive(self, flag: HisparseFlag, num_prompt_tokens: int, max_new_tokens: int = 1) -> Request:
        self.num_requests += 1
        request = Request(
            str(self.num_requests),
            Room(self.num_requests),
            num_prompt_tokens,
            SamplingParams(max_new_tokens=max_new_tokens),
            flag,
            PeerAddress("prefill", 1),
            arrived_at=0.0,
        )
        assert refusal(self.limits, request) == ""
        self.rooms.open(request)
        self.rooms.queue(request, 9.0)
        return request

    def plan(self, now: float = 0.0) -> StepPlan:
        return plan_step(
            self.limits,
            self.rooms.pools.free,
            self.rooms.select(RequestState.RUNNING),
            self.rooms.select(RequestState.RETRACTED),
            self.rooms.select(RequestState.WAITING),
            self.rooms.stuck(now),
        )

    def step(self, now: float = 0.0) -> StepPlan:
        plan = self.plan(now)
        for request in plan.retractions:
            self.rooms.retract(request, 9.0)
        for growth in plan.growths:
            self.rooms.grow(growth)
        for resumption in plan.resumptions:
            self.rooms.resume(resumption)
        for admission in plan.admissions:
            self.rooms.admit(admission, "first", 9.0)
            self.rooms.start(admission.request)
            admission.request.output_token_ids.append(0)
        self.rooms.check_integrity()
        return plan

    def run(self, request: Request, num_tokens: int) -> None:
        request.output_token_ids.extend([0] * num_tokens)


@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "mode", "need"),
    [
        # Dense takes whole pages of the device pool; 160 * 0.25 = 40 slots stay free for auto.
        (FALSE, 100, Mode.DENSE, SlotCounts(device=112, index=112, aux=1, req_row=1)),
        (AUTO, 112, Mode.DENSE, SlotCounts(device=112, index=112, aux=1, req_row=1)),
        # One page more, and auto is not comfortable.
        (AUTO, 113, Mode.HISPARSE, SlotCounts(host=128, device=64, index=128, aux=1, req_row=1)),
        # A hot buffer never exceeds the whole life.
        (TRUE, 30, Mode.HISPARSE, SlotCounts(host=32, device=32, index=32, aux=1, req_row=1)),
        # Not even when the top-k does.
        (TRUE, 5, Mode.HISPARSE, SlotCounts(host=16, device=16, index=16, aux=1, req_row=1)),
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
    node.arrive(AUTO, 150)  # Not comfortable dense, but beyond the host pool.
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
    request = Request(
        "1",
        Room(1),
        num_prompt_tokens,
        SamplingParams(max_new_tokens=1),
        flag,
        PeerAddress("prefill", 1),
        0.0,
        dense_refusal=dense_refusal,
    )
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
    """A request that ends at time 0 while its prefill node may write, which says nothing any more."""
    lost = node.arrive(flag, num_prompt_tokens)
    (admission,) = node.plan().admissions
    node.rooms.admit(admission, "lost", 9.0)
    node.rooms.end(lost, Landing.IN_FLIGHT, 0.0)
    return lost


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
    node.rooms.end(small, Landing.QUIET, now=2.0)
    late = node.arrive(TRUE, 9)
    node.step(now=2.0)
    assert large.state is RequestState.RUNNING, "it has kept its place"
    node.rooms.end(large, Landing.QUIET, now=2.0)
    node.step(now=2.0)
    assert late.state is RequestState.RUNNING


def test_who_fits_beside_stuck_slots_is_not_overtaken() -> None:
    node = Node()
    _lose(node, TRUE, 150)
    node.arrive(TRUE, 200)
    node.step(now=1.0)
    first, second = node.arrive(TRUE, 60), node.arrive(TRUE, 10)
    node.step(now=1.0)
    assert [first.state, second.state] == [RequestState.WAITING] * 2


def test_a_retracted_request_that_stuck_pages_keep_away_holds_up_nobody() -> None:
    node = Node()
    retracted = node.arrive(TRUE, 100)
    node.step()
    node.rooms.retract(retracted, 9.0)
    _lose_pages(node, num_pages=9)
    short = node.arrive(TRUE, 9)
    node.step(now=0.5)
    assert short.state is RequestState.WAITING
    node.step(now=1.0)
    assert [retracted.state, short.state] == [RequestState.RETRACTED, RequestState.RUNNING]


def _lose_pages(node: Node, num_pages: int) -> None:
    """The same with dense pages, whatever the planner would admit first."""
    num_tokens = num_pages * node.limits.page_size
    lost = node.arrive(FALSE, num_tokens)
    need = SlotCounts(device=num_tokens, index=num_tokens, aux=1, req_row=1)
    node.rooms.admit(Admission(lost, Mode.DENSE, need, 0), "lost", 9.0)
    node.rooms.end(lost, Landing.IN_FLIGHT, 0.0)


def test_auto_is_dense_beyond_its_margin_rather_than_waiting_for_the_host() -> None:
    node = Node()
    hisparse = node.arrive(TRUE, 390)
    node.step()
    (admission,) = (node.arrive(AUTO, 80), node.plan().admissions)[1]
    assert (admission.mode, admission.need.device) == (Mode.DENSE, 80)
    # Growing needs host slots, and who cannot be dense waits for them.
    node.step()
    growing, unequal = node.arrive(AUTO, 15, max_new_tokens=40), node.arrive(AUTO, 15)
    unequal.dense_refusal = "page sizes differ"
    assert node.plan().admissions == ()
    node.rooms.end(hisparse, Landing.QUIET, 0.0)
    assert [admission.request for admission in node.plan().admissions] == [growing, unequal]


def test_hot_buffers_shrink_before_anybody_waits_for_one() -> None:
    """160 device slots are 64 + 64 + 32; the fourth needs 32 more, which the latest large buffer gives up."""
    node = Node()
    requests = [node.arrive(TRUE, 80) for _ in range(3)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64, 64, 32]
    fourth = node.arrive(TRUE, 80)
    plan = node.step()
    assert plan.retractions == (requests[1],)
    assert [request.hot_capacity for request in requests] == [64, 21, 32]
    assert fourth.hot_capacity == 32


def test_a_dense_request_under_pressure_reserves_its_way_out() -> None:
    node = Node()
    node.arrive(FALSE, 80)
    node.step()
    pressed = node.arrive(FALSE, 30, max_new_tokens=60)
    (admission,) = node.step().admissions
    # 31 tokens are two pages, plus one page of headroom, and host slots for all 89.
    assert admission.need == SlotCounts(host=96, device=48, index=96, aux=1, req_row=1)
    assert pressed.is_retractable
    assert pressed.may_grow


def test_growth_retracts_the_latest_who_can_go_and_who_comes_back_first() -> None:
    node = Node(replace(LIMITS, totals=replace(LIMITS.totals, device=112)))
    pinned = node.arrive(FALSE, 31, max_new_tokens=2)
    node.step()
    grower = node.arrive(FALSE, 30, max_new_tokens=70)
    node.step()
    assert (pinned.may_grow, grower.may_grow) == (False, True)
    late = node.arrive(TRUE, 40)
    assert node.plan().admissions == (), "the page that the growing request may need is not given away"
    node.rooms.end(pinned, Landing.QUIET, 0.0)
    node.step()
    assert late.hot_capacity == 40
    node.run(grower, 19)  # 50 tokens: a fourth page is needed, and the one kept for it is there.
    assert node.step().retractions == ()
    node.run(grower, 16)
    newcomer = node.arrive(TRUE, 10)
    plan = node.step()
    assert [growth.request for growth in plan.growths] == [grower]
    assert plan.retractions == (late,)
    assert [late.state, newcomer.state] == [RequestState.RETRACTED, RequestState.WAITING]
    node.rooms.end(grower, Landing.QUIET, 0.0)
    plan = node.step()
    assert [resumption.request for resumption in plan.resumptions] == [late]
    assert [admission.request for admission in plan.admissions] == [newcomer]


def test_where_a_repeated_batch_may_land_nobody_is_retracted_and_who_must_grow_waits() -> None:
    node = Node(replace(LIMITS, totals=replace(LIMITS.totals, device=96)))
    node.arrive(FALSE, 47, max_new_tokens=2)
    node.step()
    grower = node.arrive(FALSE, 30, max_new_tokens=60)
    node.step()
    grower.lands_until = 5.0
    assert grower.has_page_for_next
    node.run(grower, 18)
    plan = node.step()
    assert (plan.growths, plan.retractions) == ((), ())
    assert not grower.has_page_for_next
    node.rooms.expire(5.0)
    assert node.step().retractions == (grower,)
    assert grower.has_page_for_next


def test_whoever_was_just_given_a_page_does_not_give_it_up_in_the_same_step() -> None:
    node = Node()
    node.arrive(FALSE, 80)
    node.step()
    older, younger = node.arrive(FALSE, 14, max_new_tokens=90), node.arrive(FALSE, 14, max_new_tokens=90)
    node.step()
    younger.lands_until = 9.0  # so it cannot be retracted itself, and asks for the pages of older ones
    for request in (older, younger):
        node.run(request, 18)
        assert not request.has_page_for_next
    plan = node.step()
    assert plan.retractions == ()
    assert [growth.request for growth in plan.growths] == [older]
    assert not younger.has_page_for_next


def test_whoever_is_admitted_to_grow_keeps_a_page_from_those_behind_it() -> None:
    node = Node()
    node.arrive(FALSE, 64)
    node.step()
    growing = [node.arrive(FALSE, 14, max_new_tokens=90) for _ in range(2)]
    node.arrive(TRUE, 9)
    plan = node.step()
    assert [admission.request for admission in plan.admissions] == growing
    assert node.rooms.pools.free.device == 2 * node.limits.page_size


def test_the_growing_request_itself_goes_when_nobody_else_can() -> None:
    node = Node(replace(LIMITS, totals=replace(LIMITS.totals, device=96)))
    node.arrive(FALSE, 47, max_new_tokens=2)
    node.step()
    grower = node.arrive(FALSE, 30, max_new_tokens=60)
    node.step()
    node.run(grower, 18)
    plan = node.step()
    assert plan.growths == ()
    assert plan.retractions == (grower,)
    assert grower.mode is Mode.HISPARSE
    assert grower.hot_capacity == 48
