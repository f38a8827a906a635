"""The tier below the index pool: indexer keys and row checks of held prefixes, kept in main memory, too.

``LiveRequests`` calls ``store`` for the prefixes that hisparse requests leave in the tree of held prefixes.
``store`` copies the keys and checks of new pages down, beside steps. Prefixes that no request uses can then
give up their index slots when others need them (``PrefixTree.make_room``): they move down, at once, and keep
nothing on the device. A request that is admitted with such a prefix gets index slots for it, ``fetch`` copies
keys and checks up again, and the request is FETCHING until they are there.

``HeldTier`` owns the copies under way; each uses the prefix that it copies, so that none of its slots is
freed. The bytes are those of ``KeyPages``, which has a place for each page of the host pool. The keys of a
page lie at the place of the page that has its KV, so no slots need to be handed out for them. Rows that came
up are verified with their checks when they are paged in, as all rows are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hisparse_pd.core.model.side_stream import CopyFailed, is_over
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.protocol.messages import Extent

log = logging.getLogger(__name__)


class PageCopies(Protocol):
    """Copies of pages between the device and main memory; ``KeyPages`` makes them."""

    def copy_down(
        self, index: Sequence[Extent], host: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event | None:
        """Begin to copy what pages of the index pool have to the places of as many pages of the host pool,
        and the KV of as many pages of the device pool to these pages, if ``device`` has any. Returns the
        event behind the copy, or None where it is over. Raises CopyFailed."""

    def copy_up(
        self, host: Sequence[Extent], index: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event | None:
        """Begin to copy what lies at the places of pages of the host pool to as many pages of the index pool,
        and the KV of these pages to as many pages of the device pool; as ``copy_down``. Copies up end in the
        order in which they began."""

    def num_same(self, index: Sequence[Extent], host: Sequence[Extent]) -> int:
        """Return how many of the first token slots ``index`` have the row checks, in all layers, that lie at
        the places of as many slots of the host pool; 0 without row checks. Waits for the device, but not for
        steps: whatever wrote to these slots is over. Raises CopyFailed."""

    def settle(self) -> None:
        """Wait until all copies are over."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy of pages that end with the run ``prefix``, which it uses."""

    prefix: Prefix
    first_page: int
    """The first page that is copied; pages between may stay where they are."""
    is_behind: torch.cuda.Event | None
    """The copy's end; None: it is over."""


class HeldTier:
    """The copies of what held prefixes have in the index pool. ``copies``: None if main memory keeps none;
    then nothing is stored and no prefix moves down."""

    def __init__(self, prefixes: PrefixTree, page_size: int, copies: PageCopies | None = None) -> None:
        self._prefixes = prefixes
        self._page_size = page_size
        self._copies = copies
        self._down: list[_Copy] = []
        self._up: list[_Copy] = []
        self.num_fetched_tokens = 0
        """Tokens that have begun to move up since the start."""

    @property
    def num_copies(self) -> int:
        """Copies under way."""
        return len(self._down) + len(self._up)

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that copies use, once for each use."""
        for copy in (*self._down, *self._up):
            yield copy.prefix

    def store(self, prefix: Prefix | None) -> None:
        """Begin to copy down what main memory lacks of a prefix, whose pages are in the tree and hold all of
        their bytes. Only prefixes with KV in the host pool are stored. What cannot be copied stays where it
        is."""
        if self._copies is None or prefix is None or prefix.is_dropped or PoolKind.HOST not in prefix.kinds:
            return
        chain = list(prefix.chain())
        under_way = [copy.prefix.end_page for copy in self._down if copy.prefix in chain]
        first_page = max(under_way, default=0)
        runs = [run for run in chain if not run.is_stored and run.start_page >= first_page]
        if runs:
            try:
                is_behind = self._copies.copy_down(*_slots(runs, PoolKind.INDEX, PoolKind.HOST))
            except CopyFailed as error:
                log.error("keys of a held prefix are not copied to main memory: %s", error)
                return
            self._prefixes.use_run(prefix)
            self._down.append(_Copy(prefix, runs[-1].start_page, is_behind))

    def fetch(self, prefix: Prefix | None) -> None:
        """Begin to bring up the runs of a request's prefix that have moved down. The request uses it. Raises
        PoolExhausted, and CopyFailed, after which they are down as before."""
        if prefix is None or not (runs := self._prefixes.bring_up(prefix)):
            return
        assert self._copies is not None, "runs move down only when they are stored"
        try:
            is_behind = self._copies.copy_up(*_slots(runs, PoolKind.HOST, PoolKind.INDEX))
        except CopyFailed:
            self._prefixes.take_down(runs)
            raise
        self._prefixes.use_run(prefix)
        self._up.append(_Copy(prefix, runs[-1].start_page, is_behind))
        self.num_fetched_tokens += sum(len(run.keys) for run in runs) * self._page_size

    def poll(self) -> None:
        """Note which copies are over."""
        for copy in [copy for copy in self._down if is_over(copy.is_behind)]:
            self._down.remove(copy)
            self._prefixes.mark_stored(copy.prefix, copy.first_page)
            self._prefixes.let_go(copy.prefix)
        for copy in [copy for copy in self._up if is_over(copy.is_behind)]:
            self._up.remove(copy)
            self._prefixes.mark_arrived(copy.prefix)
            self._prefixes.let_go(copy.prefix)

    def settle(self) -> None:
        """Wait until all copies are over, which takes some milliseconds, and note it."""
        if self._copies is not None and self.num_copies:
            self._copies.settle()
            self.poll()


def _slots(runs: Iterable[Prefix], *kinds: PoolKind) -> list[list[Extent]]:
    """Return the slots that ``runs`` have in each of ``kinds``, in the same order of pages."""
    return [[extent for run in runs for extent in run.holding[kind]] for kind in kinds]
