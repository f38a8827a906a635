"""Pages on their way from main memory to the cluster's store.

``StoreTier`` calls ``put`` for pages that the host tier has copied to main memory, and ``written`` when the
store's threads have done that order. ``StoreWrites`` owns the prefixes that the orders read. Pages that
cannot be written soon are dropped: they are not in the store then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hisparse_pd.core.paging.extents import extents_to_pages, slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.prefill_node.store_threads import Put

HOST_POOLS: Final[Kinds] = (PoolKind.HOST,)
"""The pools of a prefix in main memory."""
WRITE_SHARE: Final = 4
"""At most one in so many pages of main memory waits to be written to the store."""


@dataclass(eq=False, slots=True)
class _Writing:
    order: Put
    source: Prefix
    """The pages that are written, in use until then."""


class StoreWrites:
    """The writes of one engine."""

    def __init__(self, prefixes: PrefixTree, set_aside: SetAside, page_size: int) -> None:
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._page_size = page_size
        self._writings: list[_Writing] = []
        self.num_put_tokens = 0
        """Tokens that were written since the start."""
        self.num_dropped_pages = 0
        """Pages that were not written, because too many waited or the store was left alone."""

    @property
    def num_queued_pages(self) -> int:
        """Pages that wait to be written, or are being written."""
        return sum(len(writing.order.keys) for writing in self._writings)

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that writes read, once for each use."""
        return (writing.source for writing in self._writings)

    def put(self, keys: Sequence[PageKey], num_before: int, *, is_paused: bool) -> Put | None:
        """Return the order that writes the pages of ``keys`` behind ``num_before``, which main memory has, as
        far as the bound of waiting pages allows; None if no page may be written. The others are dropped, and
        all are while the store ``is_paused``."""
        num_pages = 0
        if not is_paused:
            most = self._set_aside.num_usable_pages(PoolKind.HOST) // WRITE_SHARE - self.num_queued_pages
            num_pages = max(0, min(len(keys) - num_before, most))
        self.num_dropped_pages += len(keys) - num_before - num_pages
        if num_pages == 0:
            return None
        end = num_before + num_pages
        source = self._prefixes.use(keys[:end], HOST_POOLS)
        slots = slice_extents(
            source.extents(PoolKind.HOST), num_before * self._page_size, end * self._page_size
        )
        order = Put(keys[num_before:end], extents_to_pages(slots, self._page_size))
        self._writings.append(_Writing(order, source))
        return order

    def written(self, order: Put) -> None:
        """Account for a write that is over."""
        self.num_put_tokens += order.num_put * self._page_size
        (writing,) = [writing for writing in self._writings if writing.order is order]
        self._writings.remove(writing)
        self._prefixes.let_go(writing.source)
