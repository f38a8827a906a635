"""Owns what is held of the prompts that one plan admits, and what of that the plan has taken already. Pure.

Pages of a prefix that nobody uses count as free until somebody shares them. What running requests use of one
that is shared is not free when they have ended, which ``reserve.py`` has to know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from decode_node.request import KV_POOLS, Request
from hisparse_pd.paging.pools import SlotCounts
from hisparse_pd.paging.prefix_tree import Prefix, PrefixTree
from hisparse_pd.vocabulary import Mode


class Beginning(NamedTuple):
    """What is held of one prompt."""

    num_pages: int
    parts: tuple[tuple[Prefix, int], ...]
    """The prefixes that it is of, and how many of their pages."""
    taken: SlotCounts
    """What of it nobody uses so far."""


class Beginnings:
    """``landing``: requests whose KV is on its way."""

    def __init__(self, held: PrefixTree, landing: Iterable[Request], page_size: int) -> None:
        self._held = held
        self._page_size = page_size
        self.pinned: dict[Prefix, int] = {}
        """Pages, from their start, of prefixes that those share whose KV is on its way, or is going to be."""
        for request in landing:
            for part in request.prefix.chain() if request.prefix else ():
                self.pinned[part] = len(part.keys)

    def of(self, request: Request, mode: Mode) -> Beginning:
        """What is held of its prompt in ``mode``."""
        kinds = KV_POOLS[mode]
        match = self._held.find(request.usable_keys, kinds)
        if match is None:
            return Beginning(0, (), SlotCounts())
        parts = tuple(match.parts())
        unused = (max(0, num - self.pinned.get(part, 0)) for part, num in parts if not part.num_users)
        return Beginning(match.num_pages, parts, SlotCounts.of(kinds, sum(unused) * self._page_size))

    def are_counted_on(self, one: Beginning) -> bool:
        """Whether some of it would be free when those that run have ended, and is not if it is shared."""
        return any(part.num_users and num > self.pinned.get(part, 0) for part, num in one.parts)

    def pinned_with(self, one: Beginning) -> dict[Prefix, int]:
        """With ``one`` shared."""
        return self.pinned | {part: max(num, self.pinned.get(part, 0)) for part, num in one.parts}

    def take(self, one: Beginning) -> None:
        self.pinned = self.pinned_with(one)
