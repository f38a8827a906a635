"""Asks the scheduler for the plan of each step, and shows it the queue only if a request may fit by now.
Pure.

``StepLine`` calls ``NextPlan.make`` before each step. It remembers the last situation in which the plan was
empty although requests waited: until that changes, the queue is not looked at again and costs nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.free_slots import becomes_resident
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.miss_cost import CHEAP, MissCost
from hisparse_pd.decode_node.plan_draft import is_urgent
from hisparse_pd.decode_node.recent_load import RecentLoad
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.scheduler import plan_step
from hisparse_pd.decode_node.step_plan import StepPlan

PLANS_BETWEEN: Final = 16
"""After a plan that found no use for free device slots, this many plans do not look for one. While the same
number of requests runs, only their growth and their misses change."""


class _Situation(NamedTuple):
    """All that decides whether a waiting request can be admitted."""

    num_pool_changes: int
    num_forgotten_pages: int
    """A wrong row makes pages impossible to find, which changes no pool as long as others use them."""
    first: Request | None
    """The first request of the queue."""
    first_is_urgent: bool
    """Whether it waits for nothing but room."""
    stuck: SlotCounts
    """Slots that may never be free again (``LiveRequests.stuck``)."""
    num_queue_changes: int
    """Changes of the queue, or 0 while only its first request decides. Those behind it count if they may
    overtake it, because it waits for stuck slots or for the KV of its prompt's first sample, and if it is of
    ``auto``, whose mode depends on how many wait."""
    miss_cost: MissCost


class NextPlan:
    """Plans what is to be done before each next step of ``requests``."""

    def __init__(self, limits: Limits, requests: LiveRequests) -> None:
        self.limits = limits
        self._requests = requests
        self._last_empty: _Situation | None = None
        """The last situation in which the plan was empty although requests waited."""
        self._plans_until_look = 0
        """Plans until the next one that looks for a use of free device slots."""
        self._num_running = 0
        """Requests that ran at the last plan."""
        self._recent_load = RecentLoad()
        self.miss_cost = CHEAP
        """The cost of misses, as ``StepLine`` has estimated it last."""

    def make(self, now: float) -> StepPlan:
        """Return the plan for the present situation, and change no request.

        ``plan_step`` gets None for the queue if it is known that nothing in it can be admitted.
        """
        running = self._requests.select(RequestState.RUNNING)
        if len(running) != self._num_running:
            self._num_running, self._plans_until_look = len(running), 0
        looks = self.limits.keeps_residents and self._plans_until_look == 0
        landing = self._requests.select(RequestState.LANDING, RequestState.FETCHING)
        num_recent = self._recent_load.most(len(running) + len(landing), now)
        stuck = self._requests.stuck(now)
        situation = self._situation(stuck, now)
        plan = plan_step(
            self.limits,
            self._requests.available,
            running,
            landing,
            self._requests.waiting() if situation != self._last_empty else None,
            stuck,
            self._requests.held,
            quarantined=[entry.prefix for entry in self._requests.quarantine if entry.prefix is not None],
            may_use_free=looks,
            miss_cost=self.miss_cost,
            now=now,
            num_recent=num_recent,
        )
        if self._plans_until_look:
            self._plans_until_look -= 1
        elif not (plan.exchanges or plan.fills or any(r.is_filling or becomes_resident(r) for r in running)):
            self._plans_until_look = PLANS_BETWEEN
        if plan == StepPlan() and situation.first is not None:
            self._last_empty = situation
        return plan

    def _situation(self, stuck: SlotCounts, now: float) -> _Situation:
        requests = self._requests
        first = next(requests.waiting(), None)
        queue_decides = stuck != SlotCounts() or (
            first is not None and (first.first_sample is not None or first.flag is HisparseFlag.AUTO)
        )
        num_queue_changes = requests.num_queue_changes if queue_decides else 0
        first_is_urgent = first is not None and is_urgent(first, now)
        return _Situation(
            requests.pools.num_changes,
            requests.held.num_forgotten_pages,
            first,
            first_is_urgent,
            stuck,
            num_queue_changes,
            self.miss_cost,
        )
