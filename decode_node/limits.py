"""How many slots a request takes in each pool, and which requests are too long ever to be admitted. Pure.

``Limits`` is made once, by ``sizing.py``, and never changes. The scheduler plans with it, and ``QueueMoves``
refuses with ``refusal`` what no plan could admit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import SlotCounts, round_up
from hisparse_pd.decode_node.drafting import smallest_buffer
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.reserve import Claim, slots_of


@dataclass(frozen=True)
class Limits:
    """The sizes of pools and buffers, in tokens unless a name says otherwise."""

    totals: SlotCounts
    """All slots of each pool."""
    page_size: int
    max_context: int
    index_topk: int
    device_buffer_size: int
    """Entries of a hot buffer of the full size, which each gets while device slots last."""
    growth_tokens: int
    """Slots that a request gets beyond those that it needs, at its admission and whenever it grows."""
    max_drafts: int = 0
    """Most drafts that a step verifies behind a request's newest token."""
    max_tail_tokens: int = 0
    """Most tokens that a prompt may lack if its request's steps are to compute them."""
    largest_hot_buffer: int = 0
    """Most entries of a hot buffer, where device slots are free; 0: those of the full size."""
    keeps_residents: bool = False
    """Whether hisparse requests become resident while device slots are free."""
    fill_tokens: int = 0
    """Positions of requests that become resident up to which the pages of another are filled, too; 0: one
    request's at a time."""

    @property
    def max_life_hisparse(self) -> int:
        """Most tokens that a hisparse request can have in its whole life."""
        bound = min(self.totals.host, self.totals.index)
        # Where the device pool is smaller than a hot buffer that suffices for any length, a request's hot
        # buffer must hold its whole life and the last step's drafts.
        if self.totals.device < round_up(self.smallest_hot_buffer, self.page_size):
            bound = min(bound, max(0, self.totals.device - self.max_drafts))
        return bound

    @property
    def max_life_dense(self) -> int:
        """Most tokens that a dense request can have in its whole life."""
        return min(self.totals.device, self.totals.index)

    def may_be_dense(self, request: Request) -> bool:
        """Return whether ``request`` allows pages for its whole life, and the device pool has as many."""
        is_allowed = request.flag is not HisparseFlag.TRUE and not request.dense_refusal
        return is_allowed and request.life_tokens <= self.max_life_dense

    def max_life(self, mode: Mode) -> int:
        """Return the most tokens that a request can have in its whole life in ``mode``."""
        return self.max_life_hisparse if mode is Mode.HISPARSE else self.max_life_dense

    @property
    def smallest_hot_buffer(self) -> int:
        """Entries that suffice for a request of any length."""
        return smallest_buffer(self.max_drafts, self.index_topk)

    def min_capacity(self, request: Request) -> int:
        """Return the entries of the smallest hot buffer that works.

        One that holds the whole life, with the drafts of the last step, always works.
        """
        return min(self.smallest_hot_buffer, request.life_tokens + self.max_drafts)

    def max_capacity(self, request: Request, most: int = 0) -> int:
        """Return the entries of the largest hot buffer that is of use, of at most ``most`` entries; 0: of the
        full size."""
        whole_life = request.life_tokens + self.max_drafts
        return max(self.min_capacity(request), min(most or self.device_buffer_size, whole_life))

    def life_slots(self, request: Request) -> int:
        """Return the slots of a hot buffer that holds the whole life of ``request``, in whole pages."""
        return self.in_pages(request.life_tokens + self.max_drafts)

    def hot_slots(self, most: int) -> int:
        """Return the slots of a hot buffer of ``most`` entries, or of as many as suffice for any length if
        that is more, in whole pages. A request's ``max_capacity`` takes these or ``life_slots``, whichever
        are fewer."""
        return self.in_pages(max(most, self.smallest_hot_buffer))

    def resident_slots(self, request: Request, num_shared: int) -> int:
        """Return the device slots that a request gets for itself if it becomes resident: whole pages for the
        tokens behind ``num_shared`` shared ones and for the next ones, and no fewer than the smallest hot
        buffer has, so that it can always leave its pages for that."""
        with_growth = min(request.next_seq_len + self.growth_tokens, request.life_tokens)
        num_behind = max(with_growth, request.next_seq_len) - num_shared
        return self.in_pages(max(num_behind, self.min_capacity(request)))

    def first_kept(self, request: Request, capacity: int) -> int | None:
        """Return the first position, at the beginning of a page, whose item can stay on the device where it
        is, with all behind it, if a request leaves its pages for a hot buffer of ``capacity`` entries. None:
        the hot buffer holds all positions, in order, and the first of them are in pages that it shares."""
        num_tokens, num_shared = request.num_kv_tokens, request.num_shared_device_pages * self.page_size
        num_beyond = num_tokens - (capacity - self.max_drafts - 1)
        if num_beyond <= 0:
            return None if num_shared else 0
        return max(num_shared, self.in_pages(num_beyond))

    def in_pages(self, num_tokens: int) -> int:
        """Return the slots of as many whole pages as ``num_tokens`` take."""
        return round_up(num_tokens, self.page_size)

    def kv_slots(self, mode: Mode, num_tokens: int, num_shared_pages: int = 0) -> SlotCounts:
        """Return the slots, in whole pages, for ``num_tokens`` of KV that begin with shared pages.

        The lookup slots of a hisparse request, which say where positions are in its hot buffer, are its own
        also for shared pages.
        """
        in_pages = self.in_pages(num_tokens)
        own = in_pages - num_shared_pages * self.page_size
        lookup = in_pages if mode is Mode.HISPARSE else 0
        return SlotCounts.of(KV_POOLS[mode], own) + SlotCounts(lookup=lookup)

    def slots_for(self, request: Request, num_tokens: int) -> SlotCounts:
        """Return the slots, in whole pages, that a running request needs for ``num_tokens`` of KV, without
        those of the pages that it shares, and of its hot buffer unless its pages are being filled."""
        kv = self.kv_slots(request.mode, num_tokens, request.num_shared_pages)
        if not request.is_resident and not request.num_page_slots:
            return kv
        num_own = self.in_pages(num_tokens) - request.num_resident_pages * self.page_size
        num_hot = request.num_device_slots - request.num_page_slots if request.num_page_slots else 0
        return kv + SlotCounts(device=num_hot + num_own)

    def page_tokens(self, request: Request) -> int:
        """Return the positions, from 0 on, that have a slot in the pages of a request whose pages are being
        filled."""
        return request.num_resident_pages * self.page_size + request.num_page_slots

    def claim(self, request: Request, mode: Mode, owned: SlotCounts, num_shared_pages: int = 0) -> Claim:
        """Return the claim of ``request`` if it is in ``mode``, owns ``owned`` and shares its first pages.

        ``reserve.py`` takes the claims of all requests to see whether each can still end. A dense request can
        end in its pages, or in the smallest hot buffer. In a hot buffer it shares no pages any more: it needs
        slots in the host pool and the index pool for its whole life, before those of the shared pages are
        free. Slots of prompt pages that it will share once it has started do not count as its own then.
        """
        life = self.in_pages(request.life_tokens)
        own = life - num_shared_pages * self.page_size
        lacks_index, lacks_lookup = max(0, own - owned.index), max(0, life - owned.lookup)
        # A way to end is what the request lacks for it: host, device, index and lookup slots, in this order.
        if mode is Mode.HISPARSE:  # its hot buffer is complete, or its pages suffice for the smallest
            lacks_host = max(0, own - owned.host)
            return Claim(slots_of(owned), ((lacks_host, 0, lacks_index, lacks_lookup),), request.prefixes)
        in_pages = 0, max(0, own - owned.device), lacks_index, 0
        num_to_share = 0
        if request.state is not RequestState.RUNNING:  # else it has shared what it shares
            num_to_share = max(0, request.num_usable_pages - num_shared_pages) * self.page_size
        kept = owned - SlotCounts(device=num_to_share, index=num_to_share)
        lacks_device = max(0, self.in_pages(self.min_capacity(request)) - max(0, kept.device))
        in_hot_buffer = life, lacks_device, max(0, life - max(0, kept.index)), lacks_lookup
        return Claim(slots_of(owned), (in_pages, in_hot_buffer), request.prefixes)


def refusal(limits: Limits, request: Request) -> str:
    """Return why ``request`` can never be admitted, with bound and remedy; empty if it can."""
    life = request.life_tokens
    hisparse = dense = ""
    if life > limits.max_life_hisparse:
        hisparse = (
            f"{life} tokens of KV exceed the {limits.max_life_hisparse} that a hisparse request can hold "
            f"here (host pool {limits.totals.host}, index pool {limits.totals.index}, device pool "
            f"{limits.totals.device} tokens); shorten the prompt or max_tokens"
        )
    if request.dense_refusal:
        dense = request.dense_refusal
    elif life > limits.max_life_dense:
        dense = (
            f"{life} tokens of KV exceed the {limits.max_life_dense} that a dense request can hold here "
            f"(device pool {limits.totals.device}, index pool {limits.totals.index} tokens); shorten the "
            "prompt or max_tokens, or allow hisparse"
        )
    match request.flag:
        case HisparseFlag.TRUE:
            return hisparse
        case HisparseFlag.FALSE:
            return dense
        case HisparseFlag.AUTO:
            return f"{hisparse}; {dense}" if hisparse and dense else ""
        case _:
            assert_never(request.flag)
