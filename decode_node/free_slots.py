"""Gives the device slots that are free to running requests, when nobody waits for them. Pure.

``scheduler.py`` calls these as the last part of a plan, if the queue is empty or has only requests that wait
for slots which may never be free:

- ``enlarge_hot_buffers`` gives small hot buffers their full size back.
- ``use_free_slots`` gives hisparse requests a larger hot buffer (an ``Exchange``), or pages for all of their
  tokens (a ``Fill``), in order of the misses that this saves for each slot.
- ``share_pages`` lets a dense request of ``auto`` leave its pages where hot buffers are so small that all
  requests together miss less then.

Free slots are a cache: ``making_room.py`` takes them back for the next request that waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.hot_buffer_sizes import kept_for_arrivals, share_of
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.making_room import leave_safely
from hisparse_pd.decode_node.mode_speed import num_saved_positions
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request, admission_order
from hisparse_pd.decode_node.step_plan import Exchange, Fill

MIN_SAVED: Final = 1.0
"""The copies that a request's pages must save for each copy that fills them. A hot buffer grows only if its
request will still miss as often for each new entry, since misses fill new entries."""
HELD_SAVES: Final = 4.0
"""The copies that a held page without users is taken to save for each of its positions. A request that shares
the page spares its landing, which takes as long as some copies into a hot buffer; but it is not certain that
one ever does."""
MIN_GROWTH: Final = 1.25
"""The least factor by which a hot buffer grows. For less it is not worth skipping a step."""


def enlarge_hot_buffers(draft: PlanDraft) -> None:
    """Give hot buffers that are smaller than their request's sequence their full size, while slots last;
    those admitted first come first. This is a plan's last part, so ``draft.note_change``, which later parts
    would read, is not called."""
    full_size = draft.limits.device_buffer_size
    kept = draft.limits.in_pages(full_size)  # for the next arrival
    if draft.exchanges or draft.admissions or draft.available.device <= kept:
        return
    small = [
        r
        for r in draft.running
        if 0 < r.hot_capacity < min(full_size, r.next_seq_len) and not r.num_page_slots
    ]
    for request in sorted(small, key=admission_order):
        capacity = draft.limits.max_capacity(request)
        gain = SlotCounts(device=draft.limits.in_pages(capacity) - request.num_device_slots)
        if capacity > request.hot_capacity and request.has_next_step:
            is_spare = draft.spare_device() - gain.device >= kept
            if is_spare and draft.may_give(gain, draft.reserve):
                draft.exchanges[request] = Exchange(request, capacity)
                draft.give(gain, draft.reserve)


def use_free_slots(draft: PlanDraft) -> None:
    """Give hisparse requests free device slots: for a hot buffer of their share, or for pages of all tokens.

    Slots stay free for the hot buffers of next arrivals and for the growth of dense requests. Held pages
    without users are given up for a larger hot buffer that saves more than they do, but not for pages, which
    are held themselves once their request has ended and would take each other's place. What saves most misses
    in the rest of a request's life, for the slots that it takes, comes first. One plan may enlarge all hot
    buffers, but gives pages to one request only. Pages are filled beside steps, those of several requests at
    once up to ``Limits.fill_tokens``. Of requests with a common beginning, one fills the pages; the others
    have their turn once it shares them. Like ``enlarge_hot_buffers``, this is a plan's last part.
    """
    limits = draft.limits
    if draft.exchanges or draft.admissions or any(r.is_filling for r in draft.running):
        return
    coming = [r for r in draft.running if becomes_resident(r)]
    num_filling = sum(r.num_kv_tokens - r.num_resident_pages * limits.page_size for r in coming)
    may_fill = limits.keeps_residents and not (coming and num_filling >= limits.fill_tokens)
    share = share_of(draft)
    orders: list[tuple[float, float, Exchange | Fill]] = []
    for request in draft.running:
        if request.hot_capacity and not request.num_page_slots and request.has_next_step:
            for order, num_saved in _larger(draft, request, share, coming if may_fill else None):
                _, gain = _slots_taken(limits, order)
                orders.append((num_saved / max(limits.page_size, gain), num_saved, order))
    for _, num_saved, order in sorted(orders, key=itemgetter(0), reverse=True):
        if order.request in draft.exchanges or not _is_spare(draft, order, num_saved):
            continue
        if isinstance(order, Fill):
            _fill(draft, order)
            return  # what is left behind that is for the next plan
        _grow(draft, order)


def share_pages(draft: PlanDraft) -> None:
    """Let one dense request of ``auto`` leave its pages for a hot buffer where hot buffers are small.

    It leaves if all hot buffers together miss less then: in the rest of its life by more than the copies that
    its leaving takes. ``use_free_slots`` gives the slots away. Copies to the host hold steps up, so one
    request a plan leaves, and only when nobody's rows or pages are being filled.
    """
    if draft.exchanges or draft.admissions or draft.fills:
        return
    if any(r.is_filling or becomes_resident(r) for r in draft.running):
        return
    request, num_left = next(iter(draft.device_use.leaving.items()), (None, 0))
    if request is None:
        return
    num_steps = request.sampling.max_new_tokens - request.next_index
    num_saved = num_steps * num_saved_positions(draft, 1, num_left)
    capacity = share_of(draft, 1, num_left)
    if 0 < num_saved >= MIN_SAVED * (request.num_kv_tokens + capacity):
        leave_safely(draft, request, capacity)


def becomes_resident(request: Request) -> bool:
    """Return whether a request's pages are being filled, or are filled and its next step lets others share
    them."""
    return request.num_page_slots > 0 or request.will_share


def _is_spare(draft: PlanDraft, order: Exchange | Fill, num_saved: float) -> bool:
    """Return whether an order that saves ``num_saved`` copies can have its slots: free ones, or if a hot
    buffer saves enough, those of held pages. While pages are being filled, they may take slots that are kept
    for the next arrival, because they are given up for it (``make_room``)."""
    taken, gain = _slots_taken(draft.limits, order)
    takes_held = isinstance(order, Exchange) and num_saved > HELD_SAVES * taken
    spare = draft.spare_device() if takes_held else draft.unheld_device()
    return taken <= spare and gain <= spare - kept_for_arrivals(draft)


def _grow(draft: PlanDraft, exchange: Exchange) -> None:
    """Give a larger hot buffer if all requests can still end then."""
    taken, _ = _slots_taken(draft.limits, exchange)
    slots = SlotCounts(device=taken)
    if draft.reserve.is_safe and draft.may_give(slots, draft.reserve):
        draft.exchanges[exchange.request] = exchange
        draft.give(slots, draft.reserve)


def _fill(draft: PlanDraft, fill: Fill) -> None:
    """Give pages if all requests can still end when this one has them and shares the resident pages."""
    reserve = draft.reserve
    if fill.num_resident_pages:
        reserve = draft.reserve_sharing(draft.matches.find_resident(fill.request))
    slots = SlotCounts(device=fill.num_page_slots)
    if reserve.is_safe and draft.may_give(slots, reserve):
        draft.fills.append(fill)
        draft.give(slots, reserve)


def _slots_taken(limits: Limits, order: Exchange | Fill) -> tuple[int, int]:
    """Return the free device slots that an order takes at once, and how many more its request has in the end:
    once its pages are filled, it gives up its hot buffer."""
    num_before = order.request.num_device_slots
    if isinstance(order, Fill):
        return order.num_page_slots, order.num_page_slots - num_before
    gain = limits.in_pages(order.hot_capacity) - num_before
    return gain, gain


def _larger(
    draft: PlanDraft, request: Request, share: int, coming: Sequence[Request] | None
) -> Iterator[tuple[Exchange | Fill, float]]:
    """Yield what a request may get in place of its hot buffer, each with the copies that it saves: a larger
    one, if the request will miss enough to fill it, and pages, if they save more copies than fill them. A
    request that misses nothing stays as it is. ``coming``: the requests that become resident
    (``becomes_resident``); None: no more pages may be filled."""
    limits, num_missed = draft.limits, _num_missed(draft.limits, request)
    if num_missed <= 0:
        return
    larger = limits.max_capacity(request, share)
    num_more = larger - request.hot_capacity
    if larger >= MIN_GROWTH * request.hot_capacity and num_missed >= MIN_SAVED * num_more:
        # Misses halve with each doubling (docs/decisions.md).
        yield Exchange(request, larger), num_missed * num_more / larger
    if coming is None:
        return
    num_pages = draft.matches.find_resident(request).num_pages  # which need no copy
    num_shared = num_pages * limits.page_size
    if num_missed < MIN_SAVED * (request.num_kv_tokens - num_shared):
        return
    if not any(_has_next_page(other, request, num_pages) for other in coming):
        num_own = limits.resident_slots(request, num_shared)
        yield Fill(request, num_page_slots=num_own, num_resident_pages=num_pages), num_missed


def _has_next_page(other: Request, request: Request, num_pages: int) -> bool:
    """Return whether two prompts have the same beginning, of more than ``num_pages`` pages."""
    page = slice(num_pages, num_pages + 1)
    return len(request.usable_keys[page]) > 0 and other.usable_keys[page] == request.usable_keys[page]


def _num_missed(limits: Limits, request: Request) -> float:
    """Return how many items of a layer the request will miss up to the end of its life, if it misses as large
    a share as so far and each step selects as many positions as the model can."""
    num_steps = request.sampling.max_new_tokens - request.next_index
    return request.row_counters.miss_share * limits.index_topk * num_steps
