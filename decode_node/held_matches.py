"""Finds the held pages that the prompts of one plan's admissions can share, and notes which are taken. Pure.

``scheduler.py`` makes one ``HeldMatches`` for each plan. ``mode_choice.py`` looks prompts up in it, and
``PlanDraft`` notes there which matches the plan lets requests share.

A dense request shares pages on the device. Where main memory has more pages of its prompt, these are brought
up for it (``dense_tier.py``), and count as shared, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.core.paging.prefix import Kinds, Match, Prefix
from hisparse_pd.core.paging.prefix_tree import MAX_RUNS, PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.decode_node.request import KV_POOLS, RESIDENT_POOLS, Request

MAX_RUNS_BEFORE: Final = MAX_RUNS // 2
"""Most runs of a prefix on the device behind which pages are brought up, which takes one run more."""


class HeldMatch(NamedTuple):
    """The pages of one prompt that are held."""

    num_pages: int
    parts: tuple[tuple[Prefix, int], ...]
    """The prefixes that have these pages, each with the number of its pages that match."""
    idle: SlotCounts
    """Slots that those pages have, and that count as free until the prompt's request uses them."""
    given: SlotCounts
    """Slots that those pages get when it is admitted: in pools in which they have none."""
    num_copied: int = 0
    """Those of the pages that get device slots and are copied from the host pool, for a dense request."""
    sources: tuple[tuple[Prefix, int], ...] = ()
    """The prefixes that these pages are copied from, with all before them, like ``parts``."""

    @property
    def taken(self) -> SlotCounts:
        """All slots that are free no more once the prompt's request shares those pages."""
        return self.idle + self.given


NO_MATCH: Final = HeldMatch(0, (), SlotCounts(), SlotCounts())


def stored_beginning(
    held: PrefixTree, keys: Sequence[PageKey], num_pages: int, num_runs: int
) -> Match | None:
    """Return the longest beginning of ``keys`` of which main memory has KV, indexer keys and row checks. None
    if that is no longer than the ``num_pages`` pages that the device has, or if it cannot be brought up
    behind these, which are in ``num_runs`` runs."""
    found = held.find(keys, KV_POOLS[Mode.HISPARSE])
    if found is None or found.num_pages <= num_pages or num_runs > MAX_RUNS_BEFORE:
        return None
    match: Match | None = None
    for prefix, num in reversed(tuple(found.parts())):
        if not prefix.is_stored:
            break
        match = Match(prefix, prefix.start_page + num)
    return match if match is not None and match.num_pages > num_pages else None


def num_shareable_pages(held: PrefixTree, keys: Sequence[PageKey], mode: Mode) -> int:
    """Return how many pages of ``keys`` a request of ``mode`` can share."""
    found = held.find(keys, KV_POOLS[mode])
    num_pages, num_runs = (0, 0) if found is None else (found.num_pages, len(tuple(found.parts())))
    if mode is Mode.DENSE and (stored := stored_beginning(held, keys, num_pages, num_runs)) is not None:
        return stored.num_pages
    return num_pages


def _left_by(request: Request) -> Iterable[Prefix]:
    """Return the prefixes on the device, which a request leaves if it leaves its pages."""
    prefix = request.prefix if request.mode is Mode.DENSE else request.resident_prefix
    return () if prefix is None else prefix.chain()


class HeldMatches:
    """Finds the held pages of the prompts that one plan admits, and notes which of them the plan has taken.

    ``remote``: prefixes of rooms whose KV is on its way, or that are in quarantine. ``reserve.py`` says why
    nobody counts on them."""

    def __init__(self, held: PrefixTree, remote: Iterable[Prefix], page_size: int) -> None:
        self._held = held
        self._page_size = page_size
        self.pinned = held.num_condemned()
        """For each prefix, how many of its pages the reserve does not count on to become free: those that
        will be set aside, and the first ones that ``remote`` rooms or requests that the plan admits share."""
        for prefix in remote:
            for part in prefix.chain():
                self.pinned[part] = len(part.keys)
        self._brought_up: dict[Prefix, int] = {}
        """For each prefix, how many of its first pages hisparse requests share that the plan admits."""
        self._sources: dict[Prefix, int] = {}
        """For each prefix, how many of its first pages move down because admitted dense requests copy pages
        from it, and nobody used it before."""
        self._copied: dict[Prefix, int] = {}
        """For each prefix, up to which of its pages the device gets a copy for admitted dense requests."""
        self.num_leaving: Mapping[Prefix, int] = {}
        """For each prefix, how many requests leave it in this plan. Its slots are free, and count as such, if
        all of its users do."""

    @property
    def unused(self) -> SlotCounts:
        """Slots of held pages without users, as long as the plan lets no request share any."""
        return self._held.unused + self._slots_of(filter(self._is_left, self.num_leaving))

    def find(self, request: Request, mode: Mode) -> HeldMatch:
        """Return the held pages that ``request`` can share if it is admitted in ``mode``."""
        match = self._find(request, KV_POOLS[mode])
        if mode is Mode.HISPARSE:
            return match
        stored = stored_beginning(self._held, request.usable_keys, match.num_pages, len(match.parts))
        return match if stored is None else self._with_stored(match, stored)

    def _with_stored(self, match: HeldMatch, stored: Match) -> HeldMatch:
        """Return a dense match that goes on with the pages of ``stored``. They get new slots, once for all
        requests of the plan, and their host slots are nobody else's until they are copied."""
        num_here, sources = match.num_pages, tuple(stored.parts())
        num_new = sum(
            max(0, num - max(num_here - part.start_page, self._copied.get(part, 0))) for part, num in sources
        )
        idle = match.idle + SlotCounts(host=self._unused_of(sources).host)
        given = match.given + SlotCounts.of(KV_POOLS[Mode.DENSE], num_new * self._page_size)
        return HeldMatch(stored.num_pages, match.parts, idle, given, stored.num_pages - num_here, sources)

    def freed_without(self, request: Request) -> SlotCounts:
        """Return the slots of pages that nobody uses any more once a request has left those that it shares on
        the device: a dense one those of its prompt, and a resident those that residents share."""
        return self._slots_of(part for part in _left_by(request) if self._is_left(part, num_more=1))

    def leave(self, request: Request) -> None:
        """Note that a request leaves the pages that it shares on the device."""
        # A new mapping, because ``PlanDraft.undo`` brings the old one back.
        self.num_leaving = {
            **self.num_leaving,
            **{part: self.num_leaving.get(part, 0) + 1 for part in _left_by(request)},
        }

    def _is_left(self, part: Prefix, num_more: int = 0) -> bool:
        """Return whether all users leave a prefix in this plan, with ``num_more`` that are to leave. Those of
        a dropped one leave nothing that counts: a page with a wrong row is set aside then, and not free."""
        num_leaving = self.num_leaving.get(part, 0) + num_more
        return 0 < part.num_users == num_leaving and not part.is_dropped

    def _slots_of(self, prefixes: Iterable[Prefix]) -> SlotCounts:
        """Return the slots of the pages of ``prefixes`` that no admitted request shares."""
        slots = (
            SlotCounts.of(part.pools, (len(part.keys) - self.pinned.get(part, 0)) * self._page_size)
            for part in prefixes
        )
        return sum(slots, SlotCounts())

    def find_resident(self, request: Request) -> HeldMatch:
        """Return the device pages that ``request`` can share if it becomes resident; others use all of them.
        It shares none while its steps compute a tail of its prompt, which might lie in them."""
        return NO_MATCH if request.num_tail_tokens else self._find(request, RESIDENT_POOLS)

    def _find(self, request: Request, kinds: Kinds) -> HeldMatch:
        match = self._held.find(request.usable_keys, kinds)
        if match is None:
            return NO_MATCH
        parts = tuple(match.parts())
        num_up = sum(
            max(0, min(num, self._num_down(part)) - self._brought_up.get(part, 0)) for part, num in parts
        )
        given = SlotCounts(index=num_up * self._page_size)
        return HeldMatch(match.num_pages, parts, self._unused_of(parts), given)

    def _num_down(self, part: Prefix) -> int:
        """Return how many of the first pages of a prefix have moved down once the plan's admissions use what
        they share."""
        return len(part.keys) if part.is_down else self._sources.get(part, 0)

    def _unused_of(self, parts: Iterable[tuple[Prefix, int]]) -> SlotCounts:
        """Return the slots that the pages of ``parts`` have and that count as free."""
        taken = SlotCounts()
        for part, num in parts:
            if not part.num_users or self._is_left(part):
                num_pages = max(0, num - self.pinned.get(part, 0))
                taken += SlotCounts.of(part.pools, num_pages * self._page_size)
        return taken

    def is_counted_on(self, match: HeldMatch) -> bool:
        """Return whether running requests use pages of ``match`` that are not pinned yet. The order in which
        requests can end (``reserve.py``) counts on such pages to be free when their last user has ended. If
        they are shared, they are not free then, and another order is needed."""
        parts = match.parts + match.sources
        return any(part.num_users and num > self.pinned.get(part, 0) for part, num in parts)

    def pinned_with(self, match: HeldMatch) -> dict[Prefix, int]:
        """Return ``pinned`` as it would be if ``match`` were shared."""
        parts = match.parts + match.sources
        return self.pinned | {part: max(num, self.pinned.get(part, 0)) for part, num in parts}

    def take(self, match: HeldMatch) -> None:
        """Note that an admitted request shares ``match``."""
        self.pinned = self.pinned_with(match)
        for part, num in match.parts:
            self._brought_up[part] = max(num, self._brought_up.get(part, 0))
        for part, num in match.sources:
            self._copied[part] = max(num, self._copied.get(part, 0))
            if not part.num_users:
                self._sources[part] = max(num, self._sources.get(part, 0))
