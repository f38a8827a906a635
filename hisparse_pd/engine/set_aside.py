"""The pages of a node that are not reused because a row in them did not match its row check, and why.

Whoever finds a wrong row reports it to ``SetAside``: ``decode_node/end_moves.py`` those of a step or a
request's start, ``prefill_node/row_verification.py`` those of a cached prefix and ``host_tier.py`` those that
main memory kept, ``prefix_scrub.py`` those of a scrub. ``SetAside`` withdraws the page from the pools and
drops the prefixes that have it. Only a test of the memory can show that a page is good again, so an operator
gives it back, which ``loop.py`` passes on.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import Final

from msgspec.structs import replace

from hisparse_pd.core.paging.pools import PoolKind, Pools
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.engine.messages import SetAsidePage
from hisparse_pd.kernels.row_check import WrongItem

log = logging.getLogger(__name__)

WRONG_ROW_KINDS: Final = {
    "prefill": ("cached", "host", "store", "decode", "scrub"),
    "decode": ("landing", "page-in", "newest", "scrub"),
}
"""Labels of ``kv_rows_corrupt_total``: when a wrong row is found. cached: before a forward reads it again.
host: when it has come back from main memory. store: the same, of a page that the cluster's store gave.
decode: when it has come from the decode node that holds it.
landing: when its request begins. page-in: when a step pages it in. newest: when a step pages in a row that
this node wrote. scrub: in an idle turn, while no request is live."""

MAX_PAGES_SHOWN: Final = 256
"""Most pages that are listed in statistics, which are sent twice a second."""


class SetAside:
    """Pages of ``pools`` that are set aside; no prefix of ``prefixes`` with one of them is found again.

    ``role``: the node's, "prefill" or "decode".
    """

    def __init__(self, pools: Pools, prefixes: PrefixTree, role: str) -> None:
        self._pools = pools
        self._prefixes = prefixes
        self._role = role
        self._pages: dict[tuple[PoolKind, int], SetAsidePage] = {}
        self.num_found = dict.fromkeys(WRONG_ROW_KINDS[role], 0)
        """Wrong rows since the start, by kind."""

    def __len__(self) -> int:
        return len(self._pages)

    def num_pages(self, pool: PoolKind) -> int:
        """Return how many pages of ``pool`` are set aside, or will be once they are freed."""
        return sum(kind is pool for kind, _ in self._pages)

    def num_usable_pages(self, pool: PoolKind) -> int:
        """Return how many pages of ``pool`` are not set aside, and will not be."""
        return self._pools.totals[pool] // self._pools.page_size - self.num_pages(pool)

    @property
    def num_tokens(self) -> int:
        """Token slots of the host pool and the device pool that are set aside."""
        used = self._pools.set_aside_slots
        return used.host + used.device

    def record_wrong_row(self, kind: str, pool: PoolKind, item: WrongItem) -> str:
        """Count a wrong row and set its page aside, with every prefix that has it. Returns the error.

        ``kind``: one of ``WRONG_ROW_KINDS``.
        """
        error = (
            f"the KV of layer {item.layer}, position {item.position}, in slot {item.slot} of the {pool} pool "
            f"is not what was written ({kind}): its check is {item.actual:#010x}, expected "
            f"{item.expected:#010x}; its page is set aside, see /quarantine of the {self._role} node"
        )
        log.error("%s", error)
        self.num_found[kind] += 1
        start = self._pools.set_aside(pool, item.slot)
        self._prefixes.drop(pool, item.slot)
        num_slots = self._pools.page_size
        # ``shown`` looks up whether the page is still in use.
        page = SetAsidePage(pool, start, num_slots, is_in_use=True, error=error, at=time.time())
        self._pages.setdefault((pool, start), page)
        return error

    def drop_wrong_row(self, kind: str, pool: PoolKind, item: WrongItem) -> None:
        """Count a wrong row that came wrong from elsewhere, and drop every prefix that has its page. The
        memory is not to blame, so the page is free again once nobody uses it."""
        where = f"layer {item.layer}, position {item.position}, in slot {item.slot} of the {pool} pool"
        checks = f"its check is {item.actual:#010x}, expected {item.expected:#010x}"
        self.count_wrong(kind, f"the KV of {where} is not what was written ({kind}): {checks}")
        self._prefixes.drop(pool, item.slot)

    def count_wrong(self, kind: str, error: str) -> None:
        """Count what was found wrong before it was in any page, as one row. ``kind``: as above."""
        log.error("%s", error)
        self.num_found[kind] += 1

    def give_back(self, pool: PoolKind, start: int) -> None:
        """Return the page to the pools, because an operator says that it is good."""
        self._pages.pop((pool, start), None)
        found = self._pools.take_back(pool, start)
        log.warning("page at slot %d of the %s pool is good, says an operator (%s)", start, pool, found)

    def shown(self) -> tuple[SetAsidePage, ...]:
        """Return the first MAX_PAGES_SHOWN pages; an operator who gives these back sees others."""
        return tuple(
            replace(page, is_in_use=key in self._pools.condemned)
            for key, page in islice(self._pages.items(), MAX_PAGES_SHOWN)
        )
