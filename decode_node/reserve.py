"""Whether everybody who was admitted can still end, when all get the most that they may ask for. Pure.

Requests get slots step by step, and together they may ask for more than there is. So slots are granted only
while there is an order in which everybody can end, one after the other, with what is free and what those
before it leave (the banker's algorithm, for the host, the device, the index and the lookup pool together):

- The first in the order never sits out. When it ends, the next is the first; nobody new is admitted while
  somebody sits out, so everybody gets there.
- A dense request can end in two ways: in device pages, or in a hot buffer and host slots for its whole life.
  One that shares pages ends in device pages.
- Shared pages are free when the last of those that use them has ended. Held pages that nobody uses count as
  free until a plan lets somebody share them (``Beginnings``).
- A request whose KV is on its way comes last, and nobody counts on what it holds: when its prefill node
  vanishes, its slots may never be free again. Nobody counts on slots in quarantine either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.core.paging.prefix_tree import Prefix, PrefixTree
from hisparse_pd.decode_node.request import KV_POOLS, Request

_ANY = 1 << 60
"""More slots than there are."""

_Slots = tuple[int, int, int, int]
"""Slots of the host, the device, the index and the lookup pool, in this order. A request has all that it
needs of other pools from its admission on."""


class Claim(NamedTuple):
    """What a request owns, and what it lacks to end, one way or another."""

    owned: _Slots
    ways: tuple[_Slots, ...]
    prefix: Prefix | None = None
    """What it shares."""


class Place(NamedTuple):
    """A request in the order in which all can end. ``available``: when those before it have ended."""

    request: Request
    claim: Claim
    available: _Slots


class Reserve:
    """An order in which all running requests can end, and what may be given away without breaking it.

    What is given to a request is taken from those before it only: those behind it count on its end, and then
    it is back. So ``keep`` the requests of ``order`` one by one, and give to each before it is kept.
    """

    def __init__(
        self,
        free: SlotCounts,
        running: Iterable[tuple[Request, Claim]],
        pinned: Mapping[Prefix, int],
        page_size: int,
    ) -> None:
        """``pinned``: pages, from their start, of prefixes that those share whose KV is on its way."""
        self._available = slots_of(free)
        self._pinned = pinned
        self._page_size = page_size
        self.is_safe = True
        """Whether there is such an order. Without one, those who cannot end come last and get nothing."""
        self.order = tuple(self._order(running))
        self._most: _Slots | None = None
        """What those that were kept and have one way to their end can do without; None: nobody was."""
        self._by_way: list[list[_Slots]] = []
        """The same of those with two, each by way; below zero where a way is closed."""

    def _order(self, running: Iterable[tuple[Request, Claim]]) -> Iterator[Place]:
        """Whoever lacks least is tried first. Whoever can end makes it no harder for the others."""
        pending = sorted(running, key=_lack)
        num_users = Counter(part for _, claim in pending if claim.prefix for part in claim.prefix.chain())
        while pending:
            left = []
            for request, claim in pending:
                if self._can_end(claim):
                    yield Place(request, claim, self._available)
                    self._available = _sum(self._available, claim.owned)
                    for part in claim.prefix.chain() if claim.prefix else ():
                        num_users[part] -= 1
                        if not num_users[part]:
                            self._available = _sum(self._available, self._unpinned(part))
                else:
                    left.append((request, claim))
            if len(left) == len(pending):
                self.is_safe = False
                yield from (Place(request, claim, self._available) for request, claim in left)
                return
            pending = left

    def _unpinned(self, part: Prefix) -> _Slots:
        num_pages = len(part.keys) - self._pinned.get(part, 0)
        return slots_of(SlotCounts.of(part.kinds, num_pages * self._page_size))

    def _can_end(self, claim: Claim) -> bool:
        ways = claim.ways
        return _fits(ways[0], self._available) or (len(ways) > 1 and _fits(ways[1], self._available))

    def keep(self, claim: Claim, available: _Slots) -> None:
        """From now on nothing is given away that this request needs to end."""
        if len(claim.ways) > 1:
            self._by_way.append([_slack(available, way) for way in claim.ways])
            return
        slack = _slack(available, claim.ways[0])
        self._most = slack if self._most is None else _least(self._most, slack)

    def keep_landing(self, claim: Claim) -> None:
        """The same of a request whose KV is on its way. After all of ``order``."""
        self.is_safe &= self._can_end(claim)
        self.keep(claim, self._available)

    def allows(self, slots: SlotCounts) -> bool:
        """Whether all that were kept can end when ``slots`` are given away; those below 0 are given back."""
        need = slots_of(slots)
        if self._most is not None and not _fits(need, self._most):
            return False
        return all(any(_fits(need, slack) for slack in by_way) for by_way in self._by_way)

    def give(self, slots: SlotCounts) -> None:
        need = slots_of(slots)
        if self._most is not None:
            self._most = _difference(self._most, need)
        self._by_way = [[_difference(slack, need) for slack in by_way] for by_way in self._by_way]

    def allows_landing(self, claim: Claim) -> bool:
        """Whether one more may take what it holds from what is free, and can end too. After all others."""
        left = _difference(self._available, claim.owned)
        return self.allows(SlotCounts(*claim.owned)) and any(_fits(way, left) for way in claim.ways)

    def give_landing(self, claim: Claim) -> None:
        self.give(SlotCounts(*claim.owned))
        self._available = _difference(self._available, claim.owned)
        self.keep(claim, self._available)


def _lack(entry: tuple[Request, Claim]) -> int:
    host, device, *_ = entry[1].ways[0]
    return host + device


def slots_of(counts: SlotCounts) -> _Slots:
    """Return the counts of the pools from which requests get slots step by step."""
    return counts.host, counts.device, counts.index, counts.lookup


def _slack(available: _Slots, way: _Slots) -> _Slots:
    """What ``way`` leaves; where it takes nothing, it does not matter what there is."""
    return (
        available[0] - way[0] if way[0] else _ANY,
        available[1] - way[1] if way[1] else _ANY,
        available[2] - way[2] if way[2] else _ANY,
        available[3] - way[3] if way[3] else _ANY,
    )


def _fits(need: _Slots, available: _Slots) -> bool:
    return (
        need[0] <= available[0]
        and need[1] <= available[1]
        and need[2] <= available[2]
        and need[3] <= available[3]
    )


def _sum(one: _Slots, other: _Slots) -> _Slots:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _difference(one: _Slots, other: _Slots) -> _Slots:
    return one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3]


def _least(one: _Slots, other: _Slots) -> _Slots:
    host, device, index, lookup = map(min, one, other)
    return host, device, index, lookup


class Beginning(NamedTuple):
    """What is held of one prompt."""

    num_pages: int
    parts: tuple[tuple[Prefix, int], ...]
    """The prefixes that it is of, and how many of their pages."""
    taken: SlotCounts
    """What of it nobody uses so far."""


class Beginnings:
    """What is held of the prompts that one plan admits, and what of that the plan has taken already.

    ``landing``: requests whose KV is on its way.
    """

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
