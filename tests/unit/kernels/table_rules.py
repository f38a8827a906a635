"""The rules that every writer of the hot buffers' tables keeps, checked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.hot_state import ABSENT, HotBufferState, ring_entries


def check_consistency(
    state: HotBufferState, seq_lens: dict[int, int] | None = None, num_new: dict[int, int] | None = None
) -> None:
    """Verify the rules of ``kernels/hot_state.py`` for every row; with ``seq_lens`` (of a row's last step)
    placement too.
    ``num_new``: of that step, 1 for a row that is not there.

    Synchronises with the device. Raises RuntimeError with group, row, hot_index and both values.
    """
    capacities = state.capacity.tolist()
    lookup_pages = state.lookup_pages.cpu()
    owned = lookup_pages[state.capacity.cpu() > 0]
    page_ids = owned[owned != ABSENT].sort().values
    is_again = page_ids[1:] == page_ids[:-1]
    if is_again.any():
        raise RuntimeError(f"lookup page {int(page_ids[1:][is_again][0])} is in more than one place")
    if not torch.equal(lookup_pages == ABSENT, state.host_pages.cpu() == ABSENT):
        raise RuntimeError("a page has a host page and no lookup page, or the other way round")
    for group in range(state.num_groups):
        forward, backward = state.lookup_to_hot[group].cpu(), state.hot_to_lookup[group].cpu()
        num_hot, num_used = int((forward != ABSENT).sum()), int((backward != ABSENT).sum())
        is_empty = ((backward == ABSENT) & (state.stamps[group].cpu() == ABSENT)).all(1).tolist()
        for row, capacity in enumerate(capacities):
            seq_len = (seq_lens or {}).get(row, 0)
            if is_empty[row] and seq_len == 0:
                continue
            newest = range(max(0, seq_len - (num_new or {}).get(row, 1)), seq_len)
            _check_row(state, group, row, capacity, forward, lookup_pages[row], newest)
        if num_hot != num_used:
            raise RuntimeError(f"group {group}: {num_hot} hot lookup slots, {num_used} used entries")


def _check_row(
    state: HotBufferState,
    group: int,
    row: int,
    capacity: int,
    forward: Tensor,
    lookup_pages: Tensor,
    newest: range,
) -> None:
    where = f"group {group}, row {row}"
    backward = state.hot_to_lookup[group, row].cpu()
    stamps = state.stamps[group, row].cpu()
    step = int(state.step[group, row])
    entries = torch.nonzero(backward != ABSENT).flatten()
    if entries.numel() and int(entries[-1]) >= capacity:
        raise RuntimeError(f"{where}: hot_index {int(entries[-1])} in use, capacity is {capacity}")
    lookup_slots = backward[entries].long()
    is_lost = forward[lookup_slots] != entries
    if is_lost.any():
        lookup_slot, entry = int(lookup_slots[is_lost][0]), int(entries[is_lost][0])
        raise RuntimeError(
            f"{where}: hot_index {entry} holds lookup slot {lookup_slot}, "
            f"which maps to hot_index {int(forward[lookup_slot])}"
        )
    is_of_row = (lookup_slots // state.page_size)[:, None] == lookup_pages
    if not is_of_row.any(1).all():
        stray = int(lookup_slots[~is_of_row.any(1)][0])
        raise RuntimeError(f"{where}: lookup slot {stray} is in none of its pages")
    mismatched = torch.nonzero((stamps == ABSENT) != (backward == ABSENT)).flatten()
    if mismatched.numel():
        entry = int(mismatched[0])
        raise RuntimeError(
            f"{where}: hot_index {entry} has stamp {int(stamps[entry])} "
            f"and lookup slot {int(backward[entry])}"
        )
    if int(stamps.max()) > step:
        raise RuntimeError(f"{where}: stamp {int(stamps.max())} after step {step}")
    if not newest or step == 0 or capacity == 0:
        return
    positions = is_of_row.int().argmax(1) * state.page_size + lookup_slots % state.page_size
    if newest.start + state.max_new <= capacity:
        is_moved = entries != positions
        if is_moved.any():
            position, hot_index = int(positions[is_moved][0]), int(entries[is_moved][0])
            raise RuntimeError(f"{where}: position {position} is at hot_index {hot_index}, not at its own")
        return
    entry_of = dict(zip(positions.tolist(), entries.tolist(), strict=True))
    new_entries = ring_entries(np.array(newest), np.array(capacity), state.max_new)
    for position, entry in zip(newest, new_entries.tolist(), strict=True):
        has_page = position < state.max_context and int(lookup_pages[position // state.page_size]) != ABSENT
        if has_page and entry_of.get(position) != entry:
            raise RuntimeError(f"{where}: hot_index {entry} does not hold the new position {position}")
