"""Verifies the rows that a forward is about to read again, in cached prefixes and earlier chunks.

The engine calls ``RowVerification`` while it plans a forward. Pages with a wrong row are set aside, the
requests that have such pages fail, and the engine plans again. It owns no state: pages and requests are
``PrefillLife``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hisparse_pd.core.paging.extents import SlotArray, expand_pages, extents_to_pages
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.kernels.row_check import WrongItem
from hisparse_pd.prefill_node.request_life import CACHE_POOLS, PrefillLife
from hisparse_pd.prefill_node.requests import PrefillState
from hisparse_pd.prefill_node.scheduler import Chunk, StepLimits, why_never


@dataclass(frozen=True)
class RowVerification:
    """Verification for one engine. ``wrong_items`` finds the wrong rows among slots and their positions."""

    life: PrefillLife
    limits: StepLimits
    wrong_items: Callable[[SlotArray, SlotArray], list[WrongItem]]

    def fail_too_long(self, now_secs: float) -> None:
        """Fail waiting requests whose prompts, without the last token, do not fit beside the pages that are
        set aside."""
        num_set_aside = len(self.life.set_aside)
        left = replace(self.limits, num_pages=self.limits.num_pages - num_set_aside)
        for request in self.life.waiting() if num_set_aside else ():
            why = why_never(request.num_computed_tokens, left)
            if why is not None:
                error = f"{why}; {num_set_aside} pages are set aside, see /quarantine of the prefill node"
                self.life.fail(request, 503, f"room {request.room}: {error}", now_secs)

    def set_wrong_aside(self, chunks: Sequence[Chunk], now_secs: float) -> bool:
        """Set aside the pages of wrong rows that ``chunks`` would read again. Return whether there were any;
        the plan must then be made again.

        Requests that have such a page fail; they may succeed at another prefill node, or here in another
        page. Waiting requests that would have used the prefix compute its tokens instead.
        """
        reading = [chunk for chunk in chunks if chunk.start]  # a chunk at 0 has nothing before it to read
        if not reading:
            return False

        is_listed = np.zeros(self.life.pools.totals.device, np.bool_)
        slots, positions = [], []
        for chunk in reading:
            slot_at = self._slots_before(chunk)
            new_positions = np.flatnonzero(~is_listed[slot_at])  # a shared page is verified once
            slots.append(slot_at[new_positions])
            positions.append(new_positions)
            is_listed[slot_at] = True

        errors = {
            item.slot // self.limits.page_size: self.life.set_aside.record_wrong_row(
                "cached", PoolKind.DEVICE, item
            )
            for item in self.wrong_items(np.concatenate(slots), np.concatenate(positions))
        }
        computing = list(self.life.requests.in_state(PrefillState.COMPUTING)) if errors else []
        for request in computing:
            error = next((errors[page_id] for page_id in request.page_ids if page_id in errors), None)
            if error is not None:
                self.life.fail(request, 502, f"room {request.room}: {error}", now_secs)
        return bool(errors)

    def _slots_before(self, chunk: Chunk) -> SlotArray:
        """Return the slots of the positions before a chunk that does not begin its prompt: int64
        [chunk.start], by position."""
        request, page_size = self.life.requests.live(chunk.room), self.limits.page_size
        page_ids = request.page_ids
        if chunk.admits:  # the request has no pages yet: it reads those of the prefix that it will get
            found = self.life.prefixes.find(request.reusable_keys(page_size), CACHE_POOLS)
            assert found is not None
            page_ids = extents_to_pages(found.prefix.extents(PoolKind.DEVICE), page_size)
        return expand_pages(np.asarray(page_ids, np.int64), page_size, 0, chunk.start)
