"""Decides how many device slots each hisparse request has, by those that one plan has to spare. Pure.

``mode_choice.py`` asks for the size of a new hot buffer, and takes slots from others if nothing but device
slots is missing. When nobody waits, except for slots that may never be free again, ``scheduler.py`` gives hot
buffers their full size back, and makes requests resident with what is free then. A request gets other device
slots by an ``Exchange``, which replaces all of them before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.step_plan import Exchange

MIN_SAVED: Final = 1.0
"""Copies that a request must save by becoming resident, for each that fills its pages."""


def spare_capacity(draft: PlanDraft, request: Request) -> int:
    """Return how many entries of a hot buffer for ``request`` the spare device slots allow; 0 if they are
    fewer than its minimum."""
    page_size = draft.limits.page_size
    spare = draft.spare_device() // page_size * page_size
    capacity = min(draft.limits.max_capacity(request), spare)
    return capacity if capacity >= draft.limits.min_capacity(request) else 0


def shrink_hot_buffers(draft: PlanDraft, num_needed: int) -> None:
    """Make ``num_needed`` device slots spare, if that is possible: by residents, or if they are not enough,
    by hot buffers, too, which then shrink to their minimum, those admitted last first."""
    limits = draft.limits
    # ``smallest_hot_buffer`` suffices for any request: who has more than that has more than the minimum.
    large = [r for r in draft.running if r.is_resident or r.hot_capacity > limits.smallest_hot_buffer]
    if not shrink_residents(draft, num_needed):
        _shrink(draft, large, limits.min_capacity, num_needed)


def shrink_residents(draft: PlanDraft, num_needed: int) -> bool:
    """Give residents hot buffers of the full size, those admitted last first, until ``num_needed`` device
    slots are spare. Returns whether they are; if that cannot be reached, nobody leaves its pages."""
    residents = [r for r in draft.running if r.is_resident]
    return _shrink(draft, residents, draft.limits.max_capacity, num_needed)


def _shrink(
    draft: PlanDraft, requests: Sequence[Request], capacity_of: Callable[[Request], int], num_needed: int
) -> bool:
    """Give ``requests`` smaller hot buffers, of ``capacity_of`` entries, until ``num_needed`` device slots
    are spare, those admitted last first. Returns whether they are; if that cannot be reached, nothing
    shrinks."""
    gains: list[tuple[Request, int]] = []
    spare = draft.spare_device()
    shrinkable = (r for r in requests if r not in draft.exchanges)
    for request in sorted(shrinkable, key=_admission_order, reverse=True):
        gain = request.num_device_slots - draft.limits.in_pages(capacity_of(request))
        if gain > 0:
            gains.append((request, gain))
            spare += gain
        if spare >= num_needed:
            break
    if spare < num_needed:
        return False
    for request, gain in gains:
        draft.exchanges[request] = Exchange(request, capacity_of(request))
        freed = SlotCounts(device=gain)
        # A reserve that was made before expects these slots at the request's end, later than they are free.
        draft.note_change(request, request.mode, request.owned_slots - freed)
        draft.available += freed
    return True


def enlarge_hot_buffers(draft: PlanDraft) -> None:
    """Give hot buffers that are smaller than their request's sequence their full size, while slots last;
    those admitted first come first. This is a plan's last part, so ``draft.note_change``, which later parts
    would read, is not called."""
    if draft.exchanges or draft.admissions or draft.available.device <= draft.device_margin:
        return
    full_size = draft.limits.device_buffer_size
    small = [r for r in draft.running if 0 < r.hot_capacity < min(full_size, r.next_seq_len)]
    for request in sorted(small, key=_admission_order):
        capacity = draft.limits.max_capacity(request)
        gain = SlotCounts(device=draft.limits.in_pages(capacity) - request.num_device_slots)
        if capacity > request.hot_capacity and request.has_next_step:
            is_spare = draft.spare_device() - gain.device >= draft.device_margin
            if is_spare and draft.may_give(gain, draft.reserve):
                draft.exchanges[request] = Exchange(request, capacity)
                draft.give(gain, draft.reserve)


def make_resident(draft: PlanDraft) -> None:
    """Give one hisparse request pages for all of its tokens, if device slots are free that neither another
    hot buffer nor the growth of dense requests will need. Held pages are not given up for that.

    It is the one that saves most misses in the rest of its life for the slots that it gets. The next one has
    its turn once its row is filled, so that one request at a time sits steps out. As ``enlarge_hot_buffers``,
    this is a plan's last part.
    """
    limits = draft.limits
    if draft.exchanges or draft.admissions or any(r.is_filling for r in draft.running):
        return
    spare = draft.unheld_device() - limits.in_pages(limits.device_buffer_size)
    if spare <= 0:
        return
    best, most_saved, slots = None, -1.0, SlotCounts()
    for request in draft.running:
        if not request.hot_capacity or not request.has_next_step:
            continue
        gain = SlotCounts(device=_resident_slots(limits, request) - request.num_device_slots)
        if gain.device > spare:
            continue
        num_saved = _num_saved(limits, request)
        # What its hot buffer holds as a whole is soon copied, and found with fewer looks in pages.
        is_short = request.num_kv_tokens < limits.device_buffer_size
        if num_saved < MIN_SAVED * request.num_kv_tokens and not is_short:
            continue
        saved = num_saved / max(limits.page_size, gain.device)
        if saved > most_saved:
            best, most_saved, slots = request, saved, gain
    if best is not None and draft.may_give(slots, draft.reserve):
        draft.exchanges[best] = Exchange(best, 0, num_page_slots=_resident_slots(limits, best))
        draft.give(slots, draft.reserve)


def _num_saved(limits: Limits, request: Request) -> float:
    """Return how many items of a layer the request will miss up to the end of its life, if it goes on as its
    steps so far and selects as many as the model can."""
    num_steps = request.sampling.max_new_tokens - request.next_index
    return request.row_counters.miss_share * limits.index_topk * num_steps


def _resident_slots(limits: Limits, request: Request) -> int:
    """Return the device slots of a request that becomes resident: whole pages for its next tokens, and no
    fewer than the smallest hot buffer has, for which it may have to leave them."""
    with_growth = min(request.next_seq_len + limits.growth_tokens, request.life_tokens)
    num_tokens = max(with_growth, request.next_seq_len, limits.min_capacity(request))
    return limits.in_pages(num_tokens)


def _admission_order(request: Request) -> int:
    return request.admitted_seq
