"""The host tier of the prefix cache: pages that stay in main memory when the device needs their slots.

``PromptPages`` calls ``store`` for a prompt that was computed whole and sent, and ``fetch`` for a waiting
request, the engine ``poll`` in each turn of its loop. A page is copied down once, as soon as the request that
computed it has ended, and stays in the cache on the device, too, until that evicts it. Where main memory has
more of a waiting request's prompt than the device, the rest is copied up (``copies_up.py``), and is found in
the cache on the device at once.

Both levels are prefixes of one ``PrefixTree``, of different kinds. ``HostTier`` owns the copies down and
decides what is copied up. Main memory gives up first what was used longest ago, as the device does.

Below it there may be the cluster's store (``store_tier.py``), which brings pages to main memory and gets
those that were copied down. A page that came wrong from there is removed there, and not set aside here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hisparse_pd.core.model.side_stream import CopyFailed, is_over
from hisparse_pd.core.paging.extents import extents_to_pages, slice_extents
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix, end_of
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS, CopiesUp, Wanted
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.host_source import HostSource
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.store_tier import StoreTier
from hisparse_pd.prefill_node.store_writes import HOST_POOLS as HOST_POOLS
from hisparse_pd.protocol.messages import FetchedTokens, Room

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _CopyDown:
    """Pages on their way to main memory: those of ``keys`` behind what ``before`` has there."""

    keys: Sequence[PageKey]
    holding: Holding
    """The slots that are written."""
    source: Prefix
    """The prefix that is copied, in use until then. It ends where ``keys`` end."""
    before: Prefix | None
    """The prefix that main memory has before these pages; in use, too."""
    token_ids: bytes | None
    """See ``PrefixTree.hold``."""
    is_behind: torch.cuda.Event | None
    """The copy's end; None: it is over."""


@dataclass(eq=False, slots=True)
class _Fetch:
    """A request whose pages were copied up, and which waits for its turn."""

    first_page: int
    """The first page of its prompt that the copy brings."""
    num_pages: int
    """Pages that the copy brings, without those that were wrong; some may have been evicted since."""


class HostTier:
    """Pages in main memory below the prefix cache of one engine. ``pages``: None if it keeps none there;
    then nothing is ever stored or fetched. ``store``: the tier below, if there is one."""

    def __init__(
        self,
        pages: HostPages | None,
        pools: Pools,
        prefixes: PrefixTree,
        set_aside: SetAside,
        copies_up: CopiesUp,
        pins: Pins,
        store: StoreTier | None = None,
    ) -> None:
        self._pages = pages
        self._pools = pools
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._copies_up = copies_up
        self._pins = pins
        self.store_tier = store
        self._down: list[_CopyDown] = []
        self._fetches: dict[Room, _Fetch] = {}
        self.num_stored_tokens = 0
        """Tokens that were copied down since the start."""
        self.num_fetched_tokens = 0
        """Tokens that were copied up since the start, and were right."""

    @property
    def num_copies_down(self) -> int:
        """Copies to main memory under way."""
        return len(self._down)

    @property
    def num_landing(self) -> int:
        """Holdings in Stage.LANDING: one of each copy down, and those that the store reads into."""
        return len(self._down) + (0 if self.store_tier is None else self.store_tier.num_landing)

    @property
    def num_quarantined(self) -> int:
        """Holdings in Stage.QUARANTINED."""
        return 0 if self.store_tier is None else self.store_tier.num_quarantined

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that copies down and the store use, once for each use."""
        for copy_down in self._down:
            yield copy_down.source
            if copy_down.before is not None:
                yield copy_down.before
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
        if num_pages <= 0 or self._is_going_down(keys, num_stored):
            return
        if not self._prefixes.is_up(keys, CACHE_POOLS):  # nobody knows yet what comes up
            return
        before = self._prefixes.use_if_any(keys[:num_stored], HOST_POOLS)
        self._prefixes.make_room(SlotCounts(host=num_pages * page_size))
        num_pages = min(num_pages, self._pools.free.host // page_size)
        if num_pages == 0:  # all is in use
            self._prefixes.let_go(before)
            return
        keys = keys[: num_stored + num_pages]
        source = self._prefixes.use(keys, CACHE_POOLS)
        holding = self._pools.reserve(room, SlotCounts(host=num_pages * page_size))
        if self.store_tier is not None:
            self.store_tier.forget(extents_to_pages(holding[PoolKind.HOST], page_size))
        src = slice_extents(source.extents(PoolKind.DEVICE), num_stored * page_size, len(keys) * page_size)
        try:
            is_behind = self._pages.copy_down(src, holding[PoolKind.HOST])
        except CopyFailed as error:
            log.error("pages of room %d are not copied to main memory: %s", room, error)
            self._pools.release(holding)
            self._prefixes.let_go(source)
            self._prefixes.let_go(before)
            return
        self._down.append(_CopyDown(keys, holding, source, before, token_ids, is_behind))

    # --- up ------------------------------------------------------------------------------------------

    def fetch(
        self, room: Room, keys: Sequence[PageKey], num_pages: int, token_ids: bytes | None = None
    ) -> bool:
        """Begin to copy up the pages of ``keys`` that main memory has and the device lacks, after those that
        the store has were read. Returns whether the request should wait: for the store, for the copies of as
        many others as a forward takes, or for room beside them. It need not wait for its own: what that
        brings is found at once.

        ``room``, ``num_pages``: the waiting request's, which needs so many pages on the device in all. For
        one that has no room there nothing is begun: it waits for pages in any case. ``token_ids``: see
        ``PrefixTree.hold``.
        """
        if self._pages is None or room in self._fetches:
            return False
        num_cached = self._prefixes.num_found(keys, CACHE_POOLS)
        if self.store_tier is not None and self.store_tier.fetch(room, keys, num_cached, token_ids):
            return True
        num_stored = self._prefixes.num_found(keys, HOST_POOLS)
        if num_stored <= num_cached or not self._prefixes.fit_one_more_run(keys, CACHE_POOLS):
            return False
        if self._copies_up.is_full:
            return True
        page_size = self._pools.page_size
        if not self._pins.fits(room, num_pages, self._set_aside.num_usable_pages(PoolKind.DEVICE)):
            return self._pins.hold_others_back
        before = self._prefixes.use_if_any(keys[:num_cached], CACHE_POOLS)
        need = SlotCounts(device=(num_stored - num_cached) * page_size)
        if not need.fits_in(self._pools.free + self._prefixes.unused):
            self._prefixes.let_go(before)
            return False
        keys = keys[:num_stored]
        fetch = self._fetches[room] = _Fetch(first_page=num_cached, num_pages=num_stored - num_cached)

        def ended(num_right: int) -> None:
            fetch.num_pages = num_right
            self.num_fetched_tokens += num_right * page_size

        source = HostSource(
            self._pages,
            self._prefixes,
            self._set_aside,
            self.store_tier,
            keys,
            num_cached,
            self._prefixes.use(keys, HOST_POOLS),
            page_size,
            ended,
        )
        self._prefixes.make_room(need)
        wanted = Wanted(room, num_pages, (num_pages - num_stored) * page_size, token_ids)
        self._copies_up.begin(source, wanted, keys, num_cached)
        self._prefixes.let_go(before)  # the copy uses it now
        return False

    def fetched(self, room: Room, num_pages: int) -> FetchedTokens:
        """Return how many tokens of the first ``num_pages`` pages of a request's prompt, which are on the
        device, were copied up for it, and how many of them the store had brought."""
        fetch = self._fetches.get(room)
        num_fetched = 0
        if fetch is not None:
            num_fetched = min(max(0, num_pages - fetch.first_page), fetch.num_pages)
        first_brought = None if self.store_tier is None else self.store_tier.first_brought(room)
        num_brought = 0
        if fetch is not None and first_brought is not None:  # what the store brings comes behind all others
            num_brought = min(num_fetched, max(0, fetch.first_page + num_fetched - first_brought))
        page_size = self._pools.page_size
        return FetchedTokens((num_fetched - num_brought) * page_size, num_brought * page_size)

    def release(self, room: Room) -> None:
        """Forget what was fetched for a request, which begins or ends."""
        self._fetches.pop(room, None)
        if self.store_tier is not None:
            self.store_tier.release(room)

    # --- the end of copies ---------------------------------------------------------------------------

    def poll(self) -> None:
        """Put the pages of copies down that are over into the tree, and those that the store has read."""
        if self.store_tier is not None:
            self.store_tier.poll()
        for copy in [copy for copy in self._down if is_over(copy.is_behind)]:
            self._down.remove(copy)
            self._end_copy_down(copy)

    def settle(self) -> None:
        """Wait until all copies down are over, which takes some milliseconds, and do ``poll``: they use
        nothing any more."""
        if self._pages is not None and self._down:
            self._pages.settle()
            self.poll()

    def _end_copy_down(self, copy: _CopyDown) -> None:
        first, page_size = end_of(copy.before), self._pools.page_size
        # What was found wrong on the device may have been copied before or after it changed.
        is_right = not copy.source.is_dropped and (copy.before is None or not copy.before.is_dropped)
        num_kept = first
        if is_right:
            num_kept = self._prefixes.hold(
                copy.holding, copy.keys, HOST_POOLS, first, token_ids=copy.token_ids
            )
        self.num_stored_tokens += (num_kept - first) * page_size
        if self.store_tier is not None and num_kept > first:
            self.store_tier.put(copy.keys[:num_kept], first)
        self._pools.release(copy.holding)
        self._prefixes.let_go(copy.source)
        self._prefixes.let_go(copy.before)

    def _is_going_down(self, keys: Sequence[PageKey], number: int) -> bool:
        """Whether a copy under way brings page ``number`` of ``keys`` to main memory."""
        return any(
            end_of(copy.before) <= number < len(copy.keys) and copy.keys[number] == keys[number]
            for copy in self._down
        )
