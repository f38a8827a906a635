"""Decides how large hot buffers are, by the device slots that one plan has to spare. Pure.

``mode_choice.py`` asks for the size of a new hot buffer, and shrinks others if nothing but device slots is
missing; ``scheduler.py`` gives these their full size back when nobody waits, except for slots that may never
be free again. A hot buffer gets another size by an ``Exchange``, which replaces all device slots of its
request before the next step.
"""

from __future__ import annotations

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.step_plan import Exchange


def spare_capacity(draft: PlanDraft, request: Request) -> int:
    """Return how many entries of a hot buffer for ``request`` the spare device slots allow; 0 if they are
    fewer than its minimum."""
    page_size = draft.limits.page_size
    spare = draft.spare_device() // page_size * page_size
    capacity = min(draft.limits.max_capacity(request), spare)
    return capacity if capacity >= draft.limits.min_capacity(request) else 0


def shrink_hot_buffers(draft: PlanDraft, num_needed: int) -> None:
    """Shrink hot buffers to their minimum, those admitted last first, until ``num_needed`` device slots are
    spare; shrink none if that cannot be reached."""
    limits = draft.limits
    gains: list[tuple[Request, int]] = []
    spare = draft.spare_device()
    # ``smallest_hot_buffer`` suffices for any request: who has more than that has more than the minimum.
    large = [
        r for r in draft.running if r.hot_capacity > limits.smallest_hot_buffer and r not in draft.exchanges
    ]
    for request in sorted(large, key=_admission_order, reverse=True):
        gain = request.num_device_slots - limits.in_pages(limits.min_capacity(request))
        if gain > 0:
            gains.append((request, gain))
            spare += gain
        if spare >= num_needed:
            break
    if spare < num_needed:
        return
    for request, gain in gains:
        draft.exchanges[request] = Exchange(request, limits.min_capacity(request))
        freed = SlotCounts(device=gain)
        # A reserve that was made before expects these slots at the request's end, later than they are free.
        draft.note_change(request, request.mode, request.owned_slots - freed)
        draft.available += freed


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


def _admission_order(request: Request) -> int:
    return request.admitted_seq
