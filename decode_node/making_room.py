"""Takes device slots back from running requests for one that waits, or that grows. Pure.

``mode_choice.py`` asks for room if the next request of the queue lacks nothing but device slots, and
``scheduler.py`` if dense requests lack slots to grow into. Requests give slots up in this order, and only as
many as are needed:

- Hot buffers shrink to their share of the device pool (``hot_buffer_sizes.py``), and residents leave their
  pages for a hot buffer of that size.
- Hot buffers shrink to the full size.
- Dense requests of ``auto`` leave their pages for hot buffers, where that is allowed.
- Hot buffers shrink to their minimum, where that is allowed.

Each time pages that are still being filled are given up first, and then those give that were admitted last.
Where that cannot make enough slots spare, nobody gives any. Each change is an ``Exchange``, which is carried
out before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.growth import exchanges_of_pages, lacks_device_slots
from hisparse_pd.decode_node.hot_buffer_sizes import share_of
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.step_plan import Exchange

MAX_ONE_BY_ONE: Final = 4
"""Most dense requests that are asked one by one to leave their pages. They are asked one by one if not all
requests could still end once all who should leave had left."""


def make_room(
    draft: PlanDraft, num_needed: int, *, dense_may_leave: bool, hot_buffers_may_be_small: bool = False
) -> bool:
    """Make ``num_needed`` device slots spare. Returns whether they are; if not, hot buffers stay as they are.

    ``dense_may_leave``: whether dense requests of ``auto`` may leave their pages.
    ``hot_buffers_may_be_small``: whether hot buffers may shrink to their minimum at last.
    """
    limits, share = draft.limits, share_of(draft)
    return (
        _shrink(draft, share, num_needed)
        or _shrink(draft, limits.device_buffer_size, num_needed)
        or (dense_may_leave and _let_dense_leave(draft, num_needed))
        or (hot_buffers_may_be_small and _shrink(draft, limits.smallest_hot_buffer, num_needed))
    )


def make_room_for_growth(draft: PlanDraft) -> bool:
    """Let hot buffers, and residents, give up what exceeds the full size if dense requests lack device slots
    for their next step. Returns whether that makes room for all of them: the next plan gives them the slots.

    Otherwise these dense requests would leave their pages, or sit out for as long as others use free slots as
    cache.
    """
    limits = draft.limits
    if not (limits.keeps_residents or limits.largest_hot_buffer > limits.device_buffer_size):
        return False
    # This page comes beside the one that is kept for each dense request that grows.
    return lacks_device_slots(draft) and make_room(draft, limits.page_size, dense_may_leave=False)


def _let_dense_leave(draft: PlanDraft, num_needed: int) -> bool:
    """Let dense requests of ``auto`` leave their pages until ``num_needed`` device slots are spare once hot
    buffers shrink to the full size. Returns whether they are. Nobody leaves if that cannot be enough.

    To know whether all requests can still end takes a look at each of them. So this is asked once for all
    that leave. If the answer is no, it is asked for one after the other, and only ``MAX_ONE_BY_ONE`` may
    leave.
    """
    limits, leaving = draft.limits, dict(draft.device_use.leaving)
    from_hot_buffers = sum(gain for _, gain in _gains(draft, limits.device_buffer_size))
    most = sum(num_slots - limits.in_pages(limits.max_capacity(r)) for r, num_slots in leaving.items())
    if draft.spare_device() + most + from_hot_buffers < num_needed:
        return False

    def is_enough(leaves: Callable[[Request, int], bool]) -> Iterator[bool]:
        for request, num_slots in leaving.items():
            # The one that leaves and the one that comes are hisparse, and the pages are there for all.
            left = leaves(request, share_of(draft, 2, num_slots))
            yield left and draft.spare_device() + from_hot_buffers >= num_needed

    mark = draft.mark()
    enough = any(is_enough(partial(_leave, draft)))
    if not draft.all_can_end:
        draft.undo(mark)
        enough = any(islice(is_enough(partial(leave_safely, draft)), MAX_ONE_BY_ONE))
    return enough and (
        draft.spare_device() >= num_needed or _shrink(draft, limits.device_buffer_size, num_needed)
    )


def _leave(draft: PlanDraft, request: Request, capacity: int) -> bool:
    """Let a dense request leave its pages for a hot buffer of at most ``capacity`` entries. Returns whether
    the slots for that are free."""
    return any(draft.leave_pages(*exchange) for exchange in _exchanges(draft, request, capacity))


def leave_safely(draft: PlanDraft, request: Request, capacity: int) -> bool:
    """Let a dense request leave its pages if all requests can still end then. Returns whether it leaves."""
    for exchange in _exchanges(draft, request, capacity):
        mark = draft.mark()
        if draft.leave_pages(*exchange):
            if draft.all_can_end:
                return True
            draft.undo(mark)
    return False


def _exchanges(draft: PlanDraft, request: Request, capacity: int) -> Iterator[tuple[Exchange, SlotCounts]]:
    """Yield exchanges of a request's pages for a hot buffer of at most ``capacity`` entries and fewer slots
    than the pages have that it gives up, each with the slots that it takes."""
    limits = draft.limits
    capacity = limits.max_capacity(request, min(capacity, draft.num_left(request) - limits.page_size))
    return exchanges_of_pages(limits, request, capacity)


def _gains(draft: PlanDraft, most: int) -> Iterator[tuple[Request, int]]:
    """Yield the hisparse requests that have more device slots than hot buffers of at most ``most`` entries,
    each with the number that it gives up: first those whose pages are being filled, then those with most
    slots, so that few have to change, and among equals those admitted last."""
    most_slots = draft.limits.hot_slots(most)
    in_order = sorted(
        draft.device_use.hisparse.items(), key=lambda each: (not each[1].num_page_slots, -each[1].num_slots)
    )
    for request, hot in in_order:
        gain = hot.given_up(most_slots)
        if gain > 0 and request not in draft.exchanges:
            yield request, gain


def _shrink(draft: PlanDraft, most: int, num_needed: int) -> bool:
    """Give requests hot buffers of at most ``most`` entries, in the order of ``_gains``, until ``num_needed``
    device slots are spare. Returns whether they are; if that cannot be reached, nothing shrinks."""
    gains: list[tuple[Request, int]] = []
    spare = draft.spare_device()
    for request, gain in _gains(draft, most):
        if spare >= num_needed:
            break
        gains.append((request, gain))
        spare += gain
    if spare < num_needed:
        return False
    for request, gain in gains:
        capacity = draft.limits.max_capacity(request, most)
        if request.num_page_slots:  # these are given up, and the hot buffer beside them does not grow
            capacity = min(capacity, request.hot_capacity)
        own = gain
        if request.is_resident:  # the draft counts by itself what is free of the pages that it shares
            own = request.owned_slots.device - draft.limits.in_pages(capacity)
        draft.make_hot_buffer(Exchange(request, capacity), SlotCounts(device=own))
    return True
