"""Finds the held pages that the prompts of one plan's admissions can share, and notes which are taken. Pure.

``scheduler.py`` makes one ``HeldMatches`` for each plan. ``mode_choice.py`` looks prompts up in it, and
``PlanDraft`` notes there which matches the plan lets requests share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.decode_node.request import KV_POOLS, RESIDENT_POOLS, Request


class HeldMatch(NamedTuple):
    """The pages of one prompt that are held."""

    num_pages: int
    parts: tuple[tuple[Prefix, int], ...]
    """The prefixes that have these pages, each with the number of its pages that match."""
    taken: SlotCounts
    """Slots for those pages that count as free until the prompt's request shares them: their own, or those
    that it gives them again where they have moved down."""


class HeldMatches:
    """Finds the held pages of the prompts that one plan admits, and notes which of them the plan has taken.

    ``remote``: prefixes of rooms whose KV is on its way, or that are in quarantine. Why nobody counts on
    them: see ``reserve.py``."""

    def __init__(self, held: PrefixTree, remote: Iterable[Prefix], page_size: int) -> None:
        self._held = held
        self._page_size = page_size
        self.pinned: dict[Prefix, int] = {}
        """For each prefix, how many of its first pages are shared by ``remote`` rooms or requests that the
        plan admits. The reserve never counts on these pages to become free."""
        for prefix in remote:
            for part in prefix.chain():
                self.pinned[part] = len(part.keys)

    @property
    def unused(self) -> SlotCounts:
        """Slots of held pages without users, as long as the plan lets no request share any."""
        return self._held.unused

    def find(self, request: Request, mode: Mode) -> HeldMatch:
        """Return the held pages that ``request`` can share if it is admitted in ``mode``."""
        return self._find(request, KV_POOLS[mode])

    def find_resident(self, request: Request) -> HeldMatch:
        """Return the device pages that ``request`` can share if it becomes resident; others use all of them.
        It shares none while its steps compute a tail of its prompt, which might lie in them."""
        if request.num_tail_tokens:
            return HeldMatch(0, (), SlotCounts())
        return self._find(request, RESIDENT_POOLS)

    def _find(self, request: Request, kinds: Kinds) -> HeldMatch:
        match = self._held.find(request.usable_keys, kinds)
        if match is None:
            return HeldMatch(0, (), SlotCounts())
        parts = tuple(match.parts())
        num_unused = num_down = 0
        for part, num in parts:
            num_slots = max(0, num - self.pinned.get(part, 0)) * self._page_size
            if not part.num_users:
                num_unused += num_slots
            elif part.is_down:  # a copy of what follows it uses it, and no request
                num_down += num_slots
        taken = SlotCounts.of(kinds, num_unused) + SlotCounts(index=num_down)
        return HeldMatch(match.num_pages, parts, taken)

    def is_counted_on(self, match: HeldMatch) -> bool:
        """Return whether running requests use pages of ``match`` that are not pinned yet. The order in which
        requests can end (``reserve.py``) counts on such pages to be free when their last user has ended. If
        they are shared, they are not free then, and another order is needed."""
        return any(part.num_users and num > self.pinned.get(part, 0) for part, num in match.parts)

    def pinned_with(self, match: HeldMatch) -> dict[Prefix, int]:
        """Return ``pinned`` as it would be if ``match`` were shared."""
        return self.pinned | {part: max(num, self.pinned.get(part, 0)) for part, num in match.parts}

    def take(self, match: HeldMatch) -> None:
        """Note that an admitted request shares ``match``."""
        self.pinned = self.pinned_with(match)
