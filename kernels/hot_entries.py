"""The entries of a row's hot buffer: which positions they have, and where these go when its size changes.

While its request is in no step, a row gets a hot buffer of another size, or one in place of its pages. What
stays hot is not fetched from the host again. A hot buffer keeps its first device pages: a larger one gets
empty entries behind them, and a smaller one gives up those at its end. Items move on the device only where
the rules of ``hot_state.py`` want another hot_index. Each group moves its own items, because a hot_index has
the same slot in all groups and another position in each.

Everything here is made of torch's operations, so the CPU runs the same code as a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError, check_range, check_tensor
from hisparse_pd.kernels.hot_state import ABSENT, INTEGERS, HotBufferState

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types as which items are copied, the widest first."""
MOVED_BYTES = 32 << 20
"""Most device memory that items take while they move. Those of several layers move by two launches."""


def positions_of(state: HotBufferState, row: int, lookup_slots: Tensor) -> Tensor:
    """Return the positions of a row's ``lookup_slots``, int64 of the same shape; ABSENT where there is none.

    If a slot's page is, say, the third page of the row, its position is in the third page of the sequence, at
    the same offset.
    """
    slots = lookup_slots.long()
    page_ids, pages = state.lookup_pages[row].long().sort()
    at = torch.searchsorted(page_ids, slots // state.page_size).clamp_(max=len(page_ids) - 1)
    positions = pages[at] * state.page_size + slots % state.page_size
    return torch.where(slots == ABSENT, ABSENT, positions)


def resize_hot_buffer(
    state: HotBufferState,
    row: int,
    *,
    num_before: int,
    capacity: int,
    hot_pages: Tensor,
    num_tokens: int,
    layers_of_group: Sequence[Sequence[int]],
    k_dev: Tensor,
) -> None:
    """Give the hot buffer of ``row`` another capacity, and keep what is hot as far as there is room.

    If the row fits afterwards (``step_requests.ring_entries``), each hot position goes to the hot_index of
    its own number. Otherwise the ``capacity - max_new`` positions that were used last stay hot, below the
    ring; of those used in the same step, the ones with the lowest hot_index. They stay where they are, unless
    that is in the ring of the new capacity or beyond it: those move to free entries. So a row that grows by
    ``max_new`` entries or more, and does not fit, moves nothing. Rejected drafts are forgotten.

    ``num_before``: the capacity so far. ``capacity``: the one from now on. ``hot_pages``: integer [pages of
    capacity] on the CPU, the row's device pages from now on; the first of them, or as many as there are, are
    those that it has.
    ``num_tokens``: positions [0, num_tokens) are accepted, and backed up.
    ``layers_of_group``: the layers of each group. ``k_dev``: as in ``swap_in.py``; items move in all of these
    layers.

    No step with this row may be in flight on another stream. On a GPU everything is launched on the current
    stream, and nothing waits for it: device pages that the row does not keep must stay its own until that is
    over. Those that are new to it had another owner, whose words must have left the tables before.
    Raises KernelArgumentError before it changes anything.
    """
    cpu = torch.device("cpu")
    check_range("row", row, 0, state.num_rows)
    check_range("num_before", num_before, state.max_new, state.max_capacity + 1)
    state.check_hot_pages(row, capacity, hot_pages)
    check_tensor("hot_pages", hot_pages, dtypes=INTEGERS, shape=(None,), device=cpu)
    check_range("num_tokens", num_tokens, 0, state.max_context + 1)
    check_tensor("k_dev", k_dev, dtypes=(torch.uint8,), shape=(None, None, None), device=state.device)
    if len(layers_of_group) != state.num_groups:
        raise KernelArgumentError(
            f"layers_of_group: expected {state.num_groups} groups, got {len(layers_of_group)}"
        )
    if sorted(layer for layers in layers_of_group for layer in layers) != list(range(k_dev.shape[0])):
        raise KernelArgumentError(
            f"layers_of_group: expected each of the {k_dev.shape[0]} layers of k_dev once, got "
            f"{layers_of_group}"
        )

    if state.max_new == 1 and num_before < capacity < num_tokens + state.max_new:
        state.set_hot_pages(row, capacity, hot_pages)  # nothing moves, and no draft was rejected
        return
    slots = state.entry_slots(row)
    lookup_slots, stamps = (table[:, slots[:num_before]] for table in (state.hot_to_lookup, state.stamps))
    entries = torch.arange(num_before, device=state.device).expand_as(stamps)
    ring_start = capacity - state.max_new
    is_fitting = num_tokens <= ring_start
    if is_fitting or state.max_new > 1:
        positions = positions_of(state, row, lookup_slots)
        positions = torch.where(positions < num_tokens, positions, ABSENT)  # without rejected drafts
        stamps = torch.where(positions == ABSENT, ABSENT, stamps)
    if is_fitting:
        targets, most_moved = positions, 0 if num_tokens <= num_before - state.max_new else num_before
    else:
        targets = _below(ring_start, stamps, entries)
        most_moved = min(ring_start, max(0, num_before - ring_start))

    # The row has the pages of the larger size until its entries are in their places: should anything fail
    # before, ``reset_rows`` finds all of them.
    if capacity >= num_before:
        state.set_hot_pages(row, capacity, hot_pages)
        slots = state.entry_slots(row)  # a smaller hot buffer has the first of those that it had
    if most_moved:
        _move_items(k_dev, layers_of_group, *_moves(targets, entries, most_moved, slots))
    _enter(state, lookup_slots, stamps, targets, slots)
    if capacity < num_before:
        state.set_hot_pages(row, capacity, hot_pages)


def enter_hot_buffer(
    state: HotBufferState,
    row: int,
    *,
    capacity: int,
    hot_pages: Tensor,
    first_position: int,
    num_tokens: int,
) -> None:
    """Give a dense or resident ``row`` a hot buffer for its pages, in which the positions [first_position,
    num_tokens) are hot: position ``first_position + i`` is at hot_index ``i``, and its item is in the device
    slot of that. The row has its host and lookup pages already.

    ``capacity``, ``hot_pages``: as in ``resize_hot_buffer``. The positions leave the ring free. If the row
    fits (``step_requests.ring_entries``), ``first_position`` is 0. No step with this row may be in flight on
    another stream, and on a GPU nothing is waited for. Raises KernelArgumentError before it changes anything.
    """
    state.check_hot_pages(row, capacity, hot_pages)
    check_tensor("hot_pages", hot_pages, dtypes=INTEGERS, shape=(None,), device=torch.device("cpu"))
    check_range("num_tokens", num_tokens, 0, state.max_context + 1)
    ring_start = capacity - state.max_new
    lowest = max(0, num_tokens - ring_start)
    check_range("first_position", first_position, lowest, num_tokens + 1 if lowest else 1)

    state.drop_pages(row)
    state.set_hot_pages(row, capacity, hot_pages)
    positions = torch.arange(first_position, num_tokens, device=state.device)
    page_ids = state.lookup_pages[row].long()[positions // state.page_size]
    lookup_slots = page_ids * state.page_size + positions % state.page_size
    num_hot = num_tokens - first_position
    state.lookup_to_hot[:, lookup_slots] = torch.arange(num_hot, dtype=torch.int32, device=state.device)
    slots = state.entry_slots(row)[:num_hot]
    state.hot_to_lookup[:, slots] = lookup_slots.int()
    state.stamps.index_fill_(1, slots, 0)


def _below(ring_start: int, stamps: Tensor, entries: Tensor) -> Tensor:
    """Return the hot_index that each of ``entries`` gets if ``ring_start`` of them stay, those with the
    latest ``stamps``; ABSENT for the others, and where there is no stamp."""
    latest = stamps.argsort(dim=1, descending=True, stable=True)[:, :ring_start]
    is_kept = torch.zeros_like(stamps, dtype=torch.bool).scatter_(1, latest, True) & (stamps != ABSENT)
    if stamps.shape[1] <= ring_start:
        return torch.where(is_kept, entries, ABSENT)
    # There are as many free entries below the ring as kept ones at or beyond it, or more. They are taken in
    # order.
    is_moved = is_kept & (entries >= ring_start)
    free = is_kept[:, :ring_start].byte().argsort(dim=1, stable=True)
    number = (is_moved.cumsum(dim=1) - 1).clamp_(0, max(0, ring_start - 1))
    targets = torch.where(is_kept, entries, ABSENT)
    return torch.where(is_moved, free.gather(1, number), targets) if ring_start else targets


def _moves(targets: Tensor, entries: Tensor, most_moved: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return source and destination slots, [num_groups, most_moved], of the items whose hot_index changes.
    ``slots``: the device slot of each hot_index.

    Groups move different numbers of items, which only the device knows: the rest of a group's list repeats
    its first move, or copies a slot to itself.
    """
    is_moved = (targets != ABSENT) & (targets != entries)
    src = is_moved.byte().argsort(dim=1, descending=True, stable=True)[:, :most_moved]
    is_valid = is_moved.gather(1, src)
    src = torch.where(is_valid, src, src[:, :1])
    src_slots = slots[src]
    dst_slots = slots[targets.gather(1, src).clamp_(min=0)]
    return src_slots, torch.where(is_valid[:, :1], dst_slots, src_slots)


def _move_items(
    k_dev: Tensor, layers_of_group: Sequence[Sequence[int]], src_slots: Tensor, dst_slots: Tensor
) -> None:
    """Copy the items at ``src_slots`` to ``dst_slots``, both [num_groups, n], in the layers of each group."""
    word = next(dtype for dtype in WORDS if k_dev.shape[2] % dtype.itemsize == 0)
    items = k_dev.view(word)
    in_order = sorted((layer, group) for group, layers in enumerate(layers_of_group) for layer in layers)
    layer_bytes = src_slots.shape[1] * k_dev.shape[2]
    most = max(1, MOVED_BYTES // layer_bytes)
    for first in range(0, len(in_order), most):
        groups = [group for _, group in in_order[first : first + most]]
        src, dst = (
            torch.stack([slots[group] for group in groups])[..., None].expand(-1, -1, items.shape[2])
            for slots in (src_slots, dst_slots)
        )
        some = items[first : first + most]
        some.scatter_(1, dst, some.gather(1, src))  # all are read before any is written


def _enter(
    state: HotBufferState, lookup_slots: Tensor, stamps: Tensor, targets: Tensor, slots: Tensor
) -> None:
    """Enter what was at each hot_index at that of ``targets``, and nothing else, into the tables. ``slots``:
    the device slot of each hot_index."""
    is_used = lookup_slots != ABSENT
    forward = torch.where(is_used, lookup_slots, state.num_lookup_slots).long()
    hot_indices = torch.where(is_used, targets, ABSENT)
    is_kept = hot_indices != ABSENT
    # A scatter writes for every entry: for those that are dropped, ABSENT to an unused slot.
    at = torch.where(is_kept, slots[hot_indices.clamp(min=0)], state.num_device_slots)
    words = [torch.where(is_kept, values, ABSENT) for values in (lookup_slots, stamps)]
    state.lookup_to_hot.scatter_(1, forward, hot_indices.to(state.lookup_to_hot.dtype))
    for table, values in zip((state.hot_to_lookup, state.stamps), words, strict=True):
        table.index_fill_(1, slots[: values.shape[1]], ABSENT)
        table.scatter_(1, at, values)
