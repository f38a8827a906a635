"""Decides how many device slots each hisparse request has, by those that one plan has to spare. Pure.

``mode_choice.py`` asks for the size of a new hot buffer, and lets others make room if nothing but device
slots is missing; ``scheduler.py`` lets them do so for dense requests that grow. When nobody waits, except for
slots that may never be free again, it gives hot buffers their full size back, and requests more of what is
free then; where hot buffers are small beside dense requests of ``auto``, one of these leaves its pages. A
request gets a hot buffer of another size, or one for its pages, by an ``Exchange`` before the next step, and
pages for all of its tokens by a ``Fill``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Final

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.growth import exchanges_of_pages, lacks_device_slots
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.step_plan import Exchange, Fill

HOT_SPEED: Final = 0.95
"""The part of the tokens of dense requests that as many with hot buffers make if they miss nothing: their
steps look positions up, and it takes copies to make room for them."""
MIN_SAVED: Final = 1.0
"""Copies that a request must save by pages, for each that fills these; and misses that it must have ahead of
it, for each entry that its hot buffer gets: these fill the new entries."""
MIN_GROWTH: Final = 1.25
"""How many times as many entries a hot buffer must get if it is to grow, for which the step in flight is
waited for."""
MAX_ONE_BY_ONE: Final = 4
"""Dense requests that are asked one by one to leave their pages, where not all that should can do so."""


def spare_capacity(draft: PlanDraft, request: Request, most: int) -> int:
    """Return how many entries of a hot buffer for ``request``, up to ``most``, the spare device slots allow;
    0 if they are fewer than its minimum. ``most``: 0 for the full size.

    It may get more once it runs: slots of a request whose KV is on its way cannot be taken back for others.
    """
    page_size = draft.limits.page_size
    spare = draft.spare_device() // page_size * page_size
    capacity = min(draft.limits.max_capacity(request, most), spare)
    return capacity if capacity >= draft.limits.min_capacity(request) else 0


def leaves_hot_buffers(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether a request of the queue may take ``num_taken`` device slots for its pages, so that all
    requests together miss least.

    That is so if all others that are hisparse or wait can then have hot buffers of half as many entries, or
    of the largest size. Misses halve with each doubling (docs/decisions.md). So a request with ``s`` slots
    that takes a hot buffer of ``c`` entries, as others have, misses ``k / c``, and the ``s - c`` slots that
    it leaves save others ``k * (s - c) / c**2``: more if ``c`` is below ``s / 2``.
    """
    limits, use = draft.limits, draft.device_use
    most_slots = limits.hot_slots(min(_largest(limits), num_taken // 2))
    left = draft.spare_device() - num_taken - use.num_lacked(most_slots)
    if left < 0:
        return False
    # Who waits for a row does not need slots yet.
    for wanted in draft.queue.first(draft.available.req_row - 1):
        left -= wanted.num_slots if wanted.must_be_dense else min(most_slots, wanted.num_slots)
        if left < 0:
            return False
    return True


def _share_of(draft: PlanDraft, num_more: int = 0, num_more_slots: int = 0) -> int:
    """Return how many entries each hot buffer has if all hisparse requests, and ``num_more``, divide what
    dense ones leave of the device pool, and ``num_more_slots``: no fewer than the full size, and no more than
    the largest."""
    limits, use = draft.limits, draft.device_use
    num_slots = limits.totals.device - use.dense_slots
    entries = (num_slots + num_more_slots) // max(1, use.num_hisparse + num_more)
    in_pages = entries // limits.page_size * limits.page_size
    return max(limits.device_buffer_size, min(limits.largest_hot_buffer, in_pages))


def hisparse_pays(draft: PlanDraft) -> bool:
    """Return whether one more hisparse request makes the node's tokens a second more (``miss_cost.py``):
    beside the hot buffers that there are, or if a dense request of ``auto`` leaves its pages for both."""

    def pays(num_more: int, num_more_slots: int = 0) -> bool:
        return draft.miss_cost.pays(-_num_saved(draft, num_more, num_more_slots))

    if pays(1):
        return True
    num_left = next(iter(draft.device_use.leaving.values()), 0)
    return num_left > 0 and pays(2, num_left)


def dense_alone_pays(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether the node makes more tokens a second if dense requests run alone, as many as the device
    pool holds, and the others wait, than if all run, as far as that pays. ``num_taken``: the device slots
    that the request which is next takes for its pages.

    ``hisparse_pays`` tells what one request more brings. Where many have hot buffers, it does not tell how
    fast fewer dense ones would be in their place.
    """
    limits, use, cost = draft.limits, draft.device_use, draft.miss_cost
    if use.num_never_dense or not cost.tells_speed:
        return False
    num_reqs, mean_taken = _all_requests(draft, num_taken)
    num_slots, largest = limits.totals.device, _largest(limits)
    num_dense = num_slots // mean_taken
    if num_dense >= num_reqs:
        return False  # all can be dense, and nobody need wait
    # Beside hot buffers of use some are dense (``leaves_hot_buffers``). Beside smaller ones nobody is.
    most = limits.hot_slots(min(largest, mean_taken // 2))
    num_beside = max(0, num_slots - num_reqs * most) // max(1, mean_taken - most)
    num_hot = num_reqs - num_beside
    if not num_beside:
        num_hot = int(min(num_hot, max(1.0, cost.most_hot(num_slots), num_slots / most)))
    num_missed = cost.num_missed(num_hot, num_slots - num_beside * mean_taken, largest, mean_taken)
    if_all_run = cost.tokens_per_sec(num_beside + num_hot, num_missed)
    return cost.tokens_per_sec(num_dense, 0) > HOT_SPEED * if_all_run


def hot_buffers_are_enough(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether one more hisparse request makes the node's tokens a second fewer, and fewer than dense
    requests alone make, as many as the device pool holds: then it is to wait for the end of others.
    ``num_taken``: the device slots that it would take for its pages."""
    limits, use, cost = draft.limits, draft.device_use, draft.miss_cost
    if use.num_never_dense or not cost.tells_speed:
        return False

    def tokens_per_sec(num_more: int, num_leaving: int = 0, num_left: int = 0) -> float:
        """Return those with ``num_more`` hisparse requests of which ``num_leaving`` leave ``num_left`` slots
        of their pages."""
        num_hot = use.num_hisparse + num_more
        seq_len = (use.hisparse_slots + num_more * num_taken) / max(1, num_hot)
        num_slots = limits.totals.device - use.dense_slots + num_left
        num_missed = cost.num_missed(num_hot, num_slots, _largest(limits), seq_len)
        return cost.tokens_per_sec(use.num_dense - num_leaving + num_hot, num_missed)

    with_one_more = tokens_per_sec(1)
    if num_left := next(iter(use.leaving.values()), 0):
        with_one_more = max(with_one_more, tokens_per_sec(2, 1, num_left))
    _, mean_taken = _all_requests(draft, num_taken)
    dense_alone = cost.tokens_per_sec(limits.totals.device // mean_taken, 0)
    return with_one_more < min(tokens_per_sec(0), dense_alone / HOT_SPEED)


def _all_requests(draft: PlanDraft, num_taken: int) -> tuple[int, int]:
    """Return the number of requests that run, land or wait, as far as there are rows for them, and the device
    slots that each would take for its pages, on average. One of them, of ``num_taken`` slots, is out of the
    queue already."""
    use = draft.device_use
    waiting = [wanted.num_slots for wanted in draft.queue.first(draft.available.req_row - 1)]
    num_reqs = use.num_hisparse + use.num_dense + 1 + len(waiting)
    num_slots = use.hisparse_slots + use.dense_slots + num_taken + sum(waiting)
    return num_reqs, draft.limits.in_pages(max(1, num_slots // num_reqs))


def _largest(limits: Limits) -> int:
    return limits.largest_hot_buffer or limits.device_buffer_size


def dense_pays(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether one more dense request does that if it takes ``num_taken`` device slots of those that
    hot buffers could have."""
    return draft.miss_cost.pays(-_num_saved(draft, 0, -num_taken))


def _num_saved(draft: PlanDraft, num_more: int, num_more_slots: int) -> float:
    """Return how many positions fewer a step misses, all hot buffers together, if there are ``num_more``
    more of them, and ``num_more_slots`` more device slots for all."""
    use, cost = draft.device_use, draft.miss_cost
    num_hisparse = use.num_hisparse
    num_slots = draft.limits.totals.device - use.dense_slots
    most = max(draft.limits.device_buffer_size, draft.limits.largest_hot_buffer)
    seq_len = use.hisparse_slots / num_hisparse if num_hisparse else math.inf
    present = cost.num_missed(num_hisparse, num_slots, most, seq_len)
    return present - cost.num_missed(num_hisparse + num_more, num_slots + num_more_slots, most, seq_len)


def make_room(
    draft: PlanDraft, num_needed: int, *, dense_may_leave: bool, hot_buffers_may_be_small: bool = False
) -> bool:
    """Make ``num_needed`` device slots spare. Returns whether they are; if not, hot buffers stay as they are.

    First those with more than their share of the pool, residents among them, get that share, then the full
    size. If that is not enough, dense requests of ``auto`` leave their pages for a hot buffer of their share,
    if ``dense_may_leave``, and at last all hot buffers shrink to their minimum, if they may be small. Each
    time pages that are being filled are given up first, and then those admitted last come first.
    """
    limits, share = draft.limits, _share_of(draft)
    return (
        _shrink(draft, share, num_needed)
        or _shrink(draft, limits.device_buffer_size, num_needed)
        or (dense_may_leave and _let_dense_leave(draft, num_needed))
        or (hot_buffers_may_be_small and _shrink(draft, limits.smallest_hot_buffer, num_needed))
    )


def make_room_for_growth(draft: PlanDraft) -> bool:
    """Let hot buffers, and residents, give up what exceeds the full size if dense requests lack device slots
    for their next step. Returns whether that makes room for all of them: the next plan gives them the slots.

    Otherwise they would leave their pages, or sit out for as long as others have free slots as cache.
    """
    limits = draft.limits
    if not (limits.keeps_residents or limits.largest_hot_buffer > limits.device_buffer_size):
        return False
    # The page is beside one for each dense request that grows.
    return lacks_device_slots(draft) and make_room(draft, limits.page_size, dense_may_leave=False)


def _let_dense_leave(draft: PlanDraft, num_needed: int) -> bool:
    """Let dense requests of ``auto`` leave their pages until ``num_needed`` device slots are spare once hot
    buffers shrink to the full size. Returns whether they are. Nobody leaves if that cannot be enough.

    Whether all requests can still end takes a look at all of them. It is asked once for all that leave, and
    only if they cannot for one after the other, which few may then do.
    """
    limits, leaving = draft.limits, dict(draft.device_use.leaving)
    from_hot_buffers = sum(gain for _, gain in _gains(draft, limits.device_buffer_size))
    most = sum(num_slots - limits.in_pages(limits.max_capacity(r)) for r, num_slots in leaving.items())
    if draft.spare_device() + most + from_hot_buffers < num_needed:
        return False

    def is_enough(leaves: Callable[[Request, int], bool]) -> Iterator[bool]:
        for request, num_slots in leaving.items():
            # The one that leaves and the one that comes are hisparse, and the pages are there for all.
            left = leaves(request, _share_of(draft, 2, num_slots))
            yield left and draft.spare_device() + from_hot_buffers >= num_needed

    mark = draft.mark()
    enough = any(is_enough(partial(_leave, draft)))
    if not draft.all_can_end:
        draft.undo(mark)
        enough = any(islice(is_enough(partial(_leave_safely, draft)), MAX_ONE_BY_ONE))
    return enough and (
        draft.spare_device() >= num_needed or _shrink(draft, limits.device_buffer_size, num_needed)
    )


def _leave(draft: PlanDraft, request: Request, capacity: int) -> bool:
    """Let a dense request leave its pages for a hot buffer of at most ``capacity`` entries. Returns whether
    the slots for that are free."""
    return any(draft.leave_pages(*exchange) for exchange in _exchanges(draft, request, capacity))


def _leave_safely(draft: PlanDraft, request: Request, capacity: int) -> bool:
    """Let a dense request leave its pages if all requests can still end then. Returns whether it leaves."""
    for exchange in _exchanges(draft, request, capacity):
        mark = draft.mark()
        if draft.leave_pages(*exchange):
            if draft.all_can_end:
                return True
            draft.undo(mark)
    return False


def _exchanges(draft: PlanDraft, request: Request, capacity: int) -> Iterator[tuple[Exchange, SlotCounts]]:
    limits = draft.limits
    capacity = limits.max_capacity(request, min(capacity, request.num_device_slots - limits.page_size))
    return exchanges_of_pages(limits, request, capacity)


def _gains(draft: PlanDraft, most: int) -> Iterator[tuple[Request, int]]:
    """Yield the hisparse requests that have more device slots than hot buffers of at most ``most`` entries,
    each with the number that it gives up: first those whose pages are being filled, then those admitted last.
    """
    most_slots = draft.limits.hot_slots(most)
    in_order = sorted(draft.device_use.hisparse.items(), key=lambda each: not each[1].num_page_slots)
    for request, hot in in_order:
        gain = hot.given_up(most_slots)
        if gain > 0 and request not in draft.exchanges:
            yield request, gain


def _shrink(draft: PlanDraft, most: int, num_needed: int) -> bool:
    """Give requests hot buffers of at most ``most`` entries, those admitted last first, until ``num_needed``
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
        draft.make_hot_buffer(Exchange(request, capacity), SlotCounts(device=gain))
    return True


def enlarge_hot_buffers(draft: PlanDraft) -> None:
    """Give hot buffers that are smaller than their request's sequence their full size, while slots last;
    those admitted first come first. This is a plan's last part, so ``draft.note_change``, which later parts
    would read, is not called."""
    full_size, kept = draft.limits.device_buffer_size, _kept_for_arrival(draft.limits)
    if draft.exchanges or draft.admissions or draft.available.device <= kept:
        return
    small = [
        r
        for r in draft.running
        if 0 < r.hot_capacity < min(full_size, r.next_seq_len) and not r.num_page_slots
    ]
    for request in sorted(small, key=_admission_order):
        capacity = draft.limits.max_capacity(request)
        gain = SlotCounts(device=draft.limits.in_pages(capacity) - request.num_device_slots)
        if capacity > request.hot_capacity and request.has_next_step:
            is_spare = draft.spare_device() - gain.device >= kept
            if is_spare and draft.may_give(gain, draft.reserve):
                draft.exchanges[request] = Exchange(request, capacity)
                draft.give(gain, draft.reserve)


def use_free_slots(draft: PlanDraft) -> None:
    """Give hisparse requests more of the device slots that are free, that neither another hot buffer nor the
    growth of dense requests will need: their share, or pages for all of their tokens. Held pages are not
    given up for that.

    Those requests and sizes come first that save most misses in the rest of the request's life for the slots
    that they take. Hot buffers grow at once. One request a plan gets pages, which are filled beside steps,
    those of several up to ``Limits.fill_tokens``. Requests of a common beginning have their turn once the
    first one shares its pages, so that these are filled once. As ``enlarge_hot_buffers``, this is a plan's
    last part.
    """
    limits = draft.limits
    if draft.exchanges or draft.admissions or any(r.is_filling for r in draft.running):
        return
    coming = [r for r in draft.running if becomes_resident(r)]
    num_filling = sum(r.num_kv_tokens - r.num_resident_pages * limits.page_size for r in coming)
    may_fill = limits.keeps_residents and not (coming and num_filling >= limits.fill_tokens)
    share = _share_of(draft)
    orders: list[tuple[float, Exchange | Fill]] = []
    for request in draft.running:
        if request.hot_capacity and not request.num_page_slots and request.has_next_step:
            for order, num_saved in _larger(draft, request, share, coming if may_fill else None):
                _, gain = _slots_taken(limits, order)
                orders.append((num_saved / max(limits.page_size, gain), order))
    for _, order in sorted(orders, key=itemgetter(0), reverse=True):
        if order.request in draft.exchanges or not _is_spare(draft, order):
            continue
        if isinstance(order, Fill):
            _fill(draft, order)
            return  # what is left behind that is for the next plan
        _grow(draft, order)


def _is_spare(draft: PlanDraft, order: Exchange | Fill) -> bool:
    """Return whether the slots of an order are free. While pages are filled, they may take what is kept for
    the next arrival: they are given up for it (``make_room``)."""
    unheld = draft.unheld_device()
    taken, gain = _slots_taken(draft.limits, order)
    return taken <= unheld and gain <= unheld - _kept_for_arrival(draft.limits)


def _grow(draft: PlanDraft, exchange: Exchange) -> None:
    """Give a larger hot buffer if all requests can still end then."""
    taken, _ = _slots_taken(draft.limits, exchange)
    slots = SlotCounts(device=taken)
    if draft.reserve.is_safe and draft.may_give(slots, draft.reserve):
        draft.exchanges[exchange.request] = exchange
        draft.give(slots, draft.reserve)


def _fill(draft: PlanDraft, fill: Fill) -> None:
    """Give pages if all requests can still end then, also one more that shares the resident ones."""
    reserve = draft.reserve
    if fill.num_resident_pages:
        reserve = draft.reserve_sharing(draft.matches.find_resident(fill.request))
    slots = SlotCounts(device=fill.num_page_slots)
    if reserve.is_safe and draft.may_give(slots, reserve):
        draft.fills.append(fill)
        draft.give(slots, reserve)


def _slots_taken(limits: Limits, order: Exchange | Fill) -> tuple[int, int]:
    """Return the device slots that an order takes of those that are free, and the slots that its request has
    more in the end: one whose pages are filled gives up its hot buffer."""
    num_before = order.request.num_device_slots
    if isinstance(order, Fill):
        return order.num_page_slots, order.num_page_slots - num_before
    gain = limits.in_pages(order.hot_capacity) - num_before
    return gain, gain


def becomes_resident(request: Request) -> bool:
    """Return whether a request's pages are being filled, or were and its next step lets others share
    them."""
    return request.num_page_slots > 0 or request.will_share


def _kept_for_arrival(limits: Limits) -> int:
    """Return the device slots that stay free for the next arrival: those of a hot buffer of the full size."""
    return limits.in_pages(limits.device_buffer_size)


def share_pages(draft: PlanDraft) -> None:
    """Let one dense request of ``auto`` leave its pages for a hot buffer if all hot buffers are so small that
    they then miss less together, in the rest of its life by more than the copies that this takes.

    The slots are for ``use_free_slots`` to give away. Copies to the host hold steps up, so one request a plan
    leaves, when nobody's rows or pages are being filled.
    """
    if draft.exchanges or draft.admissions or draft.fills:
        return
    if any(r.is_filling or becomes_resident(r) for r in draft.running):
        return
    request = next(iter(draft.device_use.leaving), None)
    if request is None:
        return
    num_steps = request.sampling.max_new_tokens - request.next_index
    num_saved = num_steps * _num_saved(draft, 1, request.num_device_slots)
    capacity = _share_of(draft, 1, request.num_device_slots)
    if 0 < num_saved >= MIN_SAVED * (request.num_kv_tokens + capacity):
        _leave_safely(draft, request, capacity)


def _larger(
    draft: PlanDraft, request: Request, share: int, coming: Sequence[Request] | None
) -> Iterator[tuple[Exchange | Fill, float]]:
    """Yield what a request with a hot buffer may get beyond it, each with the copies that it saves: a larger
    hot buffer, if it will miss enough to fill that, and pages, if these save more copies than fill them. One
    that misses nothing stays as it is. ``coming``: the requests whose pages are being filled, or whose next
    step lets others share them; None: as many as may be filled at once."""
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
        num_own = _resident_slots(limits, request, num_shared)
        yield Fill(request, num_page_slots=num_own, num_resident_pages=num_pages), num_missed


def _has_next_page(other: Request, request: Request, num_pages: int) -> bool:
    """Return whether two prompts have the same beginning, of more than ``num_pages`` pages."""
    page = slice(num_pages, num_pages + 1)
    return len(request.usable_keys[page]) > 0 and other.usable_keys[page] == request.usable_keys[page]


def _num_missed(limits: Limits, request: Request) -> float:
    """Return how many items of a layer the request will miss up to the end of its life, if it goes on as its
    steps so far and selects as many as the model can."""
    num_steps = request.sampling.max_new_tokens - request.next_index
    return request.row_counters.miss_share * limits.index_topk * num_steps


def _resident_slots(limits: Limits, request: Request, num_shared: int) -> int:
    """Return the device slots of its own for a request that becomes resident: whole pages for its next tokens
    behind ``num_shared``, and no fewer than the smallest hot buffer has, for which it may have to leave
    them."""
    with_growth = min(request.next_seq_len + limits.growth_tokens, request.life_tokens)
    num_behind = max(with_growth, request.next_seq_len) - num_shared
    return limits.in_pages(max(num_behind, limits.min_capacity(request)))


def _admission_order(request: Request) -> int:
    return request.admitted_seq
