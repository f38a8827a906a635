"""Says which slots a plan can give away so that every admitted request can still end. Pure.

``PlanDraft`` makes a ``Reserve`` for each plan that has something to give away. Requests get slots step by
step, and together they may need more than there are. Slots are therefore given away only while there is an
order in which all requests can end, one after the other, if each asks for the most that it may need: it can
use what is free then, which includes what the requests before it owned. This is the banker's algorithm, for
the host, device, index and lookup pools together. ``order_ends`` finds the order, and ``Reserve`` gives away
within it.

Example, with one pool: 10 slots are free, A owns 30 and lacks 5, B owns 10 and lacks 35. A can end first, and
B then has 10 + 30 = 40. Up to 5 slots can be given to a third request: A still finds 5, and B 35.

- The first request in the order never sits out. When it ends, the next one is the first. Nobody is admitted
  while a request sits out, so each request becomes the first in time.
- A dense request can end in two ways: in device pages, or in a hot buffer with host slots for its whole life.
  For the second it needs copies of what it shares, too, before the shared pages are free.
- Shared pages are free when the last of their users has ended. Held pages without users count as free until a
  plan lets a request share them (``held_matches.py``).
- Requests whose KV is on its way come last, and no other request counts on their slots: if the prefill node
  vanishes, these may never be free again. Slots in quarantine, and pages that its rooms share, are not
  counted on either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.decode_node.request import Request

_ANY = 1 << 60
"""More slots than any pool has."""

_Slots = tuple[int, int, int, int]
"""Numbers of host, device, index and lookup slots, in this order. These are the pools whose slots a request
gets step by step; it gets all slots of the others at its admission. A NamedTuple would triple the time of a
sum, and every step makes many."""

_ALL_SPARE: Final[_Slots] = (_ANY, _ANY, _ANY, _ANY)


class Claim(NamedTuple):
    """The slots that a request owns, and those that it lacks to end."""

    owned: _Slots
    ways: tuple[_Slots, ...]
    """The slots that it lacks, for each of the one or two ways in which it can end."""
    prefixes: tuple[Prefix, ...] = ()
    """The prefixes that it shares."""

    def can_end(self, available: _Slots) -> bool:
        """Return whether the request finds what it lacks, in one of its ways, when ``available`` is free."""
        return _fits(self.ways[0], available) or (len(self.ways) > 1 and _fits(self.ways[1], available))

    def shared(self) -> Iterator[Prefix]:
        return chain.from_iterable(prefix.chain() for prefix in self.prefixes)


class Place(NamedTuple):
    """A request's place in the order in which all can end."""

    request: Request
    claim: Claim
    available: _Slots
    """The slots that are free when all requests before it have ended."""


class Order(NamedTuple):
    """An order in which running requests can end, one after the other."""

    places: list[Place]
    left: _Slots
    """The slots that are free when all of them have ended."""
    is_safe: bool
    """Whether all can end. If not, those that cannot come last."""


def order_ends(
    free: SlotCounts, running: Iterable[tuple[Request, Claim]], pinned: Mapping[Prefix, int], page_size: int
) -> Order:
    """Return an order in which the requests can end, those that lack least first.

    No choice is ever wrong: a request that ends leaves the others at least what they had. ``pinned``: pages
    of shared prefixes that no end of a running request frees (``HeldMatches.pinned``).
    """
    available, places = slots_of(free), list[Place]()
    pending = sorted(running, key=_lack)
    num_users = Counter(part for _, claim in pending if claim.prefixes for part in claim.shared())
    while pending:
        blocked = []
        for request, claim in pending:
            if not claim.can_end(available):
                blocked.append((request, claim))
                continue
            places.append(Place(request, claim, available))
            available = _sum(available, claim.owned)
            if not claim.prefixes:
                continue
            for part in claim.shared():
                num_users[part] -= 1
                if not num_users[part]:
                    num_pages = len(part.keys) - pinned.get(part, 0)
                    available = _sum(available, slots_of(SlotCounts.of(part.kinds, num_pages * page_size)))
        if len(blocked) == len(pending):
            break
        pending = blocked
    places += [Place(request, claim, available) for request, claim in pending]
    return Order(places, available, is_safe=not pending)


class Reserve:
    """The slots that can be given away while all requests can end: the running ones in ``order``, and behind
    them each of those whose KV is on its way.

    A slot that a request gets can only keep those before it in the order from ending: those behind it come
    after its end, which frees the slot again. Requests are therefore asked in their order. At a request's
    turn the reserve keeps the needs of those before it, and calls ``grown``, which may ``give`` it slots and
    returns the claim whose needs are kept for those behind it.

    The claim is relative to ``Place.available``, which still counts what was given. A request that got slots
    returns its old claim, because it lacks as many fewer as are no longer free. One that gave up a way to end
    returns its claim without that way.
    """

    def __init__(
        self,
        order: Order,
        landing: Iterable[Claim],
        grown: Callable[[Place, Reserve], Claim] = lambda place, _: place.claim,
    ) -> None:
        """``landing``: claims of the requests whose KV is on its way."""
        self._left = order.left
        """The slots that are free when all running requests have ended, without those of later admissions."""
        self._given: _Slots = (0, 0, 0, 0)
        """The slots that were given away. They count as free in the next three, so that giving changes none
        of them."""
        self._spare: _Slots | None = None
        """The fewest slots that a request with one way to end leaves, of those whose needs are kept; None
        without such requests."""
        self._spare_by_way: list[tuple[_Slots, _Slots]] = []
        """For each request with two ways to end whose needs are kept, the slots that each way leaves;
        negative where that way is closed."""
        self._least_by_way: tuple[_Slots, _Slots] = (_ALL_SPARE, _ALL_SPARE)
        """The fewest slots that any of these requests leaves, for each way. Mostly one way is open to all of
        them, which saves a look at each."""
        self.is_safe = order.is_safe
        """Whether all requests can end as things are."""
        for place in order.places:
            self._keep(grown(place, self), place.available)
        for claim in landing:
            self.is_safe &= claim.can_end(self._left)
            self._keep(claim, self._left)

    def _keep(self, claim: Claim, available: _Slots) -> None:
        """Keep what a request needs to end when ``available`` is free."""
        available = _sum(available, self._given)
        first = _rest(available, claim.ways[0])
        if len(claim.ways) > 1:
            second = _rest(available, claim.ways[1])
            self._spare_by_way.append((first, second))
            least_first, least_second = self._least_by_way
            self._least_by_way = _least(least_first, first), _least(least_second, second)
        else:
            self._spare = first if self._spare is None else _least(self._spare, first)

    def allows(self, slots: SlotCounts) -> bool:
        """Return whether all requests whose needs are kept can end when ``slots`` are given away; negative
        counts are slots that are given back."""
        need = _sum(slots_of(slots), self._given)
        if self._spare is not None and not _fits(need, self._spare):
            return False
        first, second = self._least_by_way
        if _fits(need, first) or _fits(need, second):
            return True
        return all(_fits(need, first) or _fits(need, second) for first, second in self._spare_by_way)

    def give(self, slots: SlotCounts) -> None:
        """Note that ``slots`` are given away, which ``allows`` has allowed."""
        self._given = _sum(self._given, slots_of(slots))

    def allows_landing(self, claim: Claim) -> bool:
        """Return whether a request may be admitted: it takes what ``claim`` owns from what is free, and it
        and all requests whose needs are kept can end."""
        left = _difference(self._left, claim.owned)
        return self.allows(SlotCounts(*claim.owned)) and claim.can_end(left)

    def give_landing(self, claim: Claim) -> None:
        """Give an admitted request what ``claim`` owns, and keep what it needs to end."""
        self.give(SlotCounts(*claim.owned))
        self._left = _difference(self._left, claim.owned)
        self._keep(claim, self._left)


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
    return (
        one[0] if one[0] < other[0] else other[0],
        one[1] if one[1] < other[1] else other[1],
        one[2] if one[2] < other[2] else other[2],
        one[3] if one[3] < other[3] else other[3],
    )
