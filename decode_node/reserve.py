"""Tells the scheduler which slots it can give away so that every admitted request can still end. Pure.

``Reserve`` and ``HeldMatches`` live as long as one plan. Requests get slots step by step, and together they
may need more than there are. Slots are therefore granted only while there is an order in which all requests
can end, one after the other, if each asks for the most that it may need: it can use what is free then, which
includes what the requests before it owned. This is the banker's algorithm, for the host, device, index and
lookup pools together.

Example, with one pool: 10 slots are free, A owns 30 and lacks 5, B owns 10 and lacks 35. A can end first, and
B then has 10 + 30 = 40. Up to 5 slots can be given to a third request: A still finds 5, and B 35.

- The first request in the order never sits out. When it ends, the next one is the first. Nobody is admitted
  while a request sits out, so each request becomes the first in time.
- A dense request can end in two ways: in device pages, or in a hot buffer with host slots for its whole life.
  A dense request that shares pages ends in device pages.
- Shared pages are free when the last of their users has ended. Held pages without users count as free until a
  plan lets a request share them (``HeldMatches``).
- Requests whose KV is on its way come last, and no other request counts on their slots: if the prefill node
  vanishes, these may never be free again. Slots in quarantine are not counted on either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.decode_node.request import KV_POOLS, Request

_ANY = 1 << 60
"""More slots than any pool has."""

_Slots = tuple[int, int, int, int]
"""Numbers of host, device, index and lookup slots, in this order. These are the pools whose slots a request
gets step by step; it gets all slots of the others at its admission. A NamedTuple would triple the time of a
sum, and every step makes many."""


class Claim(NamedTuple):
    """What a request owns, and what it lacks to end."""

    owned: _Slots
    ways: tuple[_Slots, ...]
    """The slots that it lacks, for each of the one or two ways in which it can end."""
    prefix: Prefix | None = None
    """The prefix that it shares."""


class Place(NamedTuple):
    """A request's place in the order in which all can end."""

    request: Request
    claim: Claim
    available: _Slots
    """What is free when all requests before it have ended."""


class Reserve:
    """An order in which all running requests can end, and what can be given away without breaking it.

    A slot that a request gets is missing only to those before it in the order: those behind it wait for its
    end, and then the slot is free again. ``keep_all`` therefore lets each request grow just before it keeps
    what that request needs. It is called once, before anything else is given away.
    """

    def __init__(
        self,
        free: SlotCounts,
        running: Iterable[tuple[Request, Claim]],
        pinned: Mapping[Prefix, int],
        page_size: int,
    ) -> None:
        """``pinned``: see ``HeldMatches.pinned``."""
        self._available = slots_of(free)
        """Slots that are free when all requests in ``order`` have ended, once that is made."""
        self._pinned = pinned
        self._page_size = page_size
        self.is_safe = True
        """Whether such an order exists. If not, the requests that cannot end come last in ``order``."""
        self.order = tuple(self._order(running))
        self._spare: _Slots | None = None
        """Slots that no kept request with one way to end needs; None if there are no such requests."""
        self._spare_by_way: list[list[_Slots]] = []
        """Slots that each way of a kept request with two ways to end leaves; negative where that way is
        closed."""

    def _order(self, running: Iterable[tuple[Request, Claim]]) -> Iterator[Place]:
        """Yield the requests in an order in which they can end, those that lack least first.

        No choice is ever wrong: a request that ends leaves the others at least what they had.
        """
        pending = sorted(running, key=_lack)
        num_users = Counter(part for _, claim in pending if claim.prefix for part in claim.prefix.chain())
        while pending:
            blocked = []
            for request, claim in pending:
                if self._can_end(claim):
                    yield Place(request, claim, self._available)
                    self._available = _sum(self._available, claim.owned)
                    for part in claim.prefix.chain() if claim.prefix else ():
                        num_users[part] -= 1
                        if not num_users[part]:
                            self._available = _sum(self._available, self._unpinned(part))
                else:
                    blocked.append((request, claim))
            if len(blocked) == len(pending):
                self.is_safe = False
                yield from (Place(request, claim, self._available) for request, claim in blocked)
                return
            pending = blocked

    def _unpinned(self, part: Prefix) -> _Slots:
        """Return the slots of a prefix that are free when its last running user has ended."""
        num_pages = len(part.keys) - self._pinned.get(part, 0)
        return slots_of(SlotCounts.of(part.kinds, num_pages * self._page_size))

    def _can_end(self, claim: Claim) -> bool:
        ways = claim.ways
        return _fits(ways[0], self._available) or (len(ways) > 1 and _fits(ways[1], self._available))

    def keep_all(self, landing: Iterable[Claim], grown: Callable[[Place], Claim] | None = None) -> None:
        """Keep what each request needs to end: the running ones in order, then those whose KV is on its way.

        ``grown`` may ``give`` slots to a running request; it returns the request's new claim.
        """
        for place in self.order:
            claim = grown(place) if grown is not None else place.claim
            self._keep(claim, place.available)
        for claim in landing:
            self.is_safe &= self._can_end(claim)
            self._keep(claim, self._available)

    def _keep(self, claim: Claim, available: _Slots) -> None:
        """Keep what a request needs to end when ``available`` is free."""
        if len(claim.ways) > 1:
            self._spare_by_way.append([_rest(available, way) for way in claim.ways])
            return
        rest = _rest(available, claim.ways[0])
        self._spare = rest if self._spare is None else _least(self._spare, rest)

    def allows(self, slots: SlotCounts) -> bool:
        """Return whether all kept requests can end when ``slots`` are given away; negative counts are slots
        that are given back."""
        need = slots_of(slots)
        if self._spare is not None and not _fits(need, self._spare):
            return False
        return all(any(_fits(need, spare) for spare in ways) for ways in self._spare_by_way)

    def give(self, slots: SlotCounts) -> None:
        """Note that ``slots`` are given away, which ``allows`` has allowed."""
        need = slots_of(slots)
        if self._spare is not None:
            self._spare = _difference(self._spare, need)
        self._spare_by_way = [[_difference(spare, need) for spare in ways] for ways in self._spare_by_way]

    def allows_landing(self, claim: Claim) -> bool:
        """Return whether a request may be admitted: it takes what ``claim`` owns from what is free, and it
        and all kept requests can end."""
        left = _difference(self._available, claim.owned)
        return self.allows(SlotCounts(*claim.owned)) and any(_fits(way, left) for way in claim.ways)

    def give_landing(self, claim: Claim) -> None:
        """Give an admitted request what ``claim`` owns, and keep what it needs to end."""
        self.give(SlotCounts(*claim.owned))
        self._available = _difference(self._available, claim.owned)
        self._keep(claim, self._available)


def _lack(entry: tuple[Request, Claim]) -> int:
    """Return the host and device slots that the request lacks to end in its first way."""
    host, device, *_ = entry[1].ways[0]
    return host + device


def slots_of(counts: SlotCounts) -> _Slots:
    return counts.host, counts.device, counts.index, counts.lookup


def _rest(available: _Slots, way: _Slots) -> _Slots:
    """Return what ``way`` leaves of ``available``: ``_ANY`` of pools from which it takes nothing, because its
    request then ends however few slots are free there."""
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


class HeldMatch(NamedTuple):
    """The pages of one prompt that are held."""

    num_pages: int
    parts: tuple[tuple[Prefix, int], ...]
    """The prefixes that have these pages, each with the number of its pages that match."""
    taken: SlotCounts
    """The slots of those pages that count as free until the prompt's request shares them."""


class HeldMatches:
    """Finds the held pages of the prompts that one plan admits, and notes which of them the plan has taken.

    ``landing``: requests whose KV is on its way.
    """

    def __init__(self, held: PrefixTree, landing: Iterable[Request], page_size: int) -> None:
        self._held = held
        self._page_size = page_size
        self.pinned: dict[Prefix, int] = {}
        """Number of pages, from a prefix's start, that are shared by requests whose KV is on its way or that
        the plan admits. Nobody counts on these pages."""
        for request in landing:
            for part in request.prefix.chain() if request.prefix else ():
                self.pinned[part] = len(part.keys)

    def find(self, request: Request, mode: Mode) -> HeldMatch:
        """Return the held pages that ``request`` can share if it is admitted in ``mode``."""
        kinds = KV_POOLS[mode]
        match = self._held.find(request.usable_keys, kinds)
        if match is None:
            return HeldMatch(0, (), SlotCounts())
        parts = tuple(match.parts())
        unused = (max(0, num - self.pinned.get(part, 0)) for part, num in parts if not part.num_users)
        return HeldMatch(match.num_pages, parts, SlotCounts.of(kinds, sum(unused) * self._page_size))

    def is_counted_on(self, match: HeldMatch) -> bool:
        """Return whether running requests use pages of ``match`` that are not pinned yet: an order counts on
        them to be free in the end, which sharing them would prevent."""
        return any(part.num_users and num > self.pinned.get(part, 0) for part, num in match.parts)

    def pinned_with(self, match: HeldMatch) -> dict[Prefix, int]:
        """Return ``pinned`` as it would be if ``match`` were shared."""
        return self.pinned | {part: max(num, self.pinned.get(part, 0)) for part, num in match.parts}

    def take(self, match: HeldMatch) -> None:
        """Note that an admitted request shares ``match``."""
        self.pinned = self.pinned_with(match)
