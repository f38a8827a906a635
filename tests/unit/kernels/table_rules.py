"""Checks of the rules that every writer of the hot buffers' tables keeps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.hot_state import ABSENT, HotBufferState
from hisparse_pd.kernels.reference import Table
from hisparse_pd.kernels.step_requests import ring_entries


def by_row(state: HotBufferState, table: Tensor) -> Tensor:
    """Return what a table by device slot has for each row's entries: [num_groups, num_rows, max_capacity] on
    the CPU, ABSENT behind the row's pages."""
    return table[:, _entry_slots(state)].cpu()


def _entry_slots(state: HotBufferState) -> Tensor:
    """Return the slots of all rows' entries: int64 [num_rows, max_capacity]."""
    return state.entry_slots(torch.arange(state.num_rows, device=state.device))


def check_consistency(
    state: HotBufferState, seq_lens: dict[int, int] | None = None, num_new: dict[int, int] | None = None
) -> None:
    """Verify the rules of ``kernels/hot_state.py`` for every row. ``seq_lens`` (of rows in their last step)
    adds checks of placement; ``num_new`` is the number of new positions in that step, 1 for rows that it
    lacks.

    Synchronises with the device. Raises RuntimeError with group, row, hot_index and both values.
    """
    capacities = state.capacity.tolist()
    lookup_pages = state.lookup_pages.cpu().numpy()
    owned = lookup_pages[np.array(capacities) > 0]
    page_ids = np.sort(owned[owned != ABSENT])
    is_again = page_ids[1:] == page_ids[:-1]
    if is_again.any():
        raise RuntimeError(f"lookup page {int(page_ids[1:][is_again][0])} is in more than one place")
    if not np.array_equal(lookup_pages == ABSENT, state.host_pages.cpu().numpy() == ABSENT):
        raise RuntimeError("a page has a host page and no lookup page, or the other way round")
    slots = _entry_slots(state)
    _check_device_pages(state, capacities, slots.cpu().numpy())
    of_entries = state.hot_to_lookup[:, slots], state.stamps[:, slots]
    for group in range(state.num_groups):
        tables = (state.lookup_to_hot, *of_entries, state.step)
        forward, backward, stamps, steps = (table[group].cpu().numpy() for table in tables)
        num_hot, num_used = np.count_nonzero(forward != ABSENT), np.count_nonzero(backward != ABSENT)
        is_empty = ((backward == ABSENT) & (stamps == ABSENT)).all(1)
        for row, capacity in enumerate(capacities):
            seq_len = (seq_lens or {}).get(row, 0)
            if is_empty[row] and seq_len == 0:
                continue
            newest = range(max(0, seq_len - (num_new or {}).get(row, 1)), seq_len)
            where, of_row = f"group {group}, row {row}", (backward[row], stamps[row], int(steps[row]))
            _check_row(state, where, capacity, forward, *of_row, lookup_pages[row], newest)
        if num_hot != num_used:
            raise RuntimeError(f"group {group}: {num_hot} hot lookup slots, {num_used} used entries")


def _check_device_pages(state: HotBufferState, capacities: list[int], slots: Table) -> None:
    """Verify that a device page is in one place at most, and that slots that are no entry of a row have no
    words. Rows whose pages are being filled have both a hot buffer and pages. ``slots``: ``_entry_slots``."""
    page_table, hot_pages = state.page_table.cpu().numpy(), state.hot_pages.cpu().numpy()
    page_ids = np.sort(np.concatenate((hot_pages.ravel(), np.unique(page_table))))
    page_ids = page_ids[page_ids != ABSENT]
    is_again = page_ids[1:] == page_ids[:-1]
    if is_again.any():
        raise RuntimeError(f"device page {int(page_ids[1:][is_again][0])} is in more than one place")
    is_entry = np.zeros(state.hot_to_lookup.shape[1], dtype=np.bool_)
    is_entry[slots[np.arange(state.max_capacity) < np.array(capacities)[:, None]]] = True
    if is_entry[state.num_device_slots :].any():
        raise RuntimeError("the unused page has an entry: a row lacks a page of its hot buffer")
    for table in (state.hot_to_lookup, state.stamps):
        is_stray = (table.cpu().numpy() != ABSENT).any(0) & ~is_entry
        if is_stray.any():
            raise RuntimeError(f"device slot {int(np.flatnonzero(is_stray)[0])} is no entry and has a word")


def _check_row(
    state: HotBufferState,
    where: str,
    capacity: int,
    forward: Table,
    backward: Table,
    stamps: Table,
    step: int,
    lookup_pages: Table,
    newest: range,
) -> None:
    entries = np.flatnonzero(backward != ABSENT)
    if len(entries) and int(entries[-1]) >= capacity:
        raise RuntimeError(f"{where}: hot_index {int(entries[-1])} in use, capacity is {capacity}")
    lookup_slots = backward[entries].astype(np.int64)
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
    mismatched = np.flatnonzero((stamps == ABSENT) != (backward == ABSENT))
    if len(mismatched):
        entry = int(mismatched[0])
        raise RuntimeError(
            f"{where}: hot_index {entry} has stamp {int(stamps[entry])} "
            f"and lookup slot {int(backward[entry])}"
        )
    if int(stamps.max()) > step:
        raise RuntimeError(f"{where}: stamp {int(stamps.max())} after step {step}")
    if not newest or step == 0 or capacity == 0:
        return
    positions = is_of_row.argmax(1) * state.page_size + lookup_slots % state.page_size
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
