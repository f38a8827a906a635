"""Owns the prefixes of a node: KV and indexer keys that requests share, and that outlive them.

A tree of runs of whole pages, each behind its ``parent``. A page is found by its key (``prompt_keys.py``). A
request that begins like what is held in its pools uses the pages as they are; its own slots are those behind
them. What is in the tree is never written again: the caller adds pages when all of their bytes are there and
no remote write can land in them.

Every prefix counts the requests that use it, each of which uses all before it, too. What nobody uses is as
good as free: ``make_room`` gives it up, the least recently used first and from the ends, before anybody who
needs slots is told that there are none.

A run is cut where somebody uses a part of it, and neighbours are one run again when nothing tells them apart:
none but the second is behind the first, and the same requests use them, or used them last. So a conversation
that grew by a page a turn is one run. Where answers were left behind at many places of one sequence, those
left the longest ago are given up, so that it has MAX_RUNS runs at most.

A prefix in which something is wrong is dropped with all behind it (``drop``): nobody else finds it, and it is
free when those have ended who use it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.extents import has_slot
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.protocol.messages import Extent

MAX_RUNS: Final = 64
"""Of one sequence: each costs every turn of it some microseconds, in which nobody else is served."""
MAX_SIDES: Final = 4
"""Runs behind one that are given up at once for that."""

Kinds: TypeAlias = tuple[PoolKind, ...]
"""The pools that a prefix has slots of, as many in each."""


@dataclass(eq=False, slots=True)
class Prefix:
    """Pages with ``keys``, in order, behind those of ``parent``: of each of ``kinds`` as many."""

    kinds: Kinds
    parent: Prefix | None
    end_page: int
    """Pages of a sequence up to its end, those before it included."""
    keys: list[PageKey]
    holding: Holding
    num_users: int = 0
    """Requests that have its pages among theirs."""
    last_used: int = 0
    """When it was added or let go of last, by the count of such events."""
    children: set[Prefix] = field(default_factory=set)
    """Those whose parent it is."""
    is_dropped: bool = False
    """Nobody can find its pages any more, nor those of any that is behind it."""

    @property
    def start_page(self) -> int:
        return self.end_page - len(self.keys)

    def chain(self) -> Iterator[Prefix]:
        """It and all before it, the last one first."""
        prefix: Prefix | None = self
        while prefix is not None:
            yield prefix
            prefix = prefix.parent

    def extents(self, kind: PoolKind) -> tuple[Extent, ...]:
        """Of all pages up to its end, in order."""
        parts = [prefix.holding[kind] for prefix in self.chain()]
        return tuple(extent for part in reversed(parts) for extent in part)


class Match(NamedTuple):
    """The longest beginning of a sequence that is held: ``num_pages``, the last of them in ``prefix``."""

    prefix: Prefix
    num_pages: int

    def parts(self) -> Iterator[tuple[Prefix, int]]:
        """Every prefix that it is of, and how many of its pages."""
        end_page = self.num_pages
        for prefix in self.prefix.chain():
            yield prefix, end_page - prefix.start_page
            end_page = prefix.start_page


class PrefixTree:
    """All prefixes. Each is a holding of ``pools`` in Stage.HELD, and nobody else changes it."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._by_key: dict[Kinds, dict[PageKey, Prefix]] = {}
        """The prefix that has a page. Whatever is before that is held, too."""
        self._prefixes: dict[Prefix, None] = {}
        self._idle: OrderedDict[Prefix, None] = OrderedDict()
        """Those that nobody uses, least recently used first, so none before what is behind it."""
        self._num_unused: Counter[Kinds] = Counter()
        """Pages without users."""
        self._num_events = 0
        """Of what is added, and let go of."""
        self.num_evicted_tokens = 0
        """That were given up for somebody who needed the slots, since the start."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes)

    @property
    def num_tokens(self) -> int:
        """All that is held, in use or not."""
        return sum(len(by_key) for by_key in self._by_key.values()) * self._pools.page_size

    @property
    def unused(self) -> SlotCounts:
        """What no request has among its pages: ``make_room`` can give it up."""
        page_size = self._pools.page_size
        parts = (SlotCounts.of(kinds, num * page_size) for kinds, num in self._num_unused.items())
        return sum(parts, SlotCounts())

    def find(self, keys: Sequence[PageKey], kinds: Kinds) -> Match | None:
        """The longest beginning of ``keys`` that is held in ``kinds``."""
        by_key = self._by_key.get(kinds, {})
        num_pages = bisect_left(keys, True, key=lambda key: key not in by_key)
        return Match(by_key[keys[num_pages - 1]], num_pages) if num_pages else None

    def use(self, keys: Sequence[PageKey], kinds: Kinds) -> Prefix:
        """For one more request, until it lets go of it, the prefix that ends with the last of ``keys``, which
        are all held."""
        prefix = self._ending_at(keys, kinds)
        for part in prefix.chain():
            self._count(part, -1)
            part.num_users += 1
            self._count(part, 1)
        return prefix

    def let_go(self, prefix: Prefix) -> None:
        """One request fewer uses ``prefix``."""
        self._num_events += 1
        for part in prefix.chain():
            self._count(part, -1)
            part.num_users -= 1
            part.last_used = self._num_events
            self._count(part, 1)
        self._join_chain(prefix)
        for part in tuple(prefix.chain()):
            self._cut_dropped(part)
        self._pools.num_changes += 1

    def share(
        self,
        holding: Holding,
        keys: Sequence[PageKey],
        kinds: Kinds,
        before: Prefix | None,
        *,
        keeps_known: bool = False,
    ) -> Prefix | None:
        """``hold`` the pages behind those of ``before``, for a request that uses all of them from now on,
        instead of ``before``."""
        num_held = self.hold(holding, keys, kinds, _end_of(before), keeps_known=keeps_known)
        prefix = self.use(keys[:num_held], kinds) if num_held else None
        if before is not None:
            self.let_go(before)
        return prefix

    def hold(
        self,
        holding: Holding,
        keys: Sequence[PageKey],
        kinds: Kinds,
        num_before: int = 0,
        *,
        keeps_known: bool = False,
    ) -> int:
        """Hold the first pages that ``holding`` has of ``kinds``: those of ``keys`` but the first
        ``num_before``, which must be held.

        Pages that another left already are freed, or stay the holding's own where it ``keeps_known`` ones.
        Returns how many of ``keys`` are held then: all, or as before where there would be too many runs.
        Raises PoolIntegrityError.
        """
        if len(keys) <= num_before:
            return len(keys)
        if not self._make_short(keys, kinds):
            return num_before
        found = self.find(keys, kinds)
        num_found = 0 if found is None else found.num_pages
        if num_found < num_before:
            raise PoolIntegrityError(f"room {holding.room}: what is before its pages is not held")
        parent = self._ending_at(keys[:num_found], kinds) if num_found else None
        page_size = self._pools.page_size
        if num_found > num_before:
            known = self._pools.split(holding, kinds, (num_found - num_before) * page_size)
        self._num_events += 1
        last = parent
        if num_found < len(keys):
            own = self._pools.split(holding, kinds, (len(keys) - num_found) * page_size)
            last = Prefix(kinds, parent, len(keys), list(keys[num_found:]), own, last_used=self._num_events)
            self._enter(last)
            self._count(last, 1)
        if num_found > num_before and keeps_known:
            self._pools.join(known, holding)
        elif num_found > num_before:
            self._pools.release(known)
        for part in () if parent is None else parent.chain():
            part.last_used = self._num_events
            self._touch(part)
        if last is not None:
            self._join_chain(last)
        return len(keys)

    def make_room(self, missing: SlotCounts) -> None:
        """Give up as little as makes ``missing`` free, least recently used first, if it is held at all."""
        while True:
            free, page_size = self._pools.free, self._pools.page_size
            short = {kind: -(-(missing[kind] - free[kind]) // page_size) for kind in PoolKind}
            if max(short.values()) <= 0:
                return
            for prefix in self._idle:
                num_pages = max(short[kind] for kind in prefix.kinds)
                if num_pages > 0:
                    num_left = max(0, len(prefix.keys) - num_pages)
                    self.num_evicted_tokens += (len(prefix.keys) - num_left) * page_size
                    self._cut(prefix, num_left)
                    break
            else:
                return

    def drop(self, kind: PoolKind, slot: int) -> None:
        """Let nobody find the prefix that has ``slot`` any more, nor what is behind it."""
        owner = next((one for one in self._prefixes if has_slot(one.holding[kind], slot)), None)
        if owner is None or owner.is_dropped:
            return
        dropped = [owner]
        for prefix in dropped:  # which grows meanwhile
            dropped += prefix.children
        for prefix in dropped:
            if prefix.is_dropped:
                continue
            prefix.is_dropped = True
            for key in prefix.keys:
                del self._by_key[prefix.kinds][key]
        for prefix in reversed(dropped):
            self._cut_dropped(prefix)

    def _cut_dropped(self, prefix: Prefix) -> None:
        """Give a dropped prefix up if nobody uses it; what is behind it comes first."""
        if prefix.is_dropped and not prefix.num_users and not prefix.children:
            self._cut(prefix, 0)

    def flush(self) -> None:
        """Give up everything that nobody uses."""
        while self._idle:
            self._cut(next(iter(self._idle)), 0)

    def check_integrity(self, users: Iterable[Prefix]) -> None:
        """Raise PoolIntegrityError unless the index and the counts say what is held, and who uses it.
        ``users``: what each request has that uses one."""
        num_users = Counter(part for prefix in users for part in prefix.chain())
        if strays := num_users.keys() - self._prefixes:
            raise PoolIntegrityError(f"{len(strays)} prefixes are used and not held")
        num_unused: Counter[Kinds] = Counter()
        num_pages_of: Counter[Kinds] = Counter()
        for prefix in self._prefixes:
            if fault := self._fault(prefix, num_users[prefix]):
                raise PoolIntegrityError(f"prefix of room {prefix.holding.room}: {fault}")
            num_pages_of[prefix.kinds] += 0 if prefix.is_dropped else len(prefix.keys)
            num_unused[prefix.kinds] += 0 if prefix.num_users else len(prefix.keys)
        seen: set[Prefix] = set()
        for prefix in self._idle:
            if prefix.parent in seen:
                raise PoolIntegrityError(f"prefix of room {prefix.holding.room}: would outlive its start")
            seen.add(prefix)
        num_behind = sum(prefix.parent is not None for prefix in self._prefixes)
        if (num_children := sum(len(prefix.children) for prefix in self._prefixes)) != num_behind:
            raise PoolIntegrityError(f"{num_behind} prefixes are behind others, which know {num_children}")
        num_found = Counter({kinds: len(by_key) for kinds, by_key in self._by_key.items()})
        if (num_pages_of, num_unused) != (num_found, self._num_unused):
            raise PoolIntegrityError(
                f"held pages {num_pages_of}, unused {num_unused}, counted as {num_found}, {self._num_unused}"
            )

    def _fault(self, prefix: Prefix, num_users: int) -> str:
        """What is wrong with a prefix that so many are known to use; empty when nothing is."""
        num_pages, before = len(prefix.keys), prefix.parent
        slots = {kind: prefix.holding.num_slots(kind) for kind in prefix.holding.extents}
        if slots != dict.fromkeys(prefix.kinds, num_pages * self._pools.page_size):
            return f"its slots are not {num_pages} pages of {prefix.kinds}"
        if not num_pages or prefix.start_page != _end_of(before):
            return f"{num_pages} pages from {_end_of(before)} to {prefix.end_page}"
        if before is not None and before not in self._prefixes:
            return "what is before it is not held"
        if any(child.parent is not prefix or child not in self._prefixes for child in prefix.children):
            return "what is behind it is not held, or behind another"
        by_key = self._by_key[prefix.kinds]
        if any((by_key.get(key) is prefix) is prefix.is_dropped for key in prefix.keys):
            return f"a page can be found {prefix.is_dropped}"
        if before is not None and before.is_dropped and not prefix.is_dropped:
            return "what is before it was dropped"
        if prefix.is_dropped and not num_users and not prefix.children:
            return "it was dropped, and is still there"
        if prefix.num_users != num_users:
            return f"{prefix.num_users} users counted, {num_users} known"
        if (prefix in self._idle) is bool(num_users):
            return f"{num_users} users, listed as unused {prefix in self._idle}"
        return ""

    def _make_short(self, keys: Sequence[PageKey], kinds: Kinds) -> bool:
        """Whether a run behind what is held of ``keys`` would be one of MAX_RUNS at most.

        For that, runs that were left behind beside it are given up, those used longest ago first.
        """
        while (found := self.find(keys, kinds)) is not None:
            chain = list(found.prefix.chain())
            if len(chain) + (found.num_pages < found.prefix.end_page) < MAX_RUNS:
                return True
            beside = [
                sides
                for before, part in zip(chain[1:], chain, strict=False)
                if (sides := self._sides_to_give_up(before, part))
            ]
            if not beside:
                return False
            for side in min(beside, key=lambda sides: max(side.last_used for side in sides)):
                self._cut(side, 0)
        return True

    def _sides_to_give_up(self, before: Prefix, part: Prefix) -> list[Prefix]:
        """All behind ``before`` but ``part``, if without them the two are one and nobody uses them."""
        if not 1 < len(before.children) <= 1 + MAX_SIDES or _use_of(before) != _use_of(part):
            return []
        sides = [child for child in before.children if child is not part]
        return sides if all(side in self._idle and not side.children for side in sides) else []

    def _ending_at(self, keys: Sequence[PageKey], kinds: Kinds) -> Prefix:
        """The prefix that ends with the last of ``keys``: cut in two, if it goes on."""
        prefix = self._by_key[kinds][keys[-1]]
        num_first = len(keys) - prefix.start_page
        if num_first == len(prefix.keys):
            return prefix
        self._count(prefix, -1)
        first = Prefix(
            kinds,
            prefix.parent,
            len(keys),
            prefix.keys[:num_first],
            self._pools.split(prefix.holding, kinds, num_first * self._pools.page_size),
            prefix.num_users,
            prefix.last_used,
            {prefix},
        )
        if prefix.parent is not None:
            prefix.parent.children.remove(prefix)
        prefix.parent, prefix.keys = first, prefix.keys[num_first:]
        self._enter(first)
        for part in prefix.chain():
            self._count(part, 1) if part in (prefix, first) else self._touch(part)
        return first

    def _join_chain(self, prefix: Prefix) -> None:
        """Make runs of the prefixes up to ``prefix`` that nothing tells apart any more."""
        part: Prefix | None = prefix
        while part is not None:
            before = part.parent
            while before is not None and len(before.children) == 1 and _use_of(before) == _use_of(part):
                self._join(before, part)
                before = part.parent
            part = before

    def _join(self, first: Prefix, second: Prefix) -> None:
        """``second``, which requests may have as theirs, takes the pages of ``first``, which none has."""
        if not first.is_dropped:
            self._by_key[first.kinds].update(dict.fromkeys(first.keys, second))
        self._pools.join(first.holding, second.holding)
        second.keys = first.keys + second.keys
        second.parent = first.parent
        if first.parent is not None:
            first.parent.children.remove(first)
            first.parent.children.add(second)
        self._idle.pop(first, None)
        del self._prefixes[first]

    def _enter(self, prefix: Prefix) -> None:
        if prefix.parent is not None:
            prefix.parent.children.add(prefix)
        self._prefixes[prefix] = None
        self._by_key.setdefault(prefix.kinds, {}).update(dict.fromkeys(prefix.keys, prefix))

    def _count(self, prefix: Prefix, sign: int) -> None:
        """Its pages into the sums, or out of them before its users or pages change."""
        if prefix.num_users:
            return
        self._num_unused[prefix.kinds] += sign * len(prefix.keys)
        if sign > 0:
            self._idle[prefix] = None
        else:
            del self._idle[prefix]

    def _touch(self, prefix: Prefix) -> None:
        """It is the most recently used of those that nobody uses."""
        if prefix in self._idle:
            self._idle.move_to_end(prefix)

    def _cut(self, prefix: Prefix, num_pages: int) -> None:
        """Keep the first ``num_pages`` pages of an idle prefix that nothing is behind; of none, nothing."""
        for key in prefix.keys[num_pages:] if not prefix.is_dropped else ():
            del self._by_key[prefix.kinds][key]
        num_gone = len(prefix.keys) - num_pages
        self._num_unused[prefix.kinds] -= num_gone
        prefix.end_page -= num_gone
        del prefix.keys[num_pages:]
        if num_pages:
            self._pools.trim(prefix.holding, num_pages * self._pools.page_size)
            return
        del self._idle[prefix]
        self._prefixes.pop(prefix, None)
        self._pools.release(prefix.holding)
        if prefix.parent is not None:
            prefix.parent.children.remove(prefix)
            for child in tuple(prefix.parent.children)[:1]:
                self._join_chain(child)


def _end_of(prefix: Prefix | None) -> int:
    """Pages of a sequence that it has in common with who uses the prefix."""
    return 0 if prefix is None else prefix.end_page


def _use_of(prefix: Prefix) -> tuple[int, int, bool]:
    """Who uses a prefix uses the one before it, so that as many users of both are the same ones."""
    return prefix.num_users, prefix.last_used, prefix.is_dropped
