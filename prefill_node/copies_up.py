"""Pages that come up from main memory, while forwards that read them may begin.

``HostTier`` calls ``begin``, and ``end`` in each turn of the loop. A copy's pages are in the tree at once, as
a run that is arriving until the copy is over. The layers of a forward wait for what they read
(``layer_arrivals.py``). A copy uses its source and its run until then, so nobody gets their slots.

Rows are verified behind the copy. A wrong one is counted, its page in main memory is set aside, and from its
page on the run is dropped. The engine sends nothing of a request whose prefix is arriving; if it is dropped,
the request begins anew, and computes from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse_pd.core.model.side_stream import CopyFailed, is_over
from hisparse_pd.core.paging.extents import extents_to_page_ids, extents_to_pages, slice_extents
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import PageRows, WrongItem, rows_of_pages
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.store_tier import StoreTier
from hisparse_pd.protocol.messages import Room

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
    """Pages on their way to the device: those of ``keys`` from ``first_page`` on."""

    room: Room
    """The request that it is for."""
    keys: Sequence[PageKey]
    first_page: int
    rows: PageRows
    """The rows that it writes."""
    source: Prefix
    """The prefix that is copied. It ends where ``keys`` end."""
    landing: Prefix
    """The arriving prefix, which ends there, too."""
    is_behind: torch.cuda.Event | None
    """The end of the copy and its verification; None: they are over."""
    is_wrong: Tensor
    """What ``begin_check`` finds, once that is over."""

    @property
    def page_ids(self) -> NDArray[np.int64]:
        """The pages that it writes, int64 [n]."""
        return self.rows[:, 0].astype(np.int64)


class EndedCopy(NamedTuple):
    """A copy that is over. ``num_right``: its pages before the first one with a wrong row."""

    room: Room
    keys: Sequence[PageKey]
    num_right: int
    is_right: bool


class CopiesUp:
    """The copies of one engine from main memory to the pools of its device.

    ``checks``: verify rows. ``fresh``: learns which pages were. ``store``: may have brought what is in main
    memory.
    """

    def __init__(
        self,
        pools: Pools,
        prefixes: PrefixTree,
        set_aside: SetAside,
        checks: RowChecks,
        fresh: FreshPages,
        store: StoreTier | None,
    ) -> None:
        self._pools = pools
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._checks = checks
        self._fresh = fresh
        self._store = store
        self._copies: list[_Copy] = []
        """In the order in which they end."""

    def __len__(self) -> int:
        return len(self._copies)

    def rooms(self) -> Iterator[Room]:
        """Yield the requests that the copies are for."""
        return (copy.room for copy in self._copies)

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that copies use, once for each use."""
        for copy in self._copies:
            yield copy.source
            yield copy.landing

    def begin(
        self,
        pages: HostPages,
        room: Room,
        keys: Sequence[PageKey],
        first_page: int,
        source: Prefix,
        token_ids: bytes | None,
    ) -> bool:
        """Begin to copy from ``pages`` those of ``keys`` from ``first_page`` on, and let them be found. The
        device has the pages before, and room for these. ``source``: the prefix in main memory that ends with
        ``keys``, of which the caller counts as a user; the copy takes that over. ``token_ids``: see
        ``PrefixTree.hold``. Returns False, and lets go of ``source``, if the copy fails."""
        page_size = self._pools.page_size
        start, stop = first_page * page_size, len(keys) * page_size
        holding = self._pools.reserve(room, SlotCounts(device=stop - start))
        dst = holding[PoolKind.DEVICE]
        page_ids = extents_to_page_ids(dst, page_size)
        rows = rows_of_pages(page_ids, page_size, start, stop)
        is_wrong: list[Tensor] = []

        def verify() -> None:
            found = self._checks.begin_check(rows, page_size)
            # Read later from the host, it would wait for a forward that has begun meanwhile.
            is_wrong.append(found.to("cpu", non_blocking=True))

        try:
            src = slice_extents(source.extents(PoolKind.HOST), start, stop)
            is_behind = pages.copy_up(src, dst, behind=verify)
        except CopyFailed as error:
            log.error("pages of room %d are not copied to the device: %s", room, error)
            self._pools.release(holding)
            self._prefixes.let_go(source)
            return False
        self._fresh.expect(page_ids)
        self._prefixes.hold(holding, keys, CACHE_POOLS, first_page, token_ids=token_ids, is_arriving=True)
        self._pools.release(holding)  # the tree has its slots
        landing = self._prefixes.use(keys, CACHE_POOLS)
        self._copies.append(_Copy(room, keys, first_page, rows, source, landing, is_behind, is_wrong[0]))
        return True

    def wait(self) -> None:
        """Wait until all copies are over, which takes as long as the link needs for their bytes."""
        for copy in self._copies:
            if copy.is_behind is not None:
                copy.is_behind.synchronize()

    def end(self) -> list[EndedCopy]:
        """End the copies that are over: their runs have arrived, up to the first page with a wrong row."""
        ended = []
        while self._copies and is_over(self._copies[0].is_behind):
            ended.append(self._end(self._copies.pop(0)))
        return ended

    def _end(self, copy: _Copy) -> EndedCopy:
        page_size = self._pools.page_size
        page_ids = copy.page_ids
        is_right = not copy.is_wrong.item()
        num_right = len(page_ids) if is_right else self._num_right_pages(copy)
        self._fresh.note(page_ids[:num_right])
        self._fresh.forget(page_ids[num_right:])
        self._prefixes.mark_arrived(copy.landing)
        if num_right < len(page_ids) and not copy.landing.is_dropped:
            # The pages before it become a run of their own, which stays.
            before = copy.keys[: copy.first_page + num_right]
            right = self._prefixes.use_if_any(before, CACHE_POOLS)
            self._prefixes.drop(PoolKind.DEVICE, int(page_ids[num_right]) * page_size)
            self._prefixes.let_go(right)
        if self._store is not None:
            start, stop = copy.first_page * page_size, (copy.first_page + num_right) * page_size
            verified = slice_extents(copy.source.extents(PoolKind.HOST), start, stop)
            self._store.forget(extents_to_pages(verified, page_size))
        self._prefixes.let_go(copy.source)
        self._prefixes.let_go(copy.landing)
        return EndedCopy(copy.room, copy.keys, num_right, num_right == len(page_ids))

    def _num_right_pages(self, copy: _Copy) -> int:
        """Return the number of pages before the first with a wrong row, whose page in main memory is set
        aside, or removed from the store if it came from there."""
        page_size = self._pools.page_size
        num_right = len(copy.rows)
        host = copy.source.extents(PoolKind.HOST)
        wrong_in_store: dict[PageKey, None] = {}
        for item in self._checks.wrong_items(copy.rows, page_size):
            at = item.position
            item = item._replace(slot=slice_extents(host, at, at + 1)[0].start)
            if self._store is not None and self._store.is_unverified(item.slot // page_size):
                self._set_aside.drop_wrong_row("store", PoolKind.HOST, item)
                wrong_in_store[copy.keys[at // page_size]] = None
            else:
                self._set_aside.record_wrong_row("host", PoolKind.HOST, item)
            num_right = min(num_right, at // page_size - copy.first_page)
        if self._store is not None and wrong_in_store:
            self._store.remove(tuple(wrong_in_store))
        return num_right
