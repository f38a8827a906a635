"""Verifies the rows of prefixes against their row checks, some in each idle turn of the engine's loop.

A prefix's KV may be damaged while no request reads it. Scrubbing finds that before a request does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.core.paging.extents import extents_to_slots, slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import WrongItem, wrong_items
from hisparse_pd.protocol.messages import Extent

log = logging.getLogger(__name__)

STRETCH_BYTES: Final = 1 << 20
"""Bytes of KV that are verified in one turn."""


class Stretch(NamedTuple):
    """Positions [start, stop) of a prefix, which are verified in one turn."""

    prefix: Prefix
    start: int
    stop: int


class PrefixScrub:
    """Verifies all prefixes, over and over; the page of a wrong row is set aside.

    A prefix has its KV in the pool that is the first of its ``kinds``, its indexer keys in that of the last
    one. ``kv``: the pools that KV may be in, uint8 [num_layers, num_slots, item_bytes] each. ``row_checks``:
    int32 [num_layers, num_slots], at the slots of the indexer keys, by their pool; without any nothing is
    verified. ``stored_checks``: returns the checks of a prefix that has moved down, int32 [num_layers, n], by
    its slots of KV, int64 [n], both on the CPU.
    """

    def __init__(
        self,
        prefixes: PrefixTree,
        set_aside: SetAside,
        page_size: int,
        kv: Mapping[PoolKind, Tensor],
        row_checks: Mapping[PoolKind, Tensor],
        stored_checks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._page_size = page_size
        self._kv = kv
        self._row_checks = row_checks
        self._stored_checks = stored_checks
        self._stretches: Iterator[Stretch] = iter(())
        self._logged = LogLimiter()

    def verify_next(self) -> None:
        """Verify the next stretch; when none is left, list all stretches anew and verify none this time.

        Engines call it in idle turns. Waits for the device. A stretch that cannot be verified, as without
        memory for it, has its next turn with all others: requests are verified when they read it. Raises
        torch.AcceleratorError when the device is lost.
        """
        if not self._row_checks:
            return
        stretch = next(self._stretches, None)
        if stretch is None:
            self._stretches = self._all_stretches()
            return
        try:
            found = self._wrong_in(stretch)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if self._logged.permits():
                log.error("rows of a prefix are not verified now: %s: %s", type(error).__name__, error)
            return
        for item in found:
            self._set_aside.record_wrong_row("scrub", stretch.prefix.kinds[0], item)

    def _wrong_in(self, stretch: Stretch) -> list[WrongItem]:
        """Return the wrong rows of a stretch; none if its prefix was given up or cut since it was listed."""
        prefix, start, stop = stretch
        begin, end = prefix.start_page * self._page_size, prefix.end_page * self._page_size
        if prefix not in self._prefixes or prefix.is_dropped or start < begin or stop > end:
            return []
        if prefix.is_arriving:
            return []  # its checks are on their way
        kv_kind, check_kind = prefix.kinds[0], prefix.kinds[-1]
        kv, row_checks = self._kv[kv_kind], self._row_checks[check_kind]
        device = row_checks.device
        slots = _slots(prefix.holding[kv_kind], start - begin, stop - begin)
        if prefix.is_down:
            assert self._stored_checks is not None, "only what is stored moves down"
            row_checks, check_slots = self._stored_checks(slots).to(device), torch.arange(stop - start)
        else:
            check_slots = _slots(prefix.holding[check_kind], start - begin, stop - begin)
        positions = torch.arange(start, stop, device=device)
        return wrong_items(kv, slots.to(device), row_checks, check_slots.to(device), positions)

    def _all_stretches(self) -> Iterator[Stretch]:
        """Yield the stretches of all prefixes that there are now."""
        for prefix in list(self._prefixes):
            num_layers, _, item_bytes = self._kv[prefix.kinds[0]].shape
            num_tokens = max(1, STRETCH_BYTES // (num_layers * item_bytes))
            stop = prefix.end_page * self._page_size
            for start in range(prefix.start_page * self._page_size, stop, num_tokens):
                yield Stretch(prefix, start, min(start + num_tokens, stop))


def _slots(extents: tuple[Extent, ...], start: int, stop: int) -> Tensor:
    """Return the token slots of positions [start, stop), counted from the first of ``extents``: int64, on the
    CPU."""
    return torch.from_numpy(extents_to_slots(slice_extents(extents, start, stop)))
