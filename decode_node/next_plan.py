"""Asks the scheduler for the next plan, and remembers in which situation it could admit no waiting request.
Pure.

A queue that could not move costs nothing until the situation has changed.
"""

from __future__ import annotations

from typing import NamedTuple

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.request import Request, RequestState
from hisparse_pd.decode_node.scheduler import StepPlan, plan_step


class _Situation(NamedTuple):
    """All that the queue's next moves depend on."""

    num_pool_changes: int
    first: Request | None
    """The first request of the queue."""
    stuck: SlotCounts
    num_queue_changes: int
    """0 without stuck slots: only beside those, requests that do not fit are overtaken."""


class NextPlan:
    """Plans what is to be done before each next step of ``requests``."""

    def __init__(self, limits: Limits, requests: LiveRequests) -> None:
        self._limits = limits
        self._requests = requests
        self._nothing_to_do_in: _Situation | None = None

    def make(self, now: float) -> StepPlan:
        """Return the plan for the present situation, and change no request."""
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
        if plan == StepPlan() and situation.first is not None:
            self._nothing_to_do_in = situation
        return plan

    def _situation(self, stuck: SlotCounts) -> _Situation:
        requests = self._requests
        first = next(requests.waiting(), None)
        num_queue_changes = requests.num_queue_changes if stuck != SlotCounts() else 0
        return _Situation(requests.pools.num_changes, first, stuck, num_queue_changes)
