"""Owns which pages are kept from everybody because a row in them was not what was written, and why. Pure.

Of either node. Nothing but a test of the memory says that such a page is good: an operator gives it back.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Final

from msgspec.structs import replace

from hisparse_pd.core.paging.pools import PoolKind, Pools
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.engine.messages import SetAsidePage

MAX_PAGES_SHOWN: Final = 256
"""Of those that are set aside: they are told twice a second."""


class SetAside:
    """Pages of ``pools``, which no prefix of ``prefixes`` has from then on that anybody can find."""

    def __init__(self, pools: Pools, prefixes: PrefixTree) -> None:
        self._pools = pools
        self._prefixes = prefixes
        self._pages: dict[tuple[PoolKind, int], SetAsidePage] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, kind: PoolKind, slot: int, error: str) -> None:
        """A row at ``slot`` is wrong: nobody else is to use its page, nor a prefix that has it."""
        start = self._pools.set_aside(kind, slot)
        self._prefixes.drop(kind, slot)
        page = SetAsidePage(kind, start, self._pools.page_size, True, error, time.time())
        self._pages.setdefault((kind, start), page)

    def take_back(self, kind: PoolKind, start: int) -> bool:
        """The page is as good as any, says an operator. False when it was not set aside."""
        self._pages.pop((kind, start), None)
        return self._pools.take_back(kind, start)

    def shown(self) -> tuple[SetAsidePage, ...]:
        """The first MAX_PAGES_SHOWN: an operator who gives these back sees others."""
        return tuple(
            replace(page, is_in_use=self._pools.is_condemned(*key))
            for key, page in islice(self._pages.items(), MAX_PAGES_SHOWN)
        )
