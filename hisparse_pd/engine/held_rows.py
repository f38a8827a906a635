"""Verifies rows of held prefixes where they lie, on either node, and says what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.core.paging.extents import extents_to_slots, slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix_tree import Prefix, PrefixTree
from hisparse_pd.kernels.row_check import WrongItem, wrong_items

STRETCH_BYTES: Final = 1 << 20
"""That are gone through in an idle turn of the engine's loop."""


class HeldRows:
    """``kv``: uint8 [num_layers, num_slots, item_bytes], by the first kind of a prefix; the checks are found
    by the slots of its last kind. ``row_checks``: int32 [num_layers, num_slots].

    ``found`` is called with each wrong item and the pool that it is in, and keeps it from everybody.
    """

    def __init__(
        self,
        prefixes: PrefixTree,
        page_size: int,
        kv: Mapping[PoolKind, Tensor],
        row_checks: Tensor,
        found: Callable[[PoolKind, WrongItem], object],
    ) -> None:
        self._prefixes = prefixes
        self._page_size = page_size
        self._kv = kv
        self._row_checks = row_checks
        self._found = found
        self._stretches: Iterator[tuple[Prefix, int, int]] = iter(())

    def verify_next(self) -> None:
        """The next stretch of all that is held. Waits for the device."""
        stretch = next(self._stretches, None)
        if stretch is None:
            self._stretches = self._all_stretches()
            return
        prefix, start, stop = stretch
        first, end = prefix.start_page * self._page_size, prefix.end_page * self._page_size
        if prefix not in self._prefixes or prefix.is_dropped or start < first or stop > end:
            return  # it was given up, or is another run by now
        kind, check_kind = prefix.kinds[0], prefix.kinds[-1]
        slots, check_slots = (
            torch.from_numpy(extents_to_slots(slice_extents(prefix.holding[of], start - first, stop - first)))
            for of in (kind, check_kind)
        )
        device = self._row_checks.device
        positions = torch.arange(start, stop, device=device)
        places = slots.to(device), self._row_checks, check_slots.to(device), positions
        for item in wrong_items(self._kv[kind], *places):
            self._found(kind, item)

    def _all_stretches(self) -> Iterator[tuple[Prefix, int, int]]:
        """Of all that is held now: a prefix, and positions of it."""
        for prefix in list(self._prefixes):
            num_layers, _, item_bytes = self._kv[prefix.kinds[0]].shape
            num_tokens = max(1, STRETCH_BYTES // (num_layers * item_bytes))
            stop = prefix.end_page * self._page_size
            for start in range(prefix.start_page * self._page_size, stop, num_tokens):
                yield prefix, start, min(start + num_tokens, stop)


def wrong_item_error(kind: str, pool: PoolKind, item: WrongItem, role: str) -> str:
    """What is wrong with an item of a ``role`` node; ``kind``: a label of ``kv_rows_corrupt_total``."""
    return (
        f"the KV of layer {item.layer}, position {item.position}, in slot {item.slot} of the {pool} pool is "
        f"not what was written ({kind}): its check is {item.actual:#010x}, expected {item.expected:#010x}; "
        f"its page is set aside, see /quarantine of the {role} node"
    )
