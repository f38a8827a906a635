"""The runs of all prefixes of a node: how they are linked, which page each has, and which are idle.

``PrefixTree`` (``prefix_tree.py``) has a ``RunTree`` and decides what is added, moved and evicted. It calls
one function here for each such change, which keeps the run's links, keys and slots, the index of pages and
the order of idle runs in agreement. ``run_integrity.py`` checks that they agree.

A run is split where a request uses only part of it. A run and its only child are merged when the same
requests use both, or last used both: a conversation that grew by a page a turn is one run.

A page may be noted as *stepped*: its KV is rounded as in decode steps, at least in part (``num_prefilled``).

A ``listener`` is told of each page that can be found, and when it no longer can be, if whoever adds the page
gives its token ids.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import repeat

from hisparse_pd.core.paging.idle_runs import IdleRuns
from hisparse_pd.core.paging.pools import PoolKind, Pools
from hisparse_pd.core.paging.prefix import Kinds, Match, PageListener, Prefix
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.protocol.messages import TOKEN_BYTES


class RunTree:
    """The runs of all kinds. Only the tree changes their links and keys, and their slots in ``pools``."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._runs: dict[Prefix, None] = {}
        self._by_key: dict[Kinds, dict[PageKey, Prefix]] = {}
        """The run that has each page. Where a page is in it, so are all pages before it: ``find`` bisects."""
        self._stepped: dict[Kinds, set[PageKey]] = {}
        """Pages that are noted as stepped."""
        self.idle = IdleRuns()
        """Runs without users; descendants were touched before their ancestors."""
        self.listener: PageListener | None = None
        """Set before the first page is added; None: nobody is told of pages."""
        self.num_forgotten_pages = 0
        """Pages since the start that can no longer be found: evicted ones, and dropped ones."""

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._runs)

    def __contains__(self, run: Prefix) -> bool:
        return run in self._runs

    # --- pages ---------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> dict[Kinds, int]:
        """The pages that can be found, in use or not, by the kinds of their runs."""
        return {kinds: len(by_key) for kinds, by_key in self._by_key.items()}

    def run_with(self, key: PageKey, kinds: Kinds) -> Prefix | None:
        """Return the run in ``kinds`` in which the page of ``key`` is found, or None."""
        return self._by_key.get(kinds, {}).get(key)

    def runs_with(self, key: PageKey) -> list[Prefix]:
        """Return the runs of all kinds in which the page of ``key`` is found."""
        return [by_key[key] for by_key in self._by_key.values() if key in by_key]

    def find(self, keys: Sequence[PageKey], kinds: Kinds) -> Match | None:
        """See ``PrefixTree.find``."""
        by_key = self._by_key.get(kinds, {})
        if not keys or keys[0] not in by_key:
            return None
        num_pages = len(keys)
        if keys[-1] not in by_key:
            num_pages = bisect_left(keys, True, key=lambda key: key not in by_key)
        return Match(by_key[keys[num_pages - 1]], num_pages)

    def num_prefilled(self, keys: Sequence[PageKey], kinds: Kinds) -> int:
        """See ``PrefixTree.num_prefilled``."""
        stepped = self._stepped.get(kinds, set())
        if stepped.isdisjoint(keys):  # asked first, because it is mostly so, and takes a tenth of the time
            return len(keys)
        return next(number for number, key in enumerate(keys) if key in stepped)

    def mark_stepped(self, keys: Sequence[PageKey], kinds: Kinds) -> None:
        """Note that the pages of ``keys``, which were just added, are stepped."""
        self._stepped.setdefault(kinds, set()).update(keys)

    def report(self, run: Prefix, token_ids: bytes) -> None:
        """Tell the listener of a run that was just added. ``token_ids``: packed, those of all pages up to the
        end of the run."""
        if self.listener is None:
            return
        run.is_reported = True
        page_bytes = self._pools.page_size * TOKEN_BYTES
        own_ids = token_ids[run.start_page * page_bytes : run.end_page * page_bytes]
        before = None if run.parent is None else run.parent.keys[-1]
        self.listener.stored(run.kinds, before, tuple(run.keys), own_ids)

    def _forget_keys(self, run: Prefix, keys: Sequence[PageKey]) -> None:
        self.num_forgotten_pages += len(keys)
        by_key = self._by_key[run.kinds]
        for key in keys:
            del by_key[key]
        if (stepped := self._stepped.get(run.kinds)) is not None:
            stepped.difference_update(keys)
        if run.is_reported and self.listener is not None:
            self.listener.removed(run.kinds, tuple(keys))

    # --- users ---------------------------------------------------------------------------------------

    def set_num_users(self, run: Prefix, num_users: int) -> None:
        """Change the number of users; a run that loses its last one is the most recently used idle one."""
        was_idle, is_idle = not run.num_users, not num_users
        run.num_users = num_users
        if was_idle and not is_idle:
            self.idle.discard(run)
        elif is_idle and not was_idle:
            self.idle.touch(run)

    def touch_chain(self, run: Prefix) -> None:
        """Make the idle runs of a chain the most recently used, in the order that ``idle`` keeps."""
        for part in run.chain():
            if part in self.idle:
                self.idle.touch(part)

    # --- links ---------------------------------------------------------------------------------------

    def add(self, run: Prefix) -> None:
        """Link a new run to its parent, which ends where it starts, and index its pages."""
        if run.parent is not None:
            run.parent.children.add(run)
        self._runs[run] = None
        self._by_key.setdefault(run.kinds, {}).update(zip(run.keys, repeat(run), strict=False))
        if not run.num_users:
            self.idle.touch(run)

    def ending_with(self, keys: Sequence[PageKey], kinds: Kinds) -> Prefix:
        """Return the run that ends with the last page of ``keys``. A run that goes on behind this page is
        split: the new first part is returned, and the second part stays the run that its users refer to."""
        second = self._by_key[kinds][keys[-1]]
        num_first = len(keys) - second.start_page
        if num_first == len(second.keys):
            return second
        holding = self._pools.split(second.holding, second.pools, num_first * self._pools.page_size)
        first = Prefix(
            kinds,
            second.parent,
            end_page=len(keys),
            keys=second.keys[:num_first],
            holding=holding,
            num_users=second.num_users,
            last_used=second.last_used,
            children={second},
            is_reported=second.is_reported,
            is_stored=second.is_stored,
            is_arriving=second.is_arriving,
        )
        if second.parent is not None:
            second.parent.children.remove(second)
        second.parent, second.keys = first, second.keys[num_first:]
        self.add(first)
        self.touch_chain(second)
        return first

    def merge_chain(self, run: Prefix) -> None:
        """Merge each run of the chain with its parent if it is the only child and
        ``is_mergeable_with_parent``."""
        part: Prefix | None = run
        while part is not None:
            while (parent := part.parent) and len(parent.children) == 1 and part.is_mergeable_with_parent():
                self._merge(parent, part)
            part = part.parent

    def _merge(self, first: Prefix, second: Prefix) -> None:
        """Move the pages of ``first`` into its child ``second``, which is the one that requests refer to."""
        if not first.is_dropped:
            self._by_key[first.kinds].update(zip(first.keys, repeat(second), strict=False))
        self._pools.join(first.holding, second.holding)
        second.keys = first.keys + second.keys
        second.parent = first.parent
        if first.parent is not None:
            first.parent.children.remove(first)
            first.parent.children.add(second)
        self.idle.discard(first)
        self.idle.changed(second)
        del self._runs[first]

    # --- ends ----------------------------------------------------------------------------------------

    def keep_host_slots(self, run: Prefix) -> None:
        """Free the slots of a run in all pools but the host pool."""
        self._pools.give_up(run.holding, [kind for kind in run.pools if kind is not PoolKind.HOST])
        self.idle.changed(run)

    def evict(self, run: Prefix, num_pages: int) -> None:
        """Free the last ``num_pages`` pages of an idle run that has no children. If these are all of its
        pages, the run itself is gone."""
        num_left = len(run.keys) - num_pages
        if not run.is_dropped:
            self._forget_keys(run, run.keys[num_left:])
        run.end_page -= num_pages
        del run.keys[num_left:]
        if num_left:
            self._pools.trim(run.holding, num_left * self._pools.page_size)
            self.idle.changed(run)
            return
        self.idle.discard(run)
        del self._runs[run]
        self._pools.release(run.holding)
        if (parent := run.parent) is not None:
            parent.children.remove(run)
            if len(parent.children) == 1:
                self.merge_chain(next(iter(parent.children)))

    def drop(self, owner: Prefix) -> None:
        """Make a run and its descendants impossible to find. Each is freed once it has neither users nor
        children."""
        if owner.is_dropped:
            return
        subtree = [owner]
        for run in subtree:  # grows while it is walked
            subtree += run.children
        for run in subtree:
            if not run.is_dropped:
                self._forget_keys(run, run.keys)
                run.is_dropped = True
        for run in reversed(subtree):
            self.evict_if_dropped(run)

    def evict_if_dropped(self, run: Prefix) -> None:
        """Evict a dropped run that has neither users nor children. The caller tries descendants first."""
        if run.is_dropped and not run.num_users and not run.children:
            self.evict(run, len(run.keys))
