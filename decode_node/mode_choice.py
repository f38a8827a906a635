"""Decides in which mode a waiting request is admitted, with how many slots. Pure.

``scheduler.py`` calls ``admit`` for the requests of the queue, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import assert_never

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.held_matches import HeldMatch
from hisparse_pd.decode_node.hot_buffer_sizes import (
    all_can_have,
    kept_for_arrivals,
    num_coming,
    share_of,
    spare_capacity,
)
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.making_room import make_room
from hisparse_pd.decode_node.mode_speed import (
    dense_alone_pays,
    dense_pays,
    hisparse_pays,
    hot_buffers_are_enough,
    leaves_hot_buffers,
)
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.step_plan import Admission


def admit(draft: PlanDraft, request: Request, modes: Collection[Mode]) -> bool:
    """Admit ``request`` in a mode that it allows. Returns False if it fits in none.

    ``modes``: those that a request with the flag ``auto`` may have: both, or for a local request those in
    which it needs no prefill node.
    """
    if not (draft.available.aux and draft.available.req_row):
        return False
    match request.flag:
        case HisparseFlag.TRUE:
            return _admit_hisparse(draft, request)
        case HisparseFlag.FALSE:
            return _admit_dense(draft, request)
        case HisparseFlag.AUTO:
            return _admit_auto(draft, request, modes)
        case _:
            assert_never(request.flag)


def _admit_auto(draft: PlanDraft, request: Request, modes: Collection[Mode]) -> bool:
    if request.dense_refusal or Mode.DENSE not in modes:
        return _admit_hisparse(draft, request)
    if Mode.HISPARSE not in modes:
        return _admit_dense(draft, request)
    held = draft.matches.find(request, Mode.DENSE)
    num_tokens = request.num_prompt_tokens + draft.limits.growth_tokens
    num_taken = _need(draft.limits, request, Mode.DENSE, num_tokens, held).device + held.taken.device
    use = draft.device_use
    # If nobody has had a hot buffer for long, the next request that lacks room for pages gets one: it shows
    # what hot buffers miss.
    shows_misses = draft.miss_cost.is_stale and not use.num_hisparse
    is_judged = draft.limits.may_be_dense(request) and not (shows_misses or draft.is_urgent(request))
    if is_judged and use.num_dense + use.num_hisparse > 0:
        if dense_alone_pays(draft, num_taken):
            return _admit_dense(draft, request)  # or it waits for the end of others
        if hot_buffers_are_enough(draft, num_taken):
            return False
    if is_judged and not hisparse_pays(draft):
        if dense_pays(draft, num_taken) and _admit_dense(draft, request):
            return True
        if use.num_dense:
            return False  # it waits for the pages of one that ends
    half = draft.limits.in_pages(min(num_tokens, request.life_tokens) // 2)
    most = min(draft.limits.device_buffer_size, half)  # with more, pages would be of more use
    if leaves_hot_buffers(draft, num_taken) and not _starts_sooner_hisparse(draft.limits, request, held):
        return _admit_dense(draft, request) or _admit_hisparse(draft, request, most)
    return _admit_hisparse(draft, request, most) or _admit_dense(draft, request)


def _starts_sooner_hisparse(limits: Limits, request: Request, held: HeldMatch) -> bool:
    """Return whether most of the prompt's KV is in the host pool and not on the device. A dense request waits
    until all of that has come up; a hisparse one with a hot buffer begins at once, and gets pages beside its
    first steps. One that is resident at once waits for its KV alone, and keeps it in the host pool, too."""
    return limits.keeps_residents and 2 * held.num_copied * limits.page_size > request.num_prompt_tokens


def _admit_hisparse(draft: PlanDraft, request: Request, most: int = 0) -> bool:
    """Admit ``request`` with pages for all of its tokens, or with as large a hot buffer as is spare, up to
    ``most`` entries; 0: up to the full size. If that is too small, others make room, but only if nothing but
    device slots is missing."""
    num_tokens = request.num_prompt_tokens + draft.limits.growth_tokens
    min_capacity = draft.limits.min_capacity(request)
    held = draft.matches.find(request, Mode.HISPARSE)
    beside_device = _need(draft.limits, request, Mode.HISPARSE, num_tokens, held)
    if _admit_resident(draft, request, beside_device, held):
        return True
    if not draft.may_land(Admission(request, Mode.HISPARSE, beside_device, hot_capacity=0), held):
        return False
    smallest, full_size = (
        draft.limits.in_pages(capacity)
        for capacity in (min_capacity, draft.limits.max_capacity(request, most))
    )
    # Dense requests that leave their pages take host slots, which the request may lack then.
    for dense_may_leave in (True, False) if _dense_may_leave(draft, request) else (False,):
        mark = draft.mark()
        if draft.spare_device() < full_size:
            make_room(draft, full_size, dense_may_leave=dense_may_leave)
        if not spare_capacity(draft, request, most):
            make_room(draft, smallest, dense_may_leave=dense_may_leave, hot_buffers_may_be_small=True)
        # Where the reserve does not allow a hot buffer of the spare size, it may allow the smallest.
        for capacity in (*_shares(draft, request), spare_capacity(draft, request, most), min_capacity):
            need = beside_device + SlotCounts(device=draft.limits.in_pages(capacity))
            if capacity and draft.land(Admission(request, Mode.HISPARSE, need, capacity), held):
                return True
        draft.undo(mark)
    return False


def _admit_resident(draft: PlanDraft, request: Request, beside_device: SlotCounts, held: HeldMatch) -> bool:
    """Admit a local request with pages for all of its tokens, which are filled before its first step, if all
    others can have as many. A copy of all items takes as long as some steps with misses. One that could share
    others' pages gets a hot buffer, and shares them later."""
    limits = draft.limits
    if not (limits.keeps_residents and request.is_local) or draft.matches.find_resident(request).num_pages:
        return False
    num_slots = limits.resident_slots(request, num_shared=0)
    if not all_can_have(draft, num_slots):
        return False
    need = beside_device + SlotCounts(device=num_slots)
    return draft.land(Admission(request, Mode.HISPARSE, need, hot_capacity=0), held)


def _shares(draft: PlanDraft, request: Request) -> Iterator[int]:
    """Yield the share, in entries, if a request begins at once and the share is spare beside what stays free
    for others: it would get as much in its first steps, and skip one for that. One that would have to
    fill the share before it begins gets less at first."""
    share = share_of(draft, num_coming(draft))
    capacity = draft.limits.max_capacity(request, share)
    is_spare = draft.spare_device() >= draft.limits.in_pages(capacity) + kept_for_arrivals(draft)
    if request.is_local and capacity < request.num_prompt_tokens and is_spare:
        yield capacity


def _admit_dense(draft: PlanDraft, request: Request) -> bool:
    """Admit ``request`` with pages for its prompt and all the slots to grow into that an admission gives, or
    else with a page of them. For the latter others make room, but only if nothing but device slots is
    missing; requests of ``auto`` leave their pages only for one that must be dense."""
    held, limits = draft.matches.find(request, Mode.DENSE), draft.limits
    lengths = (request.num_prompt_tokens + more for more in (limits.growth_tokens, limits.page_size))
    admissions = [
        Admission(request, Mode.DENSE, _need(limits, request, Mode.DENSE, num_tokens, held), 0)
        for num_tokens in lengths
    ]
    if any(draft.land(admission, held) for admission in admissions):
        return True
    smallest = admissions[-1]
    on_device = SlotCounts(device=smallest.need.device)
    if not draft.may_land(replace(smallest, need=smallest.need - on_device), held):
        return False
    num_needed = on_device.device + held.taken.device
    dense_may_leave = request.flag is HisparseFlag.FALSE and _dense_may_leave(draft, request)
    mark = draft.mark()
    if make_room(draft, num_needed, dense_may_leave=dense_may_leave):
        # One that leaves its pages may have been the only user of those that this request shares.
        held = draft.matches.find(request, Mode.DENSE)
        if draft.land(smallest, held):
            return True
    draft.undo(mark)
    return False


def _dense_may_leave(draft: PlanDraft, request: Request) -> bool:
    """Return whether dense requests of ``auto`` may leave their pages for ``request``: where that pays, or if
    it has waited for long."""
    return bool(draft.device_use.leaving) and (draft.is_urgent(request) or hisparse_pays(draft))


def _need(limits: Limits, request: Request, mode: Mode, num_tokens: int, held: HeldMatch) -> SlotCounts:
    """Return the slots, without a hot buffer's, that an admission with ``num_tokens`` of KV takes."""
    kv = limits.kv_slots(mode, min(num_tokens, request.life_tokens), held.num_pages)
    return kv + SlotCounts(aux=1, req_row=1)
