"""Gives running requests slots for their next steps; one that can get none leaves its pages for a hot buffer.

``scheduler.py`` calls ``grow`` first in each plan, unless this plan only makes room for it
(``making_room.make_room_for_growth``). Each request grows in its place of the order in which all can
end: ``Reserve`` calls ``grown`` for one after the other, and keeps the claim that it returns: what the
request lacks to end. One that gets nothing sits the step out. Only the plan's draft is changed, never a pool.
"""

from __future__ import annotations

from collections.abc import Iterator

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.reserve import Claim, Place, Reserve
from hisparse_pd.decode_node.step_plan import Exchange, Growth


def grow(draft: PlanDraft) -> bool:
    """Give slots to requests that have too few for their next step. Returns whether each can take part in
    it."""
    # A request without a next step needs no slot, and may have none left: its life can fill its pages.
    short = {
        r
        for r in draft.running
        if r.has_next_step
        and (r.reserved_tokens < _len_with_drafts(draft.limits, r) or _fill_lacks_page(draft.limits, r))
    }
    if not short:
        return True
    sits_out: list[Request] = []

    def grown(place: Place, reserve: Reserve) -> Claim:
        """Give slots to one request, in its place of the order. Returns what it claims from then on."""
        request = place.request
        if request not in short or _grow_one(draft, request, reserve):
            # After n slots were given, the request lacks n fewer to end, and n fewer are free. Its end leaves
            # the others as many as before, so the old claim stays right.
            return place.claim
        if request.has_slots_for_next and not _fill_lacks_page(draft.limits, request):
            return place.claim  # only drafts lack slots, and nobody waits for those
        if request.may_leave_pages and _leave_pages(draft, request, reserve):
            # A dense request could end in pages or in a hot buffer: the second way is left. It is the only
            # one that a hisparse request has. ``Reserve`` reads only the claim's ways, against what was free
            # before the exchange, so the old numbers stay right.
            return place.claim._replace(ways=place.claim.ways[-1:])
        sits_out.append(request)
        return place.claim

    draft.grow_running(grown)
    return not sits_out


def lacks_device_slots(draft: PlanDraft) -> bool:
    """Return whether dense requests need more device slots for their next step than are free."""
    limits, num_needed = draft.limits, 0
    for request in draft.running:
        if request.mode is Mode.DENSE and not request.has_slots_for_next and request.has_next_step:
            wanted = limits.slots_for(request, request.next_seq_len)
            num_needed += _missing(wanted, request.owned_slots).device
    return num_needed > draft.available.device


def _fill_lacks_page(limits: Limits, request: Request) -> bool:
    """Return whether pages that are being filled end before the request's next step may: a request becomes
    resident only with pages for all of its tokens."""
    return request.num_page_slots > 0 and limits.page_tokens(request) < _len_with_drafts(limits, request)


def _grow_one(draft: PlanDraft, request: Request, reserve: Reserve) -> bool:
    """Give a request more slots of its mode. Returns whether it got some."""
    owned = request.owned_slots
    for num_tokens in _grown_lengths(draft.limits, request):
        need = _missing(draft.limits.slots_for(request, num_tokens), owned)
        if draft.may_give(need, reserve):
            draft.growths.append(Growth(request, need))
            draft.note_change(request, request.mode, owned + need)
            draft.give(need, reserve)
            return True
    return False


def _leave_pages(draft: PlanDraft, request: Request, reserve: Reserve) -> bool:
    """Exchange the pages of a dense or resident request for a hot buffer; one whose pages are being filled
    keeps the hot buffer that it has. Returns whether there are slots for that."""
    limits, owned = draft.limits, request.owned_slots
    # The hot buffer takes no more than the request's own pages, unless its minimum is larger.
    own = min(limits.max_capacity(request), owned.device)
    capacity = request.hot_capacity or max(own, limits.min_capacity(request))
    exchanges = exchanges_of_pages(limits, request, capacity)
    return any(draft.leave_pages_to_grow(exchange, given, reserve) for exchange, given in exchanges)


def exchanges_of_pages(
    limits: Limits, request: Request, capacity: int
) -> Iterator[tuple[Exchange, SlotCounts]]:
    """Yield exchanges of a request's pages for a hot buffer of ``capacity`` entries, first choice first, each
    with the slots that it takes; those that it gives back count as negative. A dense request that shares
    pages takes host slots and index slots for copies of these, beside what it has already behind them."""
    owned, num_shared_pages = request.owned_slots, request.num_shared_pages
    copies = request.copies_of_shared(limits.page_size)
    for num_tokens in _grown_lengths(limits, request):
        need = copies + _missing(limits.kv_slots(Mode.HISPARSE, num_tokens, num_shared_pages), owned)
        device = limits.in_pages(capacity) - owned.device
        yield Exchange(request, capacity, need), need + SlotCounts(device=device)


def _grown_lengths(limits: Limits, request: Request) -> Iterator[int]:
    """Yield the lengths, in tokens, to which a request's slots may grow, first choice first."""
    with_growth = min(request.next_seq_len - 1 + limits.growth_tokens, request.life_tokens)
    yield max(with_growth, _len_with_drafts(limits, request))
    if not request.has_slots_for_next:
        yield request.next_seq_len


def _len_with_drafts(limits: Limits, request: Request) -> int:
    """Return the length of the sequence in the next step, drafts included.

    Where steps may verify drafts, it includes a token more: that of the step after, which is launched before
    it is known how many drafts are right.
    """
    num_behind = limits.max_drafts + 1 if limits.max_drafts else 0
    return min(request.next_seq_len + num_behind, limits.max_context)


def _missing(wanted: SlotCounts, owned: SlotCounts) -> SlotCounts:
    return SlotCounts(
        host=max(0, wanted.host - owned.host),
        device=max(0, wanted.device - owned.device),
        index=max(0, wanted.index - owned.index),
        lookup=max(0, wanted.lookup - owned.lookup),
    )
