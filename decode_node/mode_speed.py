"""Estimates which mode of the next request makes a node faster, for requests of ``auto``. Pure.

``mode_choice.py`` asks these questions about the request of ``auto`` that is next in the queue. A request
*pays* if the whole node makes more tokens a second with it than without it. The answers are estimates by
``miss_cost.py``: how many positions hot buffers of a size miss, and how long a step takes with so many
requests and misses.

- ``leaves_hot_buffers``: if the request is dense, can all others still have hot buffers of use?
- ``hisparse_pays``, ``dense_pays``: does the request pay in that mode?
- ``dense_alone_pays``: is the node faster if dense requests alone run, as many as fit, and the others wait?
- ``hot_buffers_are_enough``: would the request's hot buffer make all of them so small that the node is slower
  than without it, and slower than with dense requests alone?
"""

from __future__ import annotations

import math
from typing import Final

from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.plan_draft import PlanDraft

HOT_SPEED: Final = 0.95
"""The tokens a second of requests with hot buffers that miss nothing, as a part of those of as many dense
ones. Their steps look positions up, and copies make room for them."""


def leaves_hot_buffers(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether all requests together miss least if the next one takes ``num_taken`` device slots for
    pages.

    This holds if all others that are hisparse or wait can then have hot buffers of half as many entries, or
    of the largest size. The reason: misses halve with each doubling (docs/decisions.md), so a hot buffer of
    ``c`` entries misses ``k / c``. A request that takes one, and not pages of ``s`` slots, leaves ``s - c``
    slots to others. There they save ``k * (s - c) / c**2`` misses, which is more than ``k / c`` if ``c < s /
    2``.
    """
    limits, use = draft.limits, draft.device_use
    most_slots = limits.hot_slots(min(_largest(limits), num_taken // 2))
    left = draft.spare_device() - num_taken - use.num_lacked(most_slots)
    if left < 0:
        return False
    # A request that waits for a row does not need slots yet.
    for wanted in draft.queue.first(draft.available.req_row - 1):
        left -= wanted.num_slots if wanted.must_be_dense else min(most_slots, wanted.num_slots)
        if left < 0:
            return False
    return True


def hisparse_pays(draft: PlanDraft) -> bool:
    """Return whether one more hisparse request pays: beside the hot buffers that there are, or if a dense
    request of ``auto`` leaves its pages, so that both have hot buffers."""

    def pays(num_more: int, num_more_slots: int = 0) -> bool:
        return draft.miss_cost.pays(-num_saved_positions(draft, num_more, num_more_slots))

    if pays(1):
        return True
    num_left = next(iter(draft.device_use.leaving.values()), 0)
    return num_left > 0 and pays(2, num_left)


def dense_pays(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether one more dense request pays that takes ``num_taken`` device slots from hot buffers."""
    return draft.miss_cost.pays(-num_saved_positions(draft, 0, -num_taken))


def dense_alone_pays(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether the node is faster if dense requests run alone and the others wait.

    As many dense ones run as the device pool holds. This is compared with all requests at once, or with as
    many as make the node fastest. ``num_taken``: the device slots that the next request takes for its pages.
    ``hisparse_pays`` cannot answer this: it tells what one request more brings, and not how fast fewer dense
    ones would be in the place of many hot buffers.
    """
    limits, use, cost = draft.limits, draft.device_use, draft.miss_cost
    if use.num_never_dense or not cost.tells_speed:
        return False
    num_reqs, mean_taken = _all_requests(draft, num_taken)
    num_slots, largest = limits.totals.device, _largest(limits)
    num_dense = num_slots // mean_taken
    if num_dense >= num_reqs:
        return False  # all can be dense, and nobody need wait
    # While hot buffers are large enough to be of use, some requests are dense beside them
    # (``leaves_hot_buffers``). Beside smaller ones none is.
    most = limits.hot_slots(min(largest, mean_taken // 2))
    num_beside = max(0, num_slots - num_reqs * most) // max(1, mean_taken - most)
    num_hot = num_reqs - num_beside
    if not num_beside:
        num_hot = int(min(num_hot, max(1.0, cost.most_hot(num_slots), num_slots / most)))
    num_missed = cost.num_missed(num_hot, num_slots - num_beside * mean_taken, largest, mean_taken)
    if_all_run = cost.tokens_per_sec(num_beside + num_hot, num_missed)
    return cost.tokens_per_sec(num_dense, 0) > HOT_SPEED * if_all_run


def hot_buffers_are_enough(draft: PlanDraft, num_taken: int) -> bool:
    """Return whether the next request is to wait for the end of others, because its hot buffer makes the node
    slower: slower than now, and slower than as many dense requests as the device pool holds. ``num_taken``:
    the device slots that the request would take for its pages."""
    limits, use, cost = draft.limits, draft.device_use, draft.miss_cost
    if use.num_never_dense or not cost.tells_speed:
        return False

    def tokens_per_sec(num_more: int, num_leaving: int = 0, num_left: int = 0) -> float:
        """Return the node's tokens a second with ``num_more`` hisparse requests more, of which
        ``num_leaving`` were dense and have left ``num_left`` slots of their pages."""
        num_hot = use.num_hisparse + num_more
        seq_len = (use.hisparse_slots + num_more * num_taken) / max(1, num_hot)
        num_slots = limits.totals.device - use.dense_slots + num_left
        num_missed = cost.num_missed(num_hot, num_slots, _largest(limits), seq_len)
        return cost.tokens_per_sec(use.num_dense - num_leaving + num_hot, num_missed)

    with_one_more = tokens_per_sec(1)
    if num_left := next(iter(use.leaving.values()), 0):
        with_one_more = max(with_one_more, tokens_per_sec(2, 1, num_left))
    _, mean_taken = _all_requests(draft, num_taken)
    dense_alone = cost.tokens_per_sec(limits.totals.device // mean_taken, 0)
    return with_one_more < min(tokens_per_sec(0), dense_alone / HOT_SPEED)


def num_saved_positions(draft: PlanDraft, num_more: int, num_more_slots: int) -> float:
    """Return how many positions fewer all hot buffers together miss in a step if there are ``num_more`` hot
    buffers more, and ``num_more_slots`` more device slots for all of them; negative if they miss more."""
    use, cost = draft.device_use, draft.miss_cost
    num_hisparse = use.num_hisparse
    num_slots = draft.limits.totals.device - use.dense_slots
    most = _largest(draft.limits)
    seq_len = use.hisparse_slots / num_hisparse if num_hisparse else math.inf
    present = cost.num_missed(num_hisparse, num_slots, most, seq_len)
    return present - cost.num_missed(num_hisparse + num_more, num_slots + num_more_slots, most, seq_len)


def _all_requests(draft: PlanDraft, num_taken: int) -> tuple[int, int]:
    """Return how many requests run, land or wait, as far as there are rows for them, and the mean number of
    device slots that their pages would take. The next request, which would take ``num_taken``, is one of them
    and out of the queue already."""
    use = draft.device_use
    waiting = [wanted.num_slots for wanted in draft.queue.first(draft.available.req_row - 1)]
    num_reqs = use.num_hisparse + use.num_dense + 1 + len(waiting)
    num_slots = use.hisparse_slots + use.dense_slots + num_taken + sum(waiting)
    return num_reqs, draft.limits.in_pages(max(1, num_slots // num_reqs))


def _largest(limits: Limits) -> int:
    """Return the most entries that a hot buffer may have."""
    return limits.largest_hot_buffer or limits.device_buffer_size
