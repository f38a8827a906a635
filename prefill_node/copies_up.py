"""Pages that come to the device from a tier below it, while forwards that read them may begin.

``HostTier`` begins copies from main memory, and ``DecodeTier`` those from the memory of a decode node of this
machine; each says what a copy reads (``Source``). The engine calls ``end`` in each turn of its loop. A copy's
pages are in the tree at once, as a run that is arriving until the copy is over. The layers of a forward wait
for what they read (``layer_arrivals.py``). A copy uses its run until then, so nobody gets its slots.

Rows are verified behind the copy. From the page of a wrong one on, the run is dropped. The engine sends
nothing of a request whose prefix is arriving; if it is dropped, the request begins anew, and computes from
there on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse_pd.core.model.side_stream import CopyFailed, is_over
from hisparse_pd.core.paging.extents import extents_to_page_ids
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.kernels.row_check import PageRows, WrongItem, rows_of_pages
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.protocol.messages import Extent, Room

log = logging.getLogger(__name__)

CACHE_POOLS: Final = (PoolKind.DEVICE,)
"""The pools of a cached prefix. Its indexer keys are in the same pages of the index pool, which needs no
allocator of its own."""


class RowChecks(Protocol):
    """Verifies rows of the device's pool, as ``PrefillMemory`` does."""

    def begin_check(self, pages: PageRows, page_size: int) -> Tensor: ...

    def wrong_items(self, pages: PageRows, page_size: int) -> list[WrongItem]: ...


class Source(Protocol):
    """What one copy reads: the pages of a prompt from the copy's first one on."""

    def copy(self, dst: Sequence[Extent], verify: Callable[[], object]) -> torch.cuda.Event | None:
        """Begin to copy all of it to the slots ``dst`` of the device, and ``verify`` behind. Returns the
        event behind both, or None where they are over. Raises CopyFailed."""

    @property
    def is_kept(self) -> bool:
        """Whether it has certainly stayed what it was until now. If not, nothing of the copy is taken."""

    def note_wrong(self, items: Sequence[WrongItem]) -> None:
        """Count rows that came wrong; each item has its slot on the device."""

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that it uses."""

    def end(self, num_right: int) -> None:
        """Let go of it: the copy is over, and its first ``num_right`` pages are right, or it has failed."""


@dataclass(frozen=True)
class Wanted:
    """The waiting request that a copy is for."""

    room: Room
    num_pages: int
    """Pages that its whole prompt needs on the device."""
    num_new_tokens: int
    """Tokens that it computes behind what the copy brings."""
    token_ids: bytes | None
    """See ``PrefixTree.hold``."""


@dataclass(eq=False, slots=True)
class _Copy:
    """Pages on their way to the device: those of ``keys`` from ``first_page`` on."""

    wanted: Wanted
    keys: Sequence[PageKey]
    first_page: int
    rows: PageRows
    """The rows that it writes."""
    source: Source
    landing: Prefix
    """The arriving prefix, which ends where ``keys`` end."""
    is_behind: torch.cuda.Event | None
    """The end of the copy and its verification; None: they are over."""
    is_wrong: Tensor
    """What ``begin_check`` finds, once that is over."""

    @property
    def page_ids(self) -> NDArray[np.int64]:
        """The pages that it writes, int64 [n]."""
        return self.rows[:, 0].astype(np.int64)


class CopiesUp:
    """The copies of one engine to the pools of its device.

    ``checks``: verify rows. ``fresh``: learns which pages were. ``pins``: keeps what is copied in use until
    the request begins. ``forward_tokens``: most tokens of a forward. A forward waits for all copies that are
    under way, so no more should begin once the requests that they are for fill one (``is_full``).
    """

    def __init__(
        self,
        pools: Pools,
        prefixes: PrefixTree,
        checks: RowChecks,
        fresh: FreshPages,
        pins: Pins,
        forward_tokens: int,
    ) -> None:
        self._pools = pools
        self._prefixes = prefixes
        self._checks = checks
        self._fresh = fresh
        self._pins = pins
        self._forward_tokens = forward_tokens
        self._copies: list[_Copy] = []
        """In the order in which they end."""

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def is_full(self) -> bool:
        """Whether the requests that copies under way are for fill a forward."""
        return sum(copy.wanted.num_new_tokens for copy in self._copies) >= self._forward_tokens

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that copies use, once for each use."""
        for copy in self._copies:
            yield copy.landing
            yield from copy.source.users()

    def begin(self, source: Source, wanted: Wanted, keys: Sequence[PageKey], first_page: int) -> bool:
        """Begin to copy the pages of ``keys`` from ``first_page`` on, which ``source`` has, let them be
        found, and pin the request that they are for. The device has the pages before, which the caller uses,
        and room for these. Returns False, with nothing changed but that the source has ended, if the copy
        fails."""
        page_size = self._pools.page_size
        start, stop = first_page * page_size, len(keys) * page_size
        holding = self._pools.reserve(wanted.room, SlotCounts(device=stop - start))
        dst = holding[PoolKind.DEVICE]
        page_ids = extents_to_page_ids(dst, page_size)
        rows = rows_of_pages(page_ids, page_size, start, stop)
        is_wrong: list[Tensor] = []

        def verify() -> None:
            found = self._checks.begin_check(rows, page_size)
            # Read later from the host, it would wait for a forward that has begun meanwhile.
            is_wrong.append(found.to("cpu", non_blocking=True))

        try:
            is_behind = source.copy(dst, verify)
        except CopyFailed as error:
            log.error("pages of room %d are not copied to the device: %s", wanted.room, error)
            self._pools.release(holding)
            source.end(0)
            return False
        self._fresh.expect(page_ids)
        self._prefixes.hold(
            holding, keys, CACHE_POOLS, first_page, token_ids=wanted.token_ids, is_arriving=True
        )
        self._pools.release(holding)  # the tree has its slots
        landing = self._prefixes.use(keys, CACHE_POOLS)
        self._pins.put(wanted.room, wanted.num_pages, self._prefixes.use(keys, CACHE_POOLS))
        self._copies.append(_Copy(wanted, keys, first_page, rows, source, landing, is_behind, is_wrong[0]))
        self.end()  # without a GPU it is over
        return True

    def wait(self) -> None:
        """Wait until all copies are over, which takes as long as the link needs for their bytes, and end
        them."""
        for copy in self._copies:
            if copy.is_behind is not None:
                copy.is_behind.synchronize()
        self.end()

    def end(self) -> None:
        """End the copies that are over: their runs have arrived, up to the first page with a wrong row."""
        while self._copies and is_over(self._copies[0].is_behind):
            self._end(self._copies.pop(0))

    def _end(self, copy: _Copy) -> None:
        page_ids, num_right = copy.page_ids, self._num_right_pages(copy)
        self._fresh.note(page_ids[:num_right])
        self._fresh.forget(page_ids[num_right:])
        self._prefixes.mark_arrived(copy.landing)
        if num_right < len(page_ids):
            self._drop_wrong_pages(copy, num_right)
        copy.source.end(num_right)
        self._prefixes.let_go(copy.landing)

    def _num_right_pages(self, copy: _Copy) -> int:
        """Return the number of pages before the first with a wrong row."""
        if not copy.source.is_kept:
            return 0
        num_right, page_size = len(copy.rows), self._pools.page_size
        if copy.is_wrong.item():
            wrong = self._checks.wrong_items(copy.rows, page_size)
            copy.source.note_wrong(wrong)
            positions = (item.position for item in wrong)
            num_right = min((at // page_size - copy.first_page for at in positions), default=num_right)
        return num_right

    def _drop_wrong_pages(self, copy: _Copy, num_right: int) -> None:
        """Drop the run from a page on. The request, if it still waits, keeps what is before."""
        if not copy.landing.is_dropped:
            # The pages before it become a run of their own, which stays.
            right = self._prefixes.use_if_any(copy.keys[: copy.first_page + num_right], CACHE_POOLS)
            first_slot = int(copy.page_ids[num_right]) * self._pools.page_size
            self._prefixes.drop(PoolKind.DEVICE, first_slot)
            self._prefixes.let_go(right)
        if copy.wanted.room in self._pins:
            found = copy.keys[: self._prefixes.num_found(copy.keys, CACHE_POOLS)]
            self._pins.keep(copy.wanted.room, self._prefixes.use_if_any(found, CACHE_POOLS))
