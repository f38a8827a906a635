"""The prefixes of a node: KV and indexer keys that requests share and that outlive them.

Both nodes' schedulers use it: ``find`` looks a prompt up, ``use`` and ``let_go`` count a request as a user,
``share`` and ``hold`` put a request's pages in, and ``make_room`` evicts before a reservation.

A ``Prefix``, here also called a run, has some whole pages and continues its ``parent``, so that runs form a
tree. Its ``kinds`` are the pools in which it has slots; prefixes of other kinds are trees of their own. A
run's chain is the run and its ancestors; their pages are the beginning of a sequence. A page is found by its
key (``prompt_keys.py``). A request that begins like a prefix in its pools reads the prefix's pages in place
and owns only the slots behind them. Pages in the tree are never written again: the caller adds a page once
all of its bytes are there and no remote write can land in it.

A request that uses a run is counted as a user of its whole chain. ``make_room`` evicts runs without users
before a reservation fails, from the ends of the least recently used ones.

A run with slots in the host pool may move down: it gives up its slots in all other pools, once main memory
has a copy of their bytes (``mark_stored``). It is found as before, and ``bring_up`` gives it slots again for
whoever uses it; the bytes are the caller's, as all bytes are (``held_tier.py`` copies them). ``make_room``
moves runs down where that helps, and evicts none there. The tree may also get pages that are down from the
start, or that are still on their way up (``hold``).

Runs are split and merged as their users need (``run_tree.py``). A sequence has at most MAX_RUNS runs: where
side branches keep runs from being merged, those used longest ago are evicted.

A prefix with wrong bytes is dropped together with its descendants (``drop``): no request finds them any more,
and each is freed when its last user and its children are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.extents import has_slot
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Kinds, Match, PageListener, Prefix, end_of
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.core.paging.run_integrity import check_runs
from hisparse_pd.core.paging.run_tree import RunTree

MAX_RUNS: Final = 64
"""Most runs of one sequence; each costs the loop some microseconds in every turn of a conversation."""
MAX_SIBLINGS: Final = 4
"""Most side branches that are evicted at once so that two runs can be merged."""


class PrefixTree:
    """All prefixes of a node. Each has a holding of ``pools`` in Stage.HELD, which only the tree changes."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._runs = RunTree(pools)
        self._num_events = 0
        """How often pages were added or let go of: the clock of ``Prefix.last_used``."""
        self.num_evicted_tokens = 0
        """Tokens that ``make_room`` has evicted since the engine's start."""
        self.num_moved_down_tokens = 0
        """Tokens that it has moved down."""

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._runs)

    @property
    def listener(self) -> PageListener | None:
        """Who is told of pages, set before the first page is added; None: nobody is."""
        return self._runs.listener

    @listener.setter
    def listener(self, listener: PageListener | None) -> None:
        self._runs.listener = listener

    @property
    def num_tokens(self) -> int:
        """All tokens that can be found, in use or not."""
        return sum(self._runs.num_pages.values()) * self._pools.page_size

    def num_tokens_in(self, kinds: Kinds) -> int:
        """Return the tokens that can be found in ``kinds``, in use or not."""
        return self._runs.num_pages.get(kinds, 0) * self._pools.page_size

    @property
    def num_forgotten_pages(self) -> int:
        """Pages since the start that can no longer be found. While it stays the same, so does what was found
        of a prompt, or more is found."""
        return self._runs.num_forgotten_pages

    @property
    def unused(self) -> SlotCounts:
        """Slots of prefixes without users: what ``make_room`` can free."""
        page_size = self._pools.page_size
        parts = (SlotCounts.of(pools, num * page_size) for pools, num in self._runs.idle.num_pages.items())
        return sum(parts, SlotCounts())

    def find(self, keys: Sequence[PageKey], kinds: Kinds) -> Match | None:
        """Return the longest beginning of ``keys`` that is held in ``kinds``, or None if not even one page
        is."""
        return self._runs.find(keys, kinds)

    def num_found(self, keys: Sequence[PageKey], kinds: Kinds) -> int:
        """Return how many pages the longest beginning of ``keys`` has that is held in ``kinds``."""
        found = self.find(keys, kinds)
        return 0 if found is None else found.num_pages

    def num_prefilled(self, keys: Sequence[PageKey], kinds: Kinds) -> int:
        """Return how many of the pages of ``keys``, which are all held, come before the first stepped one."""
        return self._runs.num_prefilled(keys, kinds)

    def use(self, keys: Sequence[PageKey], kinds: Kinds) -> Prefix:
        """Count one more user of the pages of ``keys``, which are all held, until it calls ``let_go``.

        Returns the prefix that ends with the last of them.
        """
        prefix = self._runs.ending_with(keys, kinds)
        self.use_run(prefix)
        return prefix

    def use_if_any(self, keys: Sequence[PageKey], kinds: Kinds) -> Prefix | None:
        """Do ``use`` if there are any ``keys``; otherwise return None."""
        return self.use(keys, kinds) if keys else None

    def use_stored(self, keys: Sequence[PageKey], kinds: Kinds) -> Prefix:
        """Do ``use`` for pages that are to be read from main memory alone, which has all of their bytes. Runs
        that nobody else uses move down."""
        prefix = self._runs.ending_with(keys, kinds)
        for part in prefix.chain():
            if not part.num_users and not part.is_down:
                self._move_down(part)
        self.use_run(prefix)
        return prefix

    def use_run(self, prefix: Prefix) -> None:
        """Count one more user of ``prefix``, which is in the tree, until it calls ``let_go``."""
        for part in prefix.chain():
            self._runs.set_num_users(part, part.num_users + 1)

    def let_go(self, prefix: Prefix | None, *, keeps: bool = True) -> None:
        """Count one user fewer of ``prefix``; None: of nothing. What has no users then is kept, or else
        evicted."""
        if prefix is None:
            return
        self._num_events += 1
        for part in prefix.chain():
            self._runs.set_num_users(part, part.num_users - 1)
            part.last_used = self._num_events
        self._runs.merge_chain(prefix)
        for part in tuple(prefix.chain()):
            self._runs.evict_if_dropped(part)
            if not (keeps or part.num_users or part.children or part.is_dropped):
                self._runs.evict(part, len(part.keys))
        self._pools.num_changes += 1  # ``make_room`` may evict more now, so a failed reservation may succeed

    def share(
        self,
        holding: Holding,
        keys: Sequence[PageKey],
        kinds: Kinds,
        before: Prefix | None,
        *,
        keeps_copies: bool = False,
        token_ids: bytes | None = None,
    ) -> Prefix | None:
        """Do ``hold`` for the pages of a request, and count the request as a user of all held pages
        of ``keys``.

        ``before``: the prefix that the request has used until now. Returns the one that it uses from now on.
        ``keeps_copies``, ``token_ids``: see ``hold``.
        """
        num_before = end_of(before)
        num_held = self.hold(holding, keys, kinds, num_before, keeps_copies=keeps_copies, token_ids=token_ids)
        prefix = self.use_if_any(keys[:num_held], kinds)
        self.let_go(before)
        return prefix

    def hold(
        self,
        holding: Holding,
        keys: Sequence[PageKey],
        kinds: Kinds,
        num_before: int = 0,
        *,
        keeps_copies: bool = False,
        token_ids: bytes | None = None,
        num_prefilled: int | None = None,
        is_down: bool = False,
        is_arriving: bool = False,
    ) -> int:
        """Move the first pages of ``holding`` in ``kinds``, whose keys are ``keys[num_before:]``, into the
        tree. The pages of ``keys[:num_before]`` must be held.

        Where the tree has a page already, the holding's copy of it is freed. With ``keeps_copies`` the copy
        stays in the holding, because writes in flight still read it. ``token_ids``: the packed ids of all
        pages of ``keys``, for the listener; None: it is not told of them. ``num_prefilled``: pages of
        ``keys`` before the first stepped one; None: none is stepped.

        ``is_down``: the pages are those of a run that has moved down: the holding has their slots of the host
        pool, and main memory all else. ``is_arriving``: their bytes are on their way, and the caller, who
        uses them at once, will call ``mark_arrived``; they become a run of their own in any case.

        Returns how many of ``keys`` are held then: all of them, or ``num_before`` where the sequence would
        get too many runs. Raises PoolIntegrityError."""
        if len(keys) <= num_before:
            return len(keys)
        if not is_arriving and not self.fit_one_more_run(keys, kinds):
            return num_before
        found = self.find(keys, kinds)
        num_found = 0 if found is None else found.num_pages
        if num_found < num_before:
            raise PoolIntegrityError(f"room {holding.room}: the pages before its own are not held")
        parent = self._runs.ending_with(keys[:num_found], kinds) if num_found else None
        pools = (PoolKind.HOST,) if is_down else kinds
        copies = self._split_pages(holding, pools, num_found - num_before)  # of pages in the tree
        added = self._split_pages(holding, pools, len(keys) - num_found)
        self._num_events += 1
        last = parent
        if added is not None:
            last = Prefix(
                kinds,
                parent,
                end_page=len(keys),
                keys=list(keys[num_found:]),
                holding=added,
                is_stored=is_down,
                is_arriving=is_arriving,
            )
            self._runs.add(last)
            if num_prefilled is not None:
                self._runs.mark_stepped(keys[max(num_found, num_prefilled) :], kinds)
            if token_ids is not None:
                self._runs.report(last, token_ids)
        if copies is not None and keeps_copies:
            self._pools.join(copies, holding)
        elif copies is not None:
            self._pools.release(copies)
        if last is not None:
            for part in last.chain():
                part.last_used = self._num_events
            self._runs.touch_chain(last)
            self._runs.merge_chain(last)
        return len(keys)

    def fit_one_more_run(self, keys: Sequence[PageKey], kinds: Kinds) -> bool:
        """Evict side branches of the chain that holds ``keys`` until it can get one more run within MAX_RUNS.

        Without its side branches a run is merged with its parent. The branches used longest ago go first.
        Returns whether the run fits.
        """
        while (found := self.find(keys, kinds)) is not None:
            chain = list(found.prefix.chain())
            is_split = found.num_pages < found.prefix.end_page
            if len(chain) + is_split < MAX_RUNS:
                return True
            branches = [siblings for part in chain if (siblings := self._evictable_siblings(part))]
            if not branches:
                return False
            for sibling in min(branches, key=lambda siblings: max(run.last_used for run in siblings)):
                self._runs.evict(sibling, len(sibling.keys))
        return True

    def make_room(self, need: SlotCounts) -> None:
        """Make ``need`` free: move unused runs down, or evict as few unused pages as that takes where moving
        does not help; least recently used first.

        Where they are too few, all that could help are evicted.
        """
        page_size = self._pools.page_size
        while True:  # each round evicts from one run, and so may change which pools lack pages
            free = self._pools.free
            if need.fits_in(free):
                return
            missing_pages = {kind: -(-(need[kind] - free[kind]) // page_size) for kind in PoolKind}
            helpful = {kind for kind, num_pages in missing_pages.items() if num_pages > 0}
            movable = [run for run in self._runs.idle.firsts() if run.is_stored and not run.is_down]
            gained = helpful & {kind for run in movable for kind in run.pools if kind is not PoolKind.HOST}
            # Eviction comes first: it frees slots of all pools of a run, and may leave nothing to be moved.
            victim = self._runs.idle.oldest(helpful - gained)
            if victim is None and gained:
                self._move_down(next(run for run in movable if not gained.isdisjoint(run.pools)))
                continue
            if victim is None:
                return
            num_pages = min(len(victim.keys), max(missing_pages[kind] for kind in victim.pools))
            while victim.children:
                # They are idle, too, and older, so they have no slots that could help: they have moved down,
                # which their parent cannot, because its copy has failed. They go first, and whole.
                victim = next(iter(victim.children))
                num_pages = len(victim.keys)
            self.num_evicted_tokens += num_pages * page_size
            self._runs.evict(victim, num_pages)

    def mark_stored(self, prefix: Prefix, first_page: int) -> None:
        """Note that main memory has a copy of what the runs of a chain, from page ``first_page`` on, have in
        other pools than the host pool. A run must have slots there, and begin at that page."""
        for part in prefix.chain():
            if part.start_page >= first_page:
                part.is_stored = True

    def bring_up(self, prefix: Prefix) -> list[Prefix]:
        """Give the runs of a chain that have moved down slots again in all of their pools. Returns these
        runs, which are ``is_arriving`` until the caller, who uses the chain, calls ``mark_arrived``.

        Raises PoolExhausted.
        """
        missing = [kind for kind in prefix.kinds if kind is not PoolKind.HOST]
        num_pages = sum(len(part.keys) for part in prefix.chain() if part.is_down)
        self.make_room(SlotCounts.of(missing, num_pages * self._pools.page_size))
        # These are listed now: where a run beside the chain was evicted, two of the chain may be one.
        down = [part for part in prefix.chain() if part.is_down]
        for part in down:
            for kind in missing:
                self._pools.grow(part.holding, kind, len(part.keys) * self._pools.page_size)
            part.is_arriving = True
        return down

    def take_down(self, runs: Iterable[Prefix]) -> None:
        """Undo ``bring_up``, which has returned ``runs``: their bytes do not come."""
        for run in runs:
            self._runs.keep_host_slots(run)
            run.is_arriving = False

    def mark_arrived(self, prefix: Prefix) -> None:
        """Note that all runs of a chain have their bytes again in all of their pools."""
        for part in prefix.chain():
            part.is_arriving = False

    def is_up(self, keys: Sequence[PageKey], kinds: Kinds) -> bool:
        """Whether none of the pages of ``keys`` that are held has moved down, or is arriving."""
        found = self.find(keys, kinds)
        return found is None or not any(run.is_down or run.is_arriving for run in found.prefix.chain())

    def flush(self) -> None:
        """Evict everything without users."""
        while (prefix := self._runs.idle.oldest()) is not None:
            self._runs.evict(prefix, len(prefix.keys))
        if self.listener is not None and not self.num_tokens:
            self.listener.emptied()

    def drop(self, kind: PoolKind, slot: int) -> None:
        """Make the prefix that has ``slot``, and its descendants, impossible to find, because the slot's
        bytes are wrong."""
        owner = next((run for run in self._runs if has_slot(run.holding[kind], slot)), None)
        if owner is not None:
            self._runs.drop(owner)

    def drop_copies(self, key: PageKey) -> None:
        """Do ``drop`` for the page of ``key`` in all pools: what is wrong in one may have been copied."""
        for owner in self._runs.runs_with(key):
            self._runs.drop(owner)

    def num_condemned(self) -> dict[Prefix, int]:
        """Return how many pages of each dropped prefix are set aside, and not free, once they are freed."""
        condemned = self._pools.condemned
        dropped = [run for run in self._runs if run.is_dropped] if condemned else []
        return {run: sum(has_slot(run.holding[kind], start) for kind, start in condemned) for run in dropped}

    def check_integrity(self, users: Iterable[Prefix]) -> None:
        """Raise PoolIntegrityError unless the tree is in order and knows its users: ``users``, the prefix of
        each request that uses one."""
        check_runs(self._runs, users, self._pools.page_size)

    def _split_pages(self, holding: Holding, kinds: Kinds, num_pages: int) -> Holding | None:
        return self._pools.split(holding, kinds, num_pages * self._pools.page_size) if num_pages else None

    def _move_down(self, prefix: Prefix) -> None:
        """Give up the slots of an idle, stored prefix in all pools but the host pool."""
        self._runs.keep_host_slots(prefix)
        self.num_moved_down_tokens += len(prefix.keys) * self._pools.page_size

    def _evictable_siblings(self, part: Prefix) -> list[Prefix]:
        """Return the siblings of ``part`` if all can be evicted, so that ``part`` and its parent are merged;
        otherwise return none."""
        parent = part.parent
        if parent is None or len(parent.children) > 1 + MAX_SIBLINGS or not part.is_mergeable_with_parent():
            return []
        siblings = [child for child in parent.children if child is not part]
        return siblings if all(run in self._runs.idle and not run.children for run in siblings) else []
