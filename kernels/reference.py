"""CPU swap-in, the oracle of the CUDA kernel: same tables, same order of eviction, same bytes.

Works on numpy views of the tables, vectorised over positions; hits are resolved for all requests together and
only requests that miss are visited one by one. Arguments were checked by ``kernels/swap_in.py``; what it
could not check without reading values is checked here.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.checks import KernelArgumentError
from kernels.hot_state import ABSENT, EVICTIONS, HITS, MISSES, HotBufferError, HotBufferState

Pools: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""(host, device) pairs, uint8 [num_layers, num_slots, item_bytes], strided as ``check_pool`` allows."""

Ints: TypeAlias = npt.NDArray[np.int64]
Table: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[np.bool_]

NUM_EXACT_AGES = 16
FREE_CLASS = 31
"""Age classes are as many as a warp has lanes, and are told apart in one pass over the entries."""

_NO_SLOTS: Ints = np.empty(0, dtype=np.int64)


def resolve(
    selected: Tensor,
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    state: HotBufferState,
    group: int,
    out: Tensor,
) -> tuple[Ints, Ints]:
    """Fill ``out`` with device slots, update the tables, and return the (host, device) slots to copy."""
    lens, rows = _real_requests(seq_lens, req_rows, num_real_reqs, state)
    out_slots = out.numpy()
    out_slots.fill(ABSENT)
    if not len(rows):
        return _NO_SLOTS, _NO_SLOTS
    positions = selected.numpy()[: len(rows)].astype(np.int64)
    is_valid = (positions >= 0) & (positions < lens[:, None])
    is_bad = ~is_valid & (positions != ABSENT)
    if is_bad.any():
        state.error_flags.numpy()[rows[is_bad.any(axis=1)]] |= HotBufferError.BAD_POSITION
    is_dense = state.capacity.numpy()[rows] == 0
    if is_dense.all():
        out_slots[: len(rows)] = _dense_slots(state, rows, positions, is_valid)
        return _NO_SLOTS, _NO_SLOTS
    if not is_dense.any():
        hot_step = _HotStep(state, group, rows, lens)
        out_slots[: len(rows)] = hot_step.resolve(positions, is_valid)
        return hot_step.copies()
    dense, hisparse = np.flatnonzero(is_dense), np.flatnonzero(~is_dense)
    out_slots[dense] = _dense_slots(state, rows[dense], positions[dense], is_valid[dense])
    hot_step = _HotStep(state, group, rows[hisparse], lens[hisparse])
    out_slots[hisparse] = hot_step.resolve(positions[hisparse], is_valid[hisparse])
    return hot_step.copies()


class _HotStep:
    """One swap-in step of some hisparse rows in one group."""

    def __init__(self, state: HotBufferState, group: int, rows: Ints, lens: Ints) -> None:
        self._position_to_hot = state.position_to_hot[group].numpy()
        self._hot_to_position = state.hot_to_position[group].numpy()
        self._stamps = state.stamps[group].numpy()
        self._hot_slots = state.hot_slots.numpy()
        self._host_slots = state.host_slots.numpy()
        self._counters = state.counters.numpy()
        self._error_flags = state.error_flags.numpy()
        self._rows = rows
        self._lens = lens
        self._capacity = state.capacity.numpy()[rows].astype(np.int64)
        step = state.step[group].numpy()
        step[rows] += 1
        self._now = step[rows]
        self._src_host_slots: list[Ints] = []
        self._dst_device_slots: list[Ints] = []

    def copies(self) -> tuple[Ints, Ints]:
        if not self._src_host_slots:
            return _NO_SLOTS, _NO_SLOTS
        return np.concatenate(self._src_host_slots), np.concatenate(self._dst_device_slots)

    def resolve(self, positions: Ints, is_valid: Mask) -> Table:
        """Device slots [num_reqs, top_k] of ``positions``; ABSENT where not valid or not placeable."""
        self._place_newest()
        rows = self._rows[:, None]
        hot_indices = np.where(
            is_valid, self._position_to_hot[rows, np.where(is_valid, positions, 0)], ABSENT
        )
        hit_req, hit_column = np.nonzero(hot_indices >= 0)
        self._stamps[self._rows[hit_req], hot_indices[hit_req, hit_column]] = self._now[hit_req]
        self._counters[self._rows, HITS] += _num_distinct(hot_indices)
        is_miss = is_valid & (hot_indices < 0)
        for req in np.flatnonzero(is_miss.any(axis=1)).tolist():
            missing = is_miss[req]
            self._take_misses(req, np.unique(positions[req, missing]))
            hot_indices[req, missing] = self._position_to_hot[self._rows[req], positions[req, missing]]
        return np.where(hot_indices >= 0, self._hot_slots[rows, hot_indices], ABSENT)

    def _place_newest(self) -> None:
        """Give every row's newest position its fixed entry, evicting what was there."""
        rows = self._rows
        newest = self._lens - 1
        entries = np.minimum(newest, self._capacity - 1)
        occupants = self._hot_to_position[rows, entries]
        is_evicted = (occupants != ABSENT) & (occupants != newest)
        if is_evicted.any():
            self._position_to_hot[rows[is_evicted], occupants[is_evicted]] = ABSENT
            self._counters[rows[is_evicted], EVICTIONS] += 1
        self._position_to_hot[rows, newest] = entries
        self._hot_to_position[rows, entries] = newest
        self._stamps[rows, entries] = self._now

    def _take_misses(self, req: int, missing: Ints) -> None:
        """Give the ``missing`` positions (ascending, distinct) of one request entries, and plan their
        copies.
        """
        row = self._rows[req]
        self._counters[row, MISSES] += len(missing)
        src_host_slots = self._host_slots[row, missing]
        if (src_host_slots < 0).any():
            self._error_flags[row] |= HotBufferError.NO_HOST_SLOT
            missing, src_host_slots = missing[src_host_slots >= 0], src_host_slots[src_host_slots >= 0]
        capacity = int(self._capacity[req])
        fits = self._lens[req] <= capacity
        entries = missing if fits else self._least_recent(row, capacity, self._now[req], len(missing))
        if len(entries) < len(missing):
            self._error_flags[row] |= HotBufferError.TOO_MANY_MISSES
            missing, src_host_slots = missing[: len(entries)], src_host_slots[: len(entries)]
        evicted = self._hot_to_position[row, entries]
        evicted = evicted[evicted != ABSENT]
        self._position_to_hot[row, evicted] = ABSENT
        self._counters[row, EVICTIONS] += len(evicted)
        self._position_to_hot[row, missing] = entries
        self._hot_to_position[row, entries] = missing
        self._stamps[row, entries] = self._now[req]
        self._src_host_slots.append(src_host_slots)
        self._dst_device_slots.append(self._hot_slots[row, entries].astype(np.int64))

    def _least_recent(self, row: int, capacity: int, now: int, num_wanted: int) -> Ints:
        """Up to ``num_wanted`` entries below ``capacity - 1`` that this step does not use: the oldest age
        class first, within a class in the order of their hot_index.
        """
        ages = age_classes(self._stamps[row, : capacity - 1], now)
        num_taken = min(num_wanted, int(np.count_nonzero(ages)))
        if num_taken == 0:
            return _NO_SLOTS
        # Entries that this step uses are of class 0, so they come last and are never reached.
        order = np.arange(len(ages)) - ages * len(ages)
        oldest = np.argpartition(order, num_taken - 1)[:num_taken]
        taken: Ints = oldest[np.argsort(order[oldest])]
        return taken


def age_classes(stamps: Table, now: int) -> Ints:
    """How long before step ``now`` entries with these ``stamps`` were used: 0 for this step, the age itself
    below NUM_EXACT_AGES, then two classes for every doubling up to FREE_CLASS - 1, FREE_CLASS for free ones.
    """
    ages = now - stamps.astype(np.int64)
    octave = np.frexp(np.maximum(ages, NUM_EXACT_AGES))[1].astype(np.int64) - 1
    half = np.maximum(ages, NUM_EXACT_AGES) >> (octave - 1) & 1
    coarse = np.minimum(NUM_EXACT_AGES + 2 * (octave - 4) + half, FREE_CLASS - 1)
    classes: Ints = np.where(stamps == ABSENT, FREE_CLASS, np.where(ages < NUM_EXACT_AGES, ages, coarse))
    return classes


def place(
    state: HotBufferState, group: int, row: int, num_tokens: int, positions: Tensor
) -> tuple[Ints, Ints]:
    """Enter the positions that ``preload`` warms up in the tables; returns the (host, device) slots to
    copy.
    """
    chosen = warm_positions(state, group, row, num_tokens, positions)
    src_host_slots: Ints = state.host_slots[row].numpy()[chosen]
    if (src_host_slots < 0).any():
        without = int(chosen[src_host_slots < 0][0])
        raise KernelArgumentError(
            f"positions: expected positions with a host slot, row {row} has none for {without}"
        )
    entries = np.arange(len(chosen), dtype=np.int64)
    state.position_to_hot[group, row].numpy()[chosen] = entries
    state.hot_to_position[group, row].numpy()[entries] = chosen
    state.stamps[group, row].numpy()[entries] = 0
    return src_host_slots, state.hot_slots[row].numpy()[entries].astype(np.int64)


def warm_positions(state: HotBufferState, group: int, row: int, num_tokens: int, positions: Tensor) -> Ints:
    """What ``preload`` puts at hot_index 0, 1, …: for tables on any device. Raises KernelArgumentError."""
    capacity = int(state.capacity[row])
    if capacity == 0:
        raise KernelArgumentError(f"row: expected a hisparse row, got row {row}, which is dense")
    if bool((state.hot_to_position[group, row] != ABSENT).any()):
        raise KernelArgumentError(
            f"row: expected an empty hot buffer, got row {row} with entries in group {group}"
        )
    if num_tokens < capacity:
        return np.arange(num_tokens, dtype=np.int64)
    hint = positions.cpu().numpy().astype(np.int64)
    hint = hint[hint != ABSENT]
    if len(hint) and not 0 <= hint.min() <= hint.max() < num_tokens:
        raise KernelArgumentError(
            f"positions: expected values in [0, {num_tokens}), got {hint.min()} to {hint.max()}"
        )
    _, first_seen = np.unique(hint, return_index=True)
    chosen: Ints = hint[np.sort(first_seen)][: capacity - 1]
    return chosen


def copy_items(pools: Pools, layer: int, src_host_slots: Ints, dst_device_slots: Ints) -> None:
    """Copy items of one layer from the host pools to the device pools."""
    if not len(src_host_slots):
        return
    for host, dev in pools:
        dev[layer].numpy()[dst_device_slots] = host[layer].numpy()[src_host_slots]


def backup_newest(
    seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor, state: HotBufferState, pools: Pools
) -> None:
    lens, rows = _real_requests(seq_lens, req_rows, num_real_reqs, state)
    capacity = state.capacity.numpy()[rows]
    is_hisparse = capacity > 0
    lens, rows, capacity = lens[is_hisparse], rows[is_hisparse], capacity[is_hisparse]
    if not len(rows):
        return
    src_device_slots = state.hot_slots.numpy()[rows, np.minimum(lens, capacity) - 1]
    dst_host_slots = state.host_slots.numpy()[rows, lens - 1]
    has_slot = dst_host_slots >= 0
    if not has_slot.all():
        state.error_flags.numpy()[rows[~has_slot]] |= HotBufferError.NO_HOST_SLOT
        src_device_slots, dst_host_slots = src_device_slots[has_slot], dst_host_slots[has_slot]
    for host, dev in pools:
        host.numpy()[:, dst_host_slots] = dev.numpy()[:, src_device_slots]


def newest_slots(
    seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor, state: HotBufferState, out: Tensor
) -> None:
    lens, rows = _real_requests(seq_lens, req_rows, num_real_reqs, state)
    capacity = state.capacity.numpy()[rows]
    newest = (lens - 1)[:, None]
    dense_slots = _dense_slots(state, rows, newest, np.ones_like(newest, dtype=np.bool_))[:, 0]
    hot_slots = state.hot_slots.numpy()[rows, np.minimum(lens, np.maximum(capacity, 1)) - 1]
    out_slots = out.numpy()
    out_slots.fill(ABSENT)
    out_slots[: len(rows)] = np.where(capacity == 0, dense_slots, hot_slots)


def _real_requests(
    seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor, state: HotBufferState
) -> tuple[Ints, Ints]:
    """int64 (seq_lens, req_rows) without the padding, after checks of their values."""
    num_real = int(num_real_reqs)
    if not 0 <= num_real <= seq_lens.shape[0]:
        raise KernelArgumentError(
            f"num_real_reqs: expected a value in [0, {seq_lens.shape[0]}], got {num_real}"
        )
    lens = seq_lens.numpy()[:num_real].astype(np.int64)
    rows = req_rows.numpy()[:num_real].astype(np.int64)
    if num_real and not 1 <= lens.min() <= lens.max() <= state.max_context:
        raise KernelArgumentError(
            f"seq_lens: expected values in [1, {state.max_context}], got {lens.min()} to {lens.max()}"
        )
    if num_real and not 0 <= rows.min() <= rows.max() < state.num_rows:
        raise KernelArgumentError(
            f"req_rows: expected values in [0, {state.num_rows}), got {rows.min()} to {rows.max()}"
        )
    if num_real > 1 and (np.diff(np.sort(rows)) == 0).any():
        raise KernelArgumentError(f"req_rows: expected distinct rows, got {rows.tolist()}")
    return lens, rows


def _dense_slots(state: HotBufferState, rows: Ints, positions: Ints, is_valid: Mask) -> Table:
    """Device slots [num_reqs, n] through the page table; ABSENT where not valid or without a page."""
    pages = np.where(is_valid, positions, 0) // state.page_size
    page_ids = state.page_table.numpy()[rows[:, None], pages]
    slots = page_ids * state.page_size + positions % state.page_size
    return np.where(is_valid & (page_ids != ABSENT), slots, ABSENT)


def _num_distinct(hot_indices: Table) -> Ints:
    """Distinct values other than ABSENT in each row."""
    if hot_indices.shape[1] == 0:
        return np.zeros(len(hot_indices), dtype=np.int64)
    ordered = np.sort(hot_indices, axis=1)
    is_first = np.ones_like(ordered, dtype=np.bool_)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    counts: Ints = (is_first & (ordered >= 0)).sum(axis=1)
    return counts
