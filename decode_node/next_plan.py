"""Asks the scheduler for the next plan, and remembers when it had none for anybody who waits. Pure.

A queue that could not move is looked at again when something has changed, and costs nothing until then.
"""

from __future__ import annotations

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.request import Request, RequestState
from hisparse_pd.decode_node.scheduler import Limits, StepPlan, plan_step


class NextPlan:
    """What is to be done before each next step of ``requests``."""

    def __init__(self, limits: Limits, requests: LiveRequests) -> None:
        self._limits = limits
        self._requests = requests
        self._nothing_to_do_in: tuple[int, Request | None, SlotCounts, int] | None = None

    def make(self, now: float) -> StepPlan:
        """The plan for what is there now; nothing is changed by it."""
        stuck = self._requests.stuck(now)
        situation = self._situation(stuck)
        plan = plan_step(
            self._limits,
            self._requests.available,
            self._requests.select(RequestState.RUNNING),
            self._requests.select(RequestState.LANDING),
            self._requests.waiting() if situation != self._nothing_to_do_in else None,
            stuck,
            self._requests.held,
        )
        if plan == StepPlan() and situation[1] is not None:
            self._nothing_to_do_in = situation
        return plan

    def _situation(self, stuck: SlotCounts) -> tuple[int, Request | None, SlotCounts, int]:
        """All that the queue's way on depends on: its first request, and beside stuck slots, where those that
        do not fit are overtaken, every one."""
        requests = self._requests
        first = next(requests.waiting(), None)
        num_moves = requests.num_queue_changes if stuck != SlotCounts() else 0
        return requests.pools.num_changes, first, stuck, num_moves
