"""The host tier of the prefix cache: pages that stay in main memory when the device needs their slots.

``PromptPages`` calls ``store`` for a prompt that was computed whole and sent, and ``fetch`` for a waiting
request, the engine ``poll`` in each turn of its loop. A page is copied down once, as soon as the request that
computed it has ended, and stays in the cache on the device, too, until that evicts it. A waiting request
whose prompt main memory has more of than the device waits for a copy up; then it finds the pages in the cache
on the device, as any others.

Both levels are prefixes of one ``PrefixTree``, of different kinds. ``HostTier`` owns the copies under way,
with the slots that they write. Prefixes that were fetched stay in use until their request begins or ends
(``pins.py``). Main memory gives up first what was used longest ago, as the device does.

Fetched rows are verified behind the copy, before anybody finds them. A wrong one is counted, its page in main
memory is set aside, and the request computes from there on.

Below it there may be the cluster's store (``store_tier.py``), which brings pages to main memory and gets
those that were copied down. A page that came wrong from there is removed there, and not set aside here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from hisparse_pd.core.model.side_stream import CopyFailed, is_over
from hisparse_pd.core.paging.extents import extents_to_page_ids, extents_to_pages, slice_extents
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Kinds, Prefix, end_of
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import PageRows, WrongItem, rows_of_pages
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.store_tier import StoreTier
from hisparse_pd.prefill_node.store_writes import HOST_POOLS as HOST_POOLS
from hisparse_pd.protocol.messages import FetchedTokens, Room

log = logging.getLogger(__name__)

CACHE_POOLS: Final = (PoolKind.DEVICE,)
"""The pools of a cached prefix. Its indexer keys are in the same pages of the index pool, which needs no
allocator of its own."""


class RowChecks(Protocol):
    """Verifies rows of the device's pool, as ``PrefillMemory`` does."""

    def begin_check(self, pages: PageRows, page_size: int) -> Tensor: ...

    def wrong_items(self, pages: PageRows, page_size: int) -> list[WrongItem]: ...


@dataclass(eq=False, slots=True)
class _Copy:
    """Pages on their way to the pools ``kinds``: those of ``keys`` behind what ``before`` has there."""

    room: Room
    """The request that it is for, or that computed the pages."""
    kinds: Kinds
    keys: Sequence[PageKey]
    holding: Holding
    """The slots that are written, those of as many pages."""
    source: Prefix
    """The prefix that is copied, in use until then. It ends where ``keys`` end."""
    before: Prefix | None
    """The prefix that the destination has before these pages; in use, too."""
    token_ids: bytes | None
    """See ``PrefixTree.hold``."""
    is_behind: torch.cuda.Event | None = None
    """The copy's end; None: it is over."""
    is_wrong: list[Tensor] = field(default_factory=list)
    """Of a copy up, once it is over: what ``begin_check`` has found."""

    @property
    def num_pages(self) -> int:
        return len(self.keys) - end_of(self.before)

    def rows(self, page_size: int) -> PageRows:
        """Return the rows that a copy up writes."""
        page_ids = extents_to_page_ids(self.holding[PoolKind.DEVICE], page_size)
        return rows_of_pages(page_ids, page_size, end_of(self.before) * page_size, len(self.keys) * page_size)


@dataclass(eq=False, slots=True)
class _Fetch:
    """A request that waits for a copy, or for its turn after it."""

    first_page: int
    """The first page of its prompt that the copy brings."""
    has_arrived: bool = False
    num_arrived_pages: int = 0
    """Pages that the copy has brought, whether they are still there or not."""


class HostTier:
    """Pages in main memory below the prefix cache of one engine. ``pages``: None if it keeps none there;
    then nothing is ever stored or fetched.

    ``checks``: verify rows. ``fresh``: learns which pages were. ``store``: the tier below, if there is one.
    """

    def __init__(
        self,
        pages: HostPages | None,
        pools: Pools,
        prefixes: PrefixTree,
        set_aside: SetAside,
        checks: RowChecks,
        fresh: FreshPages,
        store: StoreTier | None = None,
    ) -> None:
        self._pages = pages
        self._pools = pools
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._checks = checks
        self._fresh = fresh
        self.store_tier = store
        self._copies: list[_Copy] = []
        self.pins = Pins(prefixes)
        self._fetches: dict[Room, _Fetch] = {}
        self.num_stored_tokens = 0
        """Tokens that were copied down since the start."""
        self.num_fetched_tokens = 0
        """Tokens that were copied up since the start, and were right."""

    @property
    def num_copies(self) -> int:
        """Copies under way."""
        return len(self._copies)

    @property
    def num_landing(self) -> int:
        """Holdings in Stage.LANDING: one of each copy, and those that the store reads into."""
        return len(self._copies) + (0 if self.store_tier is None else self.store_tier.num_landing)

    @property
    def num_quarantined(self) -> int:
        """Holdings in Stage.QUARANTINED."""
        return 0 if self.store_tier is None else self.store_tier.num_quarantined

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that copies, pins and the store use, once for each use."""
        for copy in self._copies:
            yield copy.source
            if copy.before is not None:
                yield copy.before
        yield from self.pins.users()
        if self.store_tier is not None:
            yield from self.store_tier.users()

    # --- down ----------------------------------------------------------------------------------------

    def store(self, room: Room, keys: Sequence[PageKey], token_ids: bytes | None = None) -> None:
        """Begin to copy down the pages of ``keys`` that the device has and main memory lacks: as many as it
        can make room for. ``token_ids``: see ``PrefixTree.hold``."""
        if self._pages is None:
            return
        num_cached = self._prefixes.num_found(keys, CACHE_POOLS)
        num_stored = self._prefixes.num_found(keys[:num_cached], HOST_POOLS)
        page_size = self._pools.page_size
        most = self._set_aside.num_usable_pages(PoolKind.HOST) - num_stored
        num_pages = min(num_cached - num_stored, most)
        if num_pages <= 0 or self._is_coming(keys, num_stored, HOST_POOLS):
            return
        before = self._prefixes.use_if_any(keys[:num_stored], HOST_POOLS)
        self._prefixes.make_room(SlotCounts(host=num_pages * page_size))
        num_pages = min(num_pages, self._pools.free.host // page_size)
        if num_pages == 0:  # all is in use
            self._prefixes.let_go(before)
            return
        source = self._prefixes.use(keys[: num_stored + num_pages], CACHE_POOLS)
        self._begin(room, HOST_POOLS, keys[: num_stored + num_pages], source, before, token_ids)

    # --- up ------------------------------------------------------------------------------------------

    def fetch(
        self, room: Room, keys: Sequence[PageKey], num_pages: int, token_ids: bytes | None = None
    ) -> bool:
        """Begin to copy up the pages of ``keys`` that main memory has and the device lacks, after those that
        the store has were read. Returns whether the request should wait: for the store, for this copy, or for
        another one with its pages.

        ``room``, ``num_pages``: the waiting request's, which needs so many pages on the device in all. For
        one that has no room there nothing is begun: it waits for pages in any case. ``token_ids``: see
        ``PrefixTree.hold``.
        """
        if self._pages is None:
            return False
        if (fetch := self._fetches.get(room)) is not None:
            return not fetch.has_arrived
        num_cached = self._prefixes.num_found(keys, CACHE_POOLS)
        if self.store_tier is not None and self.store_tier.fetch(room, keys, num_cached, token_ids):
            return True
        num_stored = self._prefixes.num_found(keys, HOST_POOLS)
        if num_stored <= num_cached:
            return False
        if self._is_coming(keys, num_cached, CACHE_POOLS):
            return True
        page_size = self._pools.page_size
        if not self.pins.fits(room, num_pages, self._set_aside.num_usable_pages(PoolKind.DEVICE)):
            return bool(self.pins)
        before = self._prefixes.use_if_any(keys[:num_cached], CACHE_POOLS)
        need = SlotCounts(device=(num_stored - num_cached) * page_size)
        if not need.fits_in(self._pools.free + self._prefixes.unused):
            self._prefixes.let_go(before)
            return False
        source = self._prefixes.use(keys[:num_stored], HOST_POOLS)
        self._prefixes.make_room(need)
        fetch = self._fetches[room] = _Fetch(end_of(before))
        if not self._begin(room, CACHE_POOLS, keys[:num_stored], source, before, token_ids):
            fetch.has_arrived = True  # nothing has, and the request computes all of it
            return False
        self.pins.put(room, num_pages)
        return True

    def fetched(self, room: Room, num_pages: int) -> FetchedTokens:
        """Return how many tokens of the first ``num_pages`` pages of a request's prompt, which are on the
        device, were copied up for it, and how many of them the store had brought."""
        fetch = self._fetches.get(room)
        num_fetched = 0
        if fetch is not None:
            num_fetched = min(max(0, num_pages - fetch.first_page), fetch.num_arrived_pages)
        first_brought = None if self.store_tier is None else self.store_tier.first_brought(room)
        num_brought = 0
        if fetch is not None and first_brought is not None:  # what the store brings comes behind all others
            num_brought = min(num_fetched, max(0, fetch.first_page + num_fetched - first_brought))
        page_size = self._pools.page_size
        return FetchedTokens((num_fetched - num_brought) * page_size, num_brought * page_size)

    def release(self, room: Room) -> None:
        """Let go of what was fetched for a request, which begins or ends."""
        self._fetches.pop(room, None)
        self.pins.release(room)
        if self.store_tier is not None:
            self.store_tier.release(room)

    def unpin(self) -> bool:
        """Let go of all that has arrived, once no copy is under way. Returns whether anything was let go.

        The engine calls it when nothing can be computed: a request in front may need what is kept for one
        behind it. Nothing is fetched twice for a request, so one that finds it evicted computes it.
        """
        return not self._copies and self.pins.let_go_all()

    # --- copies --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Put the pages of copies that are over into the tree, and those that the store has read."""
        if self.store_tier is not None:
            self.store_tier.poll()
        for copy in [copy for copy in self._copies if is_over(copy.is_behind)]:
            self._copies.remove(copy)
            if copy.kinds == HOST_POOLS:
                # What was found wrong on the device may have been copied before or after it changed.
                num_right = 0 if copy.source.is_dropped else copy.num_pages
                num_kept = self._keep(copy, num_right)
                self.num_stored_tokens += num_kept * self._pools.page_size
                if self.store_tier is not None and num_kept:
                    first = end_of(copy.before)
                    self.store_tier.put(copy.keys[: first + num_kept], first)
            else:
                num_kept = self._keep(copy, self._num_right_pages(copy))
                self.num_fetched_tokens += num_kept * self._pools.page_size
                self._pin_arrived(copy, num_kept)
            self._pools.release(copy.holding)
            self._prefixes.let_go(copy.source)
            self._prefixes.let_go(copy.before)

    def settle(self) -> None:
        """Wait until all copies are over, which takes some milliseconds, and do ``poll``: they use nothing
        any more."""
        if self._pages is not None and self._copies:
            self._pages.settle()
            self.poll()

    def _begin(
        self,
        room: Room,
        kinds: Kinds,
        keys: Sequence[PageKey],
        source: Prefix,
        before: Prefix | None,
        token_ids: bytes | None,
    ) -> bool:
        """Begin a copy to ``kinds``, which uses ``source`` and ``before`` until it is over. Returns whether
        it could begin; if not, nobody uses them for it any more."""
        first = end_of(before)
        page_size = self._pools.page_size
        holding = self._pools.reserve(room, SlotCounts.of(kinds, (len(keys) - first) * page_size))
        (from_kind,), (to_kind,) = source.kinds, kinds
        assert self._pages is not None
        if self.store_tier is not None and kinds == HOST_POOLS:
            self.store_tier.forget(extents_to_pages(holding[to_kind], page_size))
        src = slice_extents(source.extents(from_kind), first * page_size, len(keys) * page_size)
        copy = _Copy(room, kinds, keys, holding, source, before, token_ids)
        try:
            if kinds == HOST_POOLS:
                copy.is_behind = self._pages.copy_down(src, holding[to_kind])
            else:
                verify = partial(self._begin_check, copy)
                copy.is_behind = self._pages.copy_up(src, holding[to_kind], behind=verify)
        except CopyFailed as error:
            log.error("pages of room %d are not copied to the %s pool: %s", room, to_kind, error)
            self._pools.release(holding)
            self._prefixes.let_go(source)
            self._prefixes.let_go(before)
            return False
        self._copies.append(copy)
        return True

    def _begin_check(self, copy: _Copy) -> None:
        page_size = self._pools.page_size
        copy.is_wrong.append(self._checks.begin_check(copy.rows(page_size), page_size))

    def _keep(self, copy: _Copy, num_pages: int) -> int:
        """Put the first pages of a copy into the tree, unless a page before them has been found wrong
        meanwhile. Returns how many."""
        if num_pages == 0 or (copy.before is not None and copy.before.is_dropped):
            return 0
        first = end_of(copy.before)
        keys = copy.keys[: first + num_pages]
        if copy.kinds == CACHE_POOLS:
            page_ids = extents_to_page_ids(copy.holding[PoolKind.DEVICE], self._pools.page_size)
            self._fresh.note(page_ids[:num_pages])
        num_kept = self._prefixes.hold(copy.holding, keys, copy.kinds, first, token_ids=copy.token_ids)
        return num_kept - first

    def _num_right_pages(self, copy: _Copy) -> int:
        """Return the number of pages that were copied up before the first with a wrong row, whose page in
        main memory is set aside, or removed from the store if it came from there."""
        page_size = self._pools.page_size
        first = end_of(copy.before) * page_size
        num_right = copy.num_pages
        host = copy.source.extents(PoolKind.HOST)
        wrong_in_store: dict[PageKey, None] = {}
        is_wrong = any(found.item() for found in copy.is_wrong)
        for item in self._checks.wrong_items(copy.rows(page_size), page_size) if is_wrong else ():
            at = item.position
            item = item._replace(slot=slice_extents(host, at, at + 1)[0].start)
            if self.store_tier is not None and self.store_tier.is_unverified(item.slot // page_size):
                self._set_aside.drop_wrong_row("store", PoolKind.HOST, item)
                wrong_in_store[copy.keys[at // page_size]] = None
            else:
                self._set_aside.record_wrong_row("host", PoolKind.HOST, item)
            num_right = min(num_right, (at - first) // page_size)
        if self.store_tier is not None:
            right = slice_extents(host, first, first + num_right * page_size)
            self.store_tier.forget(extents_to_pages(right, page_size))
            if wrong_in_store:
                self.store_tier.remove(tuple(wrong_in_store))
        return num_right

    def _pin_arrived(self, copy: _Copy, num_kept: int) -> None:
        """Keep what the copy's request now finds on the device, if it still waits. ``num_kept``: pages of the
        copy that are right."""
        if (fetch := self._fetches.get(copy.room)) is not None:
            fetch.has_arrived = True
            fetch.num_arrived_pages = num_kept
            found = copy.keys[: self._prefixes.num_found(copy.keys, CACHE_POOLS)]
            self.pins.keep(copy.room, self._prefixes.use_if_any(found, CACHE_POOLS))

    def _is_coming(self, keys: Sequence[PageKey], number: int, kinds: Kinds) -> bool:
        """Whether a copy under way brings page ``number`` of ``keys`` to ``kinds``."""
        return any(
            copy.kinds == kinds
            and end_of(copy.before) <= number < len(copy.keys)
            and copy.keys[number] == keys[number]
            for copy in self._copies
        )
