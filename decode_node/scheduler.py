"""Plans a step: which requests are admitted and in which mode, which get slots, and whose hot buffer changes.

``NextPlan`` calls ``plan_step`` before each step, and ``PlanMoves.carry_out`` does what it returns.
``plan_step`` looks at requests and at counts of free slots, and changes nothing. It keeps these rules,
together with ``growth.py``, ``mode_choice.py`` and ``free_slots.py``, which it calls:

- A request is admitted with slots for its prompt, except for the pages that are held, and for
  ``growth_tokens`` more; it gets as many again before the step that needs them. No grant takes away a
  request's way to its end (``reserve.py``). A request that cannot get slots sits steps out and keeps its KV.
- Growth comes before admission, and nobody is admitted while a request sits out. Admissions leave a page free
  for each request that will grow.
- Admission is in order of arrival: while the first in the queue does not fit, nobody overtakes it,
  unless it waits for stuck slots, which may never be free: those to which a prefill node without a sign of
  life may still write, and pages that are set aside because of wrong rows.
- Further samples of a prompt wait while the first one's KV is on its way, and then share or copy it
  (``local_kv.py``). The rest of the queue overtakes them.
- A request of ``auto`` is dense while all others that are hisparse or wait can have hot buffers of use beside
  it (``leaves_hot_buffers``), and hisparse otherwise. If slots of one mode are lacking, it gets the other.
- A request of ``auto`` waits although it could be hisparse where that makes all requests together faster. It
  waits for pages if one more hisparse request would cost more than it brings (``hisparse_pays``), or if as
  many dense requests as fit make more tokens than any number of hisparse ones (``dense_alone_pays``). It
  waits for the end of others if its hot buffer would make all hot buffers so small that dense requests alone
  are faster (``hot_buffers_are_enough``). It waits like that for half of its time at most (``is_urgent``).
  If nobody has had a hot buffer for long, the cost of misses is as good as unknown, and the next request that
  lacks room for pages gets one.
- A dense request that cannot get its next page gives its pages up for a hot buffer, if the host pool has
  slots for it.
- While the first in the queue lacks only device slots, dense requests of ``auto`` give their pages up for a
  hot buffer, if that pays, those admitted last first, unless another of ``auto`` wants to be dense. When
  nobody waits, they do so where hot buffers are small (``share_pages``).
- If the first in the queue lacks device slots for a hot buffer, and that is not enough, hot buffers shrink to
  their minimum. They get their full size back when nobody waits and one of the full size stays free for the
  next arrival.
- Where ``Limits`` says so, free device slots are cache: a hot buffer may have its share of the device pool,
  and a hisparse request pages for all of its tokens, which are filled beside its steps. When others need the
  slots, also to grow, hisparse requests give up what exceeds the full size before any dense request leaves
  its pages; pages that are still being filled are given up first. A hisparse request leaves its pages, too,
  when it cannot get the next one. A local request begins with its pages, or its share, at once if all that
  run, wait or are expected can have as much: nothing is given that the next one would take back.
- One plan admits a few requests; the next one, which comes at once, goes on behind them. The time of a plan
  is bounded however many arrive together.
- Slots for drafts come with the others if they are free; nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.decode_node.free_slots import enlarge_hot_buffers, share_pages, use_free_slots
from hisparse_pd.decode_node.growth import grow
from hisparse_pd.decode_node.held_matches import HeldMatches
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.local_kv import local_modes, waits_for_landing
from hisparse_pd.decode_node.making_room import make_room_for_growth
from hisparse_pd.decode_node.miss_cost import CHEAP, MissCost
from hisparse_pd.decode_node.mode_choice import admit
from hisparse_pd.decode_node.plan_draft import PlanDraft, Queue
from hisparse_pd.decode_node.plan_slots import PlanSlots
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import StepPlan

MAX_LOOKED_AT = 256
"""Most requests of the queue that one plan looks at: those that it admits, and those that are overtaken
because they wait for stuck slots or for a first sample."""
MAX_ADMITTED = 16
"""Most requests that one plan admits."""
MAX_ORDERS = 4
"""Orders in which all requests can end (``reserve.py``), each a look at all of them, after which a plan
admits nobody else. The last request may take some more."""


def plan_step(
    limits: Limits,
    free: SlotCounts,
    running: Sequence[Request],
    landing: Sequence[Request],
    waiting: Iterable[Request] | None,
    stuck: SlotCounts,
    held: PrefixTree,
    *,
    quarantined: Iterable[Prefix] = (),
    may_use_free: bool = False,
    miss_cost: MissCost = CHEAP,
    now: float = 0.0,
    num_recent: int = 0,
) -> StepPlan:
    """Return what to do before the next step.

    ``free``: slots that can be given away, those of ``held`` prefixes without users included. ``waiting``:
    requests that ``refusal`` does not refuse, in order of arrival; None if nobody could be admitted last time
    and nothing has changed. ``stuck``: slots that may never be free again. ``quarantined``: prefixes of rooms
    in quarantine. ``may_use_free``: whether to look for a request that makes use of device slots that are
    free, or others' pages, which takes a look at all that run. ``now``: a time of ``time.monotonic``.
    ``num_recent``: the most requests that had slots at a time in the last moments.
    """
    remote = (*(request.prefix for request in landing if request.prefix is not None), *quarantined)
    matches = HeldMatches(held, remote, limits.page_size)
    queue = Queue(waiting or (), limits)
    draft = PlanDraft(
        limits, PlanSlots.of(free), running, landing, matches, queue, miss_cost, now, num_recent
    )
    no_longer_local: list[Request] = []
    is_cut = makes_room = make_room_for_growth(draft)
    all_have_slots = not makes_room and grow(draft)
    if waiting is not None and all_have_slots:
        usable = replace(limits, totals=limits.totals - stuck) if stuck != SlotCounts() else limits
        outcome = _admit_in_order(draft, usable, no_longer_local)
        is_cut = outcome is _Outcome.CUT
        if outcome is _Outcome.ONLY_STUCK_WAIT:
            enlarge_hot_buffers(draft)
            if may_use_free:
                use_free_slots(draft)
                share_pages(draft)
    return StepPlan(
        no_longer_local=tuple(no_longer_local),
        exchanges=tuple(draft.exchanges.values()),
        fills=tuple(draft.fills),
        growths=tuple(draft.growths),
        admissions=tuple(draft.admissions.values()),
        is_cut=is_cut,
    )


class _Outcome(Enum):
    """What is left of the queue behind a plan's admissions."""

    ONLY_STUCK_WAIT = auto()
    """Requests that wait for stuck slots, or that leave the queue for their prefill nodes before anything
    else of the plan is done."""
    OTHERS_WAIT = auto()
    """Requests that do not fit, among others."""
    CUT = auto()
    """Requests that were not looked at, because the plan admits no more."""


def _admit_in_order(draft: PlanDraft, usable: Limits, no_longer_local: list[Request]) -> _Outcome:
    """Admit requests of the queue until one does not fit, or the plan admits no more.

    ``usable``: the limits without stuck slots. ``no_longer_local`` gets the latter: local requests that need
    a prefill node after all.
    """
    some_wait_for_first = False
    for number, request in enumerate(iter(draft.queue.pop, None)):
        if number == MAX_LOOKED_AT:
            return _Outcome.OTHERS_WAIT
        if usable is not draft.limits and refusal(usable, request):
            continue  # it fits only if stuck slots become free, which may never be
        if _waits_for_first_sample(draft, request):
            some_wait_for_first = True
            continue
        modes: Collection[Mode] = tuple(Mode)
        if request.is_local:
            modes = _local_modes(draft, request, usable)
            if not modes:
                no_longer_local.append(request)
                continue
        if not admit(draft, request, modes):
            return _Outcome.OTHERS_WAIT
        if len(draft.admissions) == MAX_ADMITTED or draft.num_orders >= MAX_ORDERS:
            return _Outcome.CUT
    return _Outcome.OTHERS_WAIT if some_wait_for_first else _Outcome.ONLY_STUCK_WAIT


def _waits_for_first_sample(draft: PlanDraft, request: Request) -> bool:
    """Return whether ``request`` waits for the KV of the first sample, which is landing or will be once this
    plan is carried out."""
    first, page_size = request.first_sample, draft.limits.page_size
    if first is None:
        return False
    if first.state in (RequestState.LANDING, RequestState.FETCHING):
        return waits_for_landing(request, first.mode, first.held_prefix_tokens, page_size)
    admission = draft.admissions.get(first)
    if admission is None:
        # Nothing to wait for: the first one's KV is here, or it has ended, or it got no slots itself.
        return False
    num_held = admission.num_shared_pages * page_size
    return waits_for_landing(request, admission.mode, num_held, page_size)


def _local_modes(draft: PlanDraft, request: Request, usable: Limits) -> list[Mode]:
    """Return the modes in which ``request`` needs no prefill node."""

    def num_held(mode: Mode) -> int:
        return draft.matches.find(request, mode).num_pages * draft.limits.page_size

    return local_modes(request, usable, num_held)
