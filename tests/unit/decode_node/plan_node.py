"""A decode node of books and planner alone, with small pools, and states in which tests of plans begin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys
from hisparse_pd.decode_node.held_matches import HeldMatches
from hisparse_pd.decode_node.held_tier import PageCopies
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.miss_cost import CHEAP
from hisparse_pd.decode_node.plan_draft import PlanDraft, Queue
from hisparse_pd.decode_node.plan_slots import PlanSlots
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.scheduler import plan_step
from hisparse_pd.decode_node.step_plan import StepPlan
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.messages import pack_token_ids
from tests.books import carry_out, end, enqueue, make_request

LIMITS = Limits(
    totals=SlotCounts(host=400, device=160, index=560, lookup=800, aux=16, req_row=8),
    page_size=16,
    max_context=300,
    index_topk=20,
    device_buffer_size=64,
    growth_tokens=1000,
)
"""Limits under which all that a request may need is reserved at its admission."""
STEP_BY_STEP = replace(LIMITS, growth_tokens=16)
TRUE, FALSE, AUTO = HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO


RESIDENTS = replace(
    STEP_BY_STEP,
    totals=structs.replace(LIMITS.totals, host=2000, device=512, index=2512, lookup=4000),
    keeps_residents=True,
)
"""Limits under which four hisparse requests of some 80 tokens can be resident."""
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


class Node:
    """Books and planner; every room is delivered at once."""

    def __init__(self, limits: Limits = LIMITS, copies: PageCopies | None = None) -> None:
        self.limits = limits
        self.rooms = LiveRequests(Pools(limits.totals, limits.page_size), 1.0, copies)
        self.num_requests = 0
        self.miss_cost = CHEAP
        self.num_recent = 0

    def arrive(
        self,
        flag: HisparseFlag,
        num_prompt_tokens: int,
        max_new_tokens: int = 1,
        family: int | None = None,
    ) -> Request:
        """Make a request wait. Prompts of one ``family`` begin alike, and are held."""
        self.num_requests += 1
        request = make_request(self.num_requests, num_prompt_tokens, max_new_tokens, flag)
        if family is not None:
            tokens = pack_token_ids([family] * num_prompt_tokens)
            request.prompt_keys = PromptKeys.of(NO_ISOLATION, tokens, self.limits.page_size)
        assert refusal(self.limits, request) == ""
        return enqueue(self.rooms, request)

    def plan(self, now: float = 0.0) -> StepPlan:
        return plan_step(
            self.limits,
            self.rooms.available,
            self.rooms.select(RequestState.RUNNING),
            self.rooms.select(RequestState.LANDING),
            self.rooms.waiting(),
            self.rooms.stuck(now),
            self.rooms.held,
            may_use_free=True,
            miss_cost=self.miss_cost,
            now=now,
            num_recent=self.num_recent,
        )

    def draft(self) -> PlanDraft:
        """Return a plan in the making, with nothing in it and nobody that waits."""
        running = self.rooms.select(RequestState.RUNNING)
        matches = HeldMatches(self.rooms.held, (), self.limits.page_size)
        slots = PlanSlots.of(self.rooms.available)
        return PlanDraft(self.limits, slots, running, [], matches, Queue((), self.limits), self.miss_cost)

    def step(self, now: float = 0.0) -> StepPlan:
        """Carry out a plan and, where it is cut, those that go on behind it. Return the last one."""
        while (plan := self.one_step(now)).is_cut:
            pass
        return plan

    def one_step(self, now: float = 0.0) -> StepPlan:
        plan = self.plan(now)
        carry_out(self.rooms, plan)
        for admission in plan.admissions:
            self.rooms.start(admission.request)
            admission.request.output_token_ids.append(0)
        self.rooms.check_integrity()
        return plan

    def run(self, request: Request, num_tokens: int) -> None:
        request.output_token_ids.extend([0] * num_tokens)


def lose(node: Node, flag: HisparseFlag, num_prompt_tokens: int) -> Request:
    """Return a request that ended at time 0 while its prefill node may still write, and stays silent."""
    lost = node.arrive(flag, num_prompt_tokens)
    (admission,) = node.plan().admissions
    node.rooms.reserve(admission, "lost", 9.0)
    end(node.rooms, lost)
    return lost


def filled_by_auto(limits: Limits = MANY, num_requests: int = 16) -> tuple[Node, list[Request]]:
    """Return a node whose device pool dense requests of ``auto`` fill."""
    node = Node(limits)
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(num_requests)]
    node.step()
    assert {request.mode for request in requests} == {Mode.DENSE}
    return node, requests


def have_missed(requests: Iterable[Request], miss_share: float = 0.5) -> None:
    """Let requests have missed ``miss_share`` of the positions that their steps have selected so far."""
    for request in requests:
        request.row_counters = SwapCounts(hits=round(100 * (1 - miss_share)), misses=round(100 * miss_share))


def settled(node: Node, miss_share: float = 0.5) -> None:
    """Carry plans out until one exchanges and fills nothing; pages are filled at once. All requests have
    missed ``miss_share`` of their positions so far."""
    have_missed(node.rooms.select(RequestState.RUNNING), miss_share)
    plan = node.step()
    while plan.exchanges or plan.fills:
        end_fills(node)
        plan = node.step()


def end_fills(node: Node) -> None:
    """Do what a node does once the pages of its requests are filled, and a step behind that is read in which
    no request shares them."""
    for request in node.rooms.select(RequestState.RUNNING):
        if request.num_page_slots:
            node.rooms.end_fill(request)
            request.shares_from = None
    node.rooms.check_integrity()


def request_slots(request: Request) -> list[int]:
    """Return the device slots that a request owns, in the order of its hot buffer or of its pages."""
    slots: list[int] = extents_to_slots(request.owned[PoolKind.DEVICE]).tolist()
    return slots
