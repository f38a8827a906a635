"""Owns the held prefixes: KV and indexer keys that requests share, and that outlive them.

A tree of runs of whole pages, each behind its ``parent``: KV, in the host pool or, of dense requests, the
device pool, and indexer keys. A request that begins like what is held uses the pages as they are: nothing is
copied or sent, and its own slots are those behind them. So may any number of requests, of the same mode, at
once. For a request of the other mode nothing is held.

What is in the tree is never written again, by nobody: pages come in when all of their bytes are there and no
remote write can land in them (``LiveRequests`` sees to that), the prompt's while the request still runs, the
others at its end.

Every prefix counts the requests that use it; each of them uses all before it, too.
What nobody uses is as good as free: ``make_room`` gives it up, the least recently used first and from the
ends, before anybody who needs slots is told that there are none. So nobody is admitted later, or otherwise,
for what is held.

A run is cut where somebody uses a part of it, and neighbours are one run again when nothing tells them apart:
none but the second is behind the first, and both were used last, and are used, by the same requests. So a
conversation that grew by a page a turn is one run. Where answers were left behind at many places of one
sequence, those left the longest ago are given up, so that it has MAX_RUNS runs at most.

A page is found by its key, a hash of all tokens up to its end and of the isolation key of who sent them
(``hisparse_pd/paging/prompt_keys.py``).
Pure bookkeeping, as in ``pools.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.paging.allocator import PoolIntegrityError
from hisparse_pd.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.paging.prompt_keys import TOKEN_BYTES, PageKey, page_keys
from hisparse_pd.vocabulary import Mode
from protocol.messages import Extent

KV_POOL: Final = {Mode.HISPARSE: PoolKind.HOST, Mode.DENSE: PoolKind.DEVICE}
"""Where the KV of a request is, and of the prefix that it leaves."""
MAX_RUNS: Final = 64
"""Of one sequence: each costs every turn of it some microseconds, in which nobody else is served."""
MAX_SIDES: Final = 4
"""Runs behind one that are given up at once for that."""


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Of a prompt's whole pages, and the packed tokens behind the last of them."""

    page_size: int
    root: PageKey
    keys: tuple[PageKey, ...]
    tail: bytes

    @classmethod
    def of(cls, root: PageKey, prompt: bytes, page_size: int) -> PromptKeys:
        """``prompt``: as of ``pack_token_ids``."""
        keys = page_keys(root, prompt, page_size)
        return cls(page_size, root, tuple(keys), prompt[len(keys) * page_size * TOKEN_BYTES :])

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * self.page_size + len(self.tail) // TOKEN_BYTES

    def with_output(self, output_token_ids: Sequence[int]) -> list[PageKey]:
        """The keys of the whole pages of the prompt and ``output_token_ids``."""
        last = self.keys[-1] if self.keys else self.root
        return [*self.keys, *page_keys(last, self.tail + pack_token_ids(output_token_ids), self.page_size)]


@dataclass(eq=False, slots=True)
class HeldPrefix:
    """Pages with ``keys``, in order, behind those of ``parent``: as many of KV as of indexer keys."""

    mode: Mode
    parent: HeldPrefix | None
    end_page: int
    """Pages of a sequence up to its end, those before it included."""
    keys: list[PageKey]
    holding: Holding
    num_users: int = 0
    """Requests that have its pages among theirs."""
    last_used: int = 0
    """When it was added or let go of last, by the count of such events."""
    children: set[HeldPrefix] = field(default_factory=set)
    """Those whose parent it is."""

    def chain(self) -> Iterator[HeldPrefix]:
        """It and all before it, the last one first."""
        prefix: HeldPrefix | None = self
        while prefix is not None:
            yield prefix
            prefix = prefix.parent

    def extents(self, kind: PoolKind) -> tuple[Extent, ...]:
        """Of all pages up to its end, in order."""
        parts = [prefix.holding[kind] for prefix in self.chain()]
        return tuple(extent for part in reversed(parts) for extent in part)


class Match(NamedTuple):
    """The longest beginning of a sequence that is held: ``num_pages``, the last of them in ``prefix``."""

    prefix: HeldPrefix
    num_pages: int

    def parts(self) -> Iterator[tuple[HeldPrefix, int]]:
        """Every prefix that it is of, and how many of its pages."""
        end_page = self.num_pages
        for prefix in self.prefix.chain():
            start_page = prefix.end_page - len(prefix.keys)
            yield prefix, end_page - start_page
            end_page = start_page


def kv_and_index_slots(mode: Mode, num_tokens: int) -> SlotCounts:
    """What the KV of so many tokens takes in ``mode``, the lookup slots of their request left out."""
    if mode is Mode.DENSE:
        return SlotCounts(device=num_tokens, index=num_tokens)
    return SlotCounts(host=num_tokens, index=num_tokens)


class HeldPrefixes:
    """All held prefixes. Each is a holding of ``pools`` in Stage.HELD, and nobody else changes it."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._by_key: dict[Mode, dict[PageKey, HeldPrefix]] = {mode: {} for mode in Mode}
        """The prefix that has a page. Whatever is before that is held, too."""
        self._prefixes: set[HeldPrefix] = set()
        self._idle: OrderedDict[HeldPrefix, None] = OrderedDict()
        """Those that nobody uses, least recently used first, so none before what is behind it."""
        self._num_unused = dict.fromkeys(Mode, 0)
        """Pages without users."""
        self._num_events = 0
        """Of what is added, and let go of."""
        self.num_evicted_tokens = 0
        """That were given up for somebody who needed the slots, since the start."""

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def num_tokens(self) -> int:
        """All that is held, in use or not."""
        return sum(len(by_key) for by_key in self._by_key.values()) * self._pools.page_size

    @property
    def unused(self) -> SlotCounts:
        """What no request has among its pages: ``make_room`` can give it up."""
        page_size = self._pools.page_size
        dense, hisparse = (
            kv_and_index_slots(mode, self._num_unused[mode] * page_size)
            for mode in (Mode.DENSE, Mode.HISPARSE)
        )
        return dense + hisparse

    def find(self, keys: Sequence[PageKey], mode: Mode) -> Match | None:
        """The longest beginning of ``keys`` that is held in ``mode``."""
        by_key = self._by_key[mode]
        num_pages = bisect_left(keys, True, key=lambda key: key not in by_key)
        return Match(by_key[keys[num_pages - 1]], num_pages) if num_pages else None

    def use(self, keys: Sequence[PageKey], mode: Mode) -> HeldPrefix:
        """For one more request the prefix that ends with the last of ``keys``, which are all held.

        It stays until the request lets go of it.
        """
        prefix = self._ending_at(keys, mode)
        for part in prefix.chain():
            self._count(part, -1)
            part.num_users += 1
            self._count(part, 1)
        return prefix

    def let_go(self, prefix: HeldPrefix) -> None:
        """One request fewer uses ``prefix``."""
        self._num_events += 1
        for part in prefix.chain():
            self._count(part, -1)
            part.num_users -= 1
            part.last_used = self._num_events
            self._count(part, 1)
        self._join_chain(prefix)
        self._pools.num_changes += 1

    def make_short(self, keys: Sequence[PageKey], mode: Mode) -> bool:
        """Whether a run behind what is held of ``keys`` would be one of MAX_RUNS at most.

        For that, runs that were left behind beside it are given up, those used longest ago first.
        """
        found = self.find(keys, mode)
        while found is not None:
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
            found = self.find(keys, mode)
        return True

    def _sides_to_give_up(self, before: HeldPrefix, part: HeldPrefix) -> list[HeldPrefix]:
        """All behind ``before`` but ``part``, if without them the two are one and nobody uses them."""
        if not 1 < len(before.children) <= 1 + MAX_SIDES or _use_of(before) != _use_of(part):
            return []
        sides = [child for child in before.children if child is not part]
        return sides if all(side in self._idle and not side.children for side in sides) else []

    def add(self, holding: Holding, keys: Sequence[PageKey], mode: Mode) -> None:
        """Hold ``holding``, which is HELD: KV and indexer keys of the last pages of those with ``keys``.

        All before them must be held. What of them is held already is freed. Raises PoolIntegrityError.
        """
        page_size = self._pools.page_size
        num_slots = holding.num_slots(PoolKind.INDEX)
        found = self.find(keys, mode)
        num_found = 0 if found is None else found.num_pages
        num_new = min(num_slots, (len(keys) - num_found) * page_size)
        kinds = (KV_POOL[mode], PoolKind.INDEX)
        if {kind: holding.num_slots(kind) for kind in holding.extents} != dict.fromkeys(kinds, num_slots):
            raise PoolIntegrityError(f"room {holding.room}: {holding.extents} are not whole pages to hold")
        if num_new != (len(keys) - num_found) * page_size:
            raise PoolIntegrityError(f"room {holding.room}: what is before its pages is not held")
        if num_new < num_slots:
            self._pools.release(self._pools.split(holding, kinds, num_slots - num_new))
        parent = self._ending_at(keys[:num_found], mode) if num_found else None
        self._num_events += 1
        last = parent
        if num_new:
            last = HeldPrefix(mode, parent, len(keys), list(keys[num_found:]), holding)
            last.last_used = self._num_events
            self._enter(last)
            self._count(last, 1)
        else:
            self._pools.release(holding)
        for part in () if parent is None else parent.chain():
            part.last_used = self._num_events
            self._touch(part)
        if last is not None:
            self._join_chain(last)

    def make_room(self, missing: SlotCounts) -> None:
        """Give up as little as makes ``missing`` free, least recently used first, if it is held at all."""
        while True:
            free, page_size = self._pools.free, self._pools.page_size
            short = {kind: -(-(missing[kind] - free[kind]) // page_size) for kind in PoolKind}
            if max(short.values()) <= 0:
                return
            for prefix in self._idle:
                num_pages = max(short[kind] for kind in prefix.holding.extents)
                if num_pages > 0:
                    num_left = max(0, len(prefix.keys) - num_pages)
                    self.num_evicted_tokens += (len(prefix.keys) - num_left) * page_size
                    self._cut(prefix, num_left)
                    break
            else:
                return

    def flush(self) -> None:
        """Give up everything that nobody uses."""
        while self._idle:
            self._cut(next(iter(self._idle)), 0)

    def check_integrity(self, users: Iterable[HeldPrefix]) -> None:
        """Raise PoolIntegrityError unless the index and the counts say what is held, and who uses it.

        ``users``: what each request has that uses one.
        """
        num_users = Counter(part for prefix in users for part in prefix.chain())
        num_unused, num_entries = dict.fromkeys(Mode, 0), dict.fromkeys(Mode, 0)
        num_children = num_behind = 0
        seen: set[HeldPrefix] = set()
        for prefix in self._idle:
            if prefix.parent in seen:
                raise PoolIntegrityError(
                    f"held prefix of room {prefix.holding.room}: would outlive its start"
                )
            seen.add(prefix)
        for prefix in self._prefixes:
            where, num_pages = f"held prefix of room {prefix.holding.room}", len(prefix.keys)
            kinds = dict.fromkeys((KV_POOL[prefix.mode], PoolKind.INDEX), num_pages * self._pools.page_size)
            if kinds != {kind: prefix.holding.num_slots(kind) for kind in prefix.holding.extents}:
                raise PoolIntegrityError(f"{where}: its slots are not {num_pages} pages")
            start_page = 0 if prefix.parent is None else prefix.parent.end_page
            if not num_pages or start_page + num_pages != prefix.end_page:
                raise PoolIntegrityError(f"{where}: {num_pages} pages from {start_page} to {prefix.end_page}")
            if prefix.parent is not None and prefix.parent not in self._prefixes:
                raise PoolIntegrityError(f"{where}: what is before it is not held")
            if any(child.parent is not prefix or child not in self._prefixes for child in prefix.children):
                raise PoolIntegrityError(f"{where}: what is behind it is not held, or behind another")
            num_children += len(prefix.children)
            num_behind += prefix.parent is not None
            if any(self._by_key[prefix.mode].get(key) is not prefix for key in prefix.keys):
                raise PoolIntegrityError(f"{where}: a page cannot be found")
            if prefix.num_users != num_users[prefix]:
                raise PoolIntegrityError(
                    f"{where}: {prefix.num_users} users counted, {num_users[prefix]} known"
                )
            is_unused = not prefix.num_users
            if is_unused is not (prefix in self._idle):
                raise PoolIntegrityError(f"{where}: unused {is_unused}, listed {prefix in self._idle}")
            num_entries[prefix.mode] += num_pages
            num_unused[prefix.mode] += num_pages * is_unused
        if num_children != num_behind:
            raise PoolIntegrityError(f"{num_behind} prefixes are behind others, which know {num_children}")
        num_found = {mode: len(by_key) for mode, by_key in self._by_key.items()}
        if (num_entries, num_unused) != (num_found, self._num_unused):
            raise PoolIntegrityError(
                f"held pages {num_entries}, unused {num_unused}, counted as {num_found}, {self._num_unused}"
            )
        if strays := num_users.keys() - self._prefixes:
            raise PoolIntegrityError(f"{len(strays)} prefixes are used and not held")

    def _ending_at(self, keys: Sequence[PageKey], mode: Mode) -> HeldPrefix:
        """The prefix that ends with the last of ``keys``: cut in two, if it goes on."""
        prefix = self._by_key[mode][keys[-1]]
        num_first = len(keys) - (prefix.end_page - len(prefix.keys))
        if num_first == len(prefix.keys):
            return prefix
        self._count(prefix, -1)
        first = HeldPrefix(
            mode,
            prefix.parent,
            len(keys),
            prefix.keys[:num_first],
            self._pools.split(prefix.holding, prefix.holding.extents, num_first * self._pools.page_size),
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

    def _join_chain(self, prefix: HeldPrefix) -> None:
        """Make runs of the prefixes up to ``prefix`` that nothing tells apart any more."""
        part: HeldPrefix | None = prefix
        while part is not None:
            before = part.parent
            while before is not None and len(before.children) == 1 and _use_of(before) == _use_of(part):
                self._join(before, part)
                before = part.parent
            part = before

    def _join(self, first: HeldPrefix, second: HeldPrefix) -> None:
        """``second``, which requests may have as theirs, takes the pages of ``first``, which none has."""
        self._by_key[first.mode].update(dict.fromkeys(first.keys, second))
        self._pools.join(first.holding, second.holding)
        second.keys = first.keys + second.keys
        second.parent = first.parent
        if first.parent is not None:
            first.parent.children.remove(first)
            first.parent.children.add(second)
        self._idle.pop(first, None)
        self._prefixes.remove(first)

    def _enter(self, prefix: HeldPrefix) -> None:
        if prefix.parent is not None:
            prefix.parent.children.add(prefix)
        self._prefixes.add(prefix)
        self._by_key[prefix.mode].update(dict.fromkeys(prefix.keys, prefix))

    def _count(self, prefix: HeldPrefix, sign: int) -> None:
        """Its pages into the sums, or out of them before its users or pages change."""
        num_pages = sign * len(prefix.keys)
        if prefix.num_users:
            return
        self._num_unused[prefix.mode] += num_pages
        if sign > 0:
            self._idle[prefix] = None
        else:
            del self._idle[prefix]

    def _touch(self, prefix: HeldPrefix) -> None:
        """It is the most recently used of those that nobody uses."""
        if prefix in self._idle:
            self._idle.move_to_end(prefix)

    def _cut(self, prefix: HeldPrefix, num_pages: int) -> None:
        """Keep the first ``num_pages`` pages of an idle prefix that nothing is behind; of none, nothing."""
        for key in prefix.keys[num_pages:]:
            del self._by_key[prefix.mode][key]
        num_gone = len(prefix.keys) - num_pages
        self._num_unused[prefix.mode] -= num_gone
        prefix.end_page -= num_gone
        del prefix.keys[num_pages:]
        if num_pages:
            self._pools.trim(prefix.holding, num_pages * self._pools.page_size)
        else:
            del self._idle[prefix]
            self._prefixes.discard(prefix)
            self._pools.release(prefix.holding)
            if prefix.parent is not None:
                prefix.parent.children.remove(prefix)
                for child in tuple(prefix.parent.children)[:1]:
                    self._join_chain(child)


def _use_of(prefix: HeldPrefix) -> tuple[int, int]:
    """Who uses a prefix uses the one before it, so that as many users of both are the same ones."""
    return prefix.num_users, prefix.last_used
