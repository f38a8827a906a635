"""Plans and pages over token slots that are given one by one."""

from __future__ import annotations

from numpy.typing import ArrayLike

from hisparse_pd.core.paging.extents import SlotArray, SlotRanges, ranges_to_slots
from hisparse_pd.transfer.plan import RunPlan, plan_writes


def plan_slots(src_slots: ArrayLike, dst_slots: ArrayLike) -> RunPlan:
    """Return the runs that copy ``src_slots[i]`` to ``dst_slots[i]`` for every i."""
    return plan_writes(SlotRanges.of_slots(src_slots), SlotRanges.of_slots(dst_slots))


def expand_pages(page_ids: ArrayLike, page_size: int, start_token: int, stop_token: int) -> SlotArray:
    """Return the slots of positions [start_token, stop_token) of a request that has ``page_ids``."""
    return ranges_to_slots(*SlotRanges.of_pages(page_ids, page_size, start_token, stop_token))
