"""Verifies the rows that a forward is about to read again, in cached prefixes and earlier chunks.

``PromptSteps`` calls ``RowVerification`` while it plans a forward. Pages with a wrong row are set aside, the
requests that have such pages fail, and the forward is planned again. ``RowVerification`` owns no state:
requests and their pages are ``PrefillLife``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hisparse_pd.core.paging.extents import extents_to_page_ids
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.kernels.row_check import PageRows, WrongItem, rows_of_pages
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS
from hisparse_pd.prefill_node.request_life import PrefillLife
from hisparse_pd.prefill_node.requests import PrefillState
from hisparse_pd.prefill_node.scheduler import Chunk, StepLimits, why_never


@dataclass(frozen=True)
class RowVerification:
    """Verification for one engine. ``wrong_items`` is called with pages, int32 [n, 3] of page id, first
    position and number of rows that count, and with the page size; it returns the wrong rows among them."""

    life: PrefillLife
    limits: StepLimits
    wrong_items: Callable[[PageRows, int], list[WrongItem]]

    def fail_prompts_too_long_for_pool(self, now_secs: float) -> None:
        """Fail waiting requests whose prompts, without the last token, do not fit beside the pages that are
        set aside."""
        num_set_aside = self.life.set_aside.num_pages(PoolKind.DEVICE)
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

        page_size = self.limits.page_size
        is_listed = np.zeros(self.limits.num_pages, np.bool_)
        listed: list[PageRows] = []
        for chunk in reading:
            rows = self._rows_before(chunk)
            # A page that requests share is verified once, and one that has just arrived was verified then.
            rows = rows[~(is_listed[rows[:, 0]] | self.life.pages.fresh.are_fresh(rows[:, 0]))]
            is_listed[rows[:, 0]] = True
            listed.append(rows)

        rows = np.concatenate(listed)
        # ``record_wrong_row`` sets the page aside and returns the error.
        errors = {
            item.slot // page_size: self.life.set_aside.record_wrong_row("cached", PoolKind.DEVICE, item)
            for item in (self.wrong_items(rows, page_size) if len(rows) else ())
        }
        computing = list(self.life.requests.in_state(PrefillState.COMPUTING)) if errors else []
        for request in computing:
            error = next((errors[page_id] for page_id in request.page_ids if page_id in errors), None)
            if error is not None:
                self.life.fail(request, 502, f"room {request.room}: {error}", now_secs)
        return bool(errors)

    def _rows_before(self, chunk: Chunk) -> PageRows:
        """Return the rows of the positions before a chunk that does not begin its prompt."""
        request, page_size = self.life.requests.live(chunk.room), self.limits.page_size
        page_ids: Sequence[int] | NDArray[np.int64] = request.page_ids
        if chunk.admits:  # the request has no pages yet: it reads those of the prefix that it will get
            found = self.life.pages.prefixes.find(request.reusable_keys(page_size), CACHE_POOLS)
            assert found is not None
            page_ids = extents_to_page_ids(found.prefix.extents(PoolKind.DEVICE), page_size)
        return rows_of_pages(page_ids, page_size, 0, chunk.start)
