"""Pages in main memory, as the source of a copy to the device (``copies_up.py``).

A page whose row came up wrong is set aside in main memory, or removed from the cluster's store if that had
brought it and nobody had verified it since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hisparse_pd.core.paging.extents import extents_to_pages, slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import WrongItem
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.store_tier import StoreTier
from hisparse_pd.protocol.messages import Extent


@dataclass(frozen=True)
class HostSource:
    """The pages of ``keys`` from ``first_page`` on. ``prefix``: has them in main memory, and ends with them;
    the source is a user of it. ``on_end``: called with the number of pages that came up right. See
    ``copies_up.Source``."""

    pages: HostPages
    prefixes: PrefixTree
    set_aside: SetAside
    store: StoreTier | None
    keys: Sequence[PageKey]
    first_page: int
    prefix: Prefix
    page_size: int
    on_end: Callable[[int], None]

    is_kept = True

    def copy(self, dst: Sequence[Extent], verify: Callable[[], object]) -> torch.cuda.Event | None:
        return self.pages.copy_up(self._extents(self.first_page, len(self.keys)), dst, behind=verify)

    def note_wrong(self, items: Sequence[WrongItem]) -> None:
        host = self.prefix.extents(PoolKind.HOST)
        wrong_in_store: dict[PageKey, None] = {}
        for item in items:
            at = item.position
            in_host = item._replace(slot=slice_extents(host, at, at + 1)[0].start)
            if self.store is not None and self.store.is_unverified(in_host.slot // self.page_size):
                self.set_aside.drop_wrong_row("store", PoolKind.HOST, in_host)
                wrong_in_store[self.keys[at // self.page_size]] = None
            else:
                self.set_aside.record_wrong_row("host", PoolKind.HOST, in_host)
        if self.store is not None and wrong_in_store:
            self.store.remove(tuple(wrong_in_store))

    def users(self) -> Iterator[Prefix]:
        yield self.prefix

    def end(self, num_right: int) -> None:
        if self.store is not None:
            verified = self._extents(self.first_page, self.first_page + num_right)
            self.store.forget(extents_to_pages(verified, self.page_size))
        self.prefixes.let_go(self.prefix)
        self.on_end(num_right)

    def _extents(self, first: int, stop: int) -> tuple[Extent, ...]:
        """Return the slots in main memory of the pages from ``first`` to ``stop``."""
        host = self.prefix.extents(PoolKind.HOST)
        return slice_extents(host, first * self.page_size, stop * self.page_size)
