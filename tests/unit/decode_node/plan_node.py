"""A decode node of books and planner alone, with small pools, for tests of plans."""

from __future__ import annotations

from dataclasses import replace

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.miss_cost import CHEAP
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.scheduler import plan_step
from hisparse_pd.decode_node.step_plan import StepPlan
from hisparse_pd.engine.messages import pack_token_ids
from tests.books import carry_out, enqueue, make_request

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


class Node:
    """Books and planner; every room is delivered at once."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.rooms = LiveRequests(Pools(limits.totals, limits.page_size), 1.0)
        self.num_requests = 0
        self.miss_cost = CHEAP

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
        )

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
