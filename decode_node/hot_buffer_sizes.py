"""Says how many entries a hot buffer may have, by the device slots that one plan has to spare. Pure.

- A new hot buffer has the full size if so many slots are spare. If not, it takes what is spare, but no less
  than its request's minimum.
- The *share* is the size that each hot buffer would have if all hisparse requests divided what dense ones
  leave of the device pool: no less than the full size, and no more than the largest.
- Slots for one hot buffer of the full size stay free for the next arrival.
- Where more requests had slots a moment ago (``PlanDraft.num_recent``), as many are expected to come again:
  they have their part in the share, and slots stay free for each of them when others get more than the full
  size. So clients that ask again as soon as they have an answer find room, and nobody's hot buffer grows and
  shrinks with each of them.

``making_room.py`` takes from hot buffers above these sizes, and ``free_slots.py`` lets others grow to them.
"""

from __future__ import annotations

from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.request import Request


def spare_capacity(draft: PlanDraft, request: Request, most: int) -> int:
    """Return the entries of a new hot buffer that the spare device slots allow, ``most`` at the most; 0 if
    they are fewer than the request's minimum. ``most``: 0 for the full size.

    The request may get more once it runs. Until then, while its KV is on its way, its slots cannot be taken
    back for others, so it gets no more than the full size.
    """
    page_size = draft.limits.page_size
    spare = draft.spare_device() // page_size * page_size
    capacity = min(draft.limits.max_capacity(request, most), spare)
    return capacity if capacity >= draft.limits.min_capacity(request) else 0


def share_of(draft: PlanDraft, num_more: int = 0, num_more_slots: int = 0) -> int:
    """Return the share, in entries. ``num_more``: hisparse requests that are counted beside those that there
    are. ``num_more_slots``: device slots that are counted beside what dense requests leave of the pool."""
    limits, use = draft.limits, draft.device_use
    num_slots = limits.totals.device - use.dense_slots
    num_hisparse = max(1, use.num_hisparse + num_more, draft.num_recent - use.num_dense)
    entries = (num_slots + num_more_slots) // num_hisparse
    in_pages = entries // limits.page_size * limits.page_size
    return max(limits.device_buffer_size, min(limits.largest_hot_buffer, in_pages))


def all_can_have(draft: PlanDraft, num_slots: int) -> bool:
    """Return whether the next request of the queue, and all others that are hisparse, wait or are expected,
    can have ``num_slots`` device slots each beside the dense ones."""
    use = draft.device_use
    num_reqs = max(use.num_hisparse + num_coming(draft), draft.num_recent - use.num_dense)
    return num_reqs * num_slots <= draft.limits.totals.device - use.dense_slots


def num_coming(draft: PlanDraft) -> int:
    """Return the number of requests that can have a row: the next one of the queue, and those behind it."""
    return 1 + sum(1 for _ in draft.queue.first(draft.available.req_row - 1))


def kept_for_arrivals(draft: PlanDraft) -> int:
    """Return the device slots that stay free for the next arrivals: those of a hot buffer of the full size,
    or of several where more are expected."""
    limits, use = draft.limits, draft.device_use
    num_expected = draft.num_recent - use.num_hisparse - use.num_dense
    return max(1, num_expected) * limits.in_pages(limits.device_buffer_size)
