"""Swap-in on a CPU, the oracle of the CUDA kernel: same tables, same order of eviction, same bytes.

It works on numpy views of the tables (``hot_state.py``) and keeps no state of its own. ``kernels/swap_in.py``
calls it and has checked the arguments, except for values in tensors, which are checked here. Hits are
resolved for all requests together; only requests with misses are visited one by one.

A swap-in is ``resolve``, which updates the tables and returns the copies to make, and then ``copy_items``. A
position is found in two steps: ``lookup_pages`` has its lookup slot, and ``lookup_to_hot`` that slot's
hot_index, or ABSENT for a miss (``hot_state.py`` has an example). New positions, those of a step's newest
token and its drafts, cannot take any entry: one below the capacity has the entry of its own number, and later
ones take turns in the last ``max_new`` entries, the ring (``step_requests.ring_entries``).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import ABSENT, EVICTIONS, HITS, MISSES, HotBufferState
from hisparse_pd.kernels.reference_check import reference_checks
from hisparse_pd.kernels.row_errors import HotBufferError, ReadAt
from hisparse_pd.kernels.step_requests import StepRequests, ring_entries


class Pools(NamedTuple):
    """The two pools, each uint8 [num_layers, num_slots, item_bytes], contiguous."""

    host: Tensor
    dev: Tensor


Ints: TypeAlias = npt.NDArray[np.int64]
Table: TypeAlias = npt.NDArray[Any]
"""A table of the state, or values from it, mostly int32."""
Mask: TypeAlias = npt.NDArray[np.bool_]

NUM_EXACT_AGES = 16
"""Ages below this number of steps have an age class each."""
FREE_CLASS = 31
"""The last age class. There are as many classes as a warp has lanes: on a GPU it counts all in one pass."""

_NO_SLOTS: Ints = np.empty(0, dtype=np.int64)


class Copies(NamedTuple):
    """Copies from the host to the device pool, each column int64 [num_copies]: the slots, and the req_row and
    position of each item."""

    src_host_slots: Ints
    dst_device_slots: Ints
    req_rows: Ints
    positions: Ints


_NO_COPIES = Copies(_NO_SLOTS, _NO_SLOTS, _NO_SLOTS, _NO_SLOTS)


def resolve(selected: Tensor, requests: StepRequests, group: int, out: Tensor) -> Copies:
    """Fill ``out`` with device slots, update the tables, and return the items to copy.

    ``selected``: int32 [num_reqs * num_new, top_k], positions that each new position selected, ABSENT
    where none. The ``num_new`` new positions of a request are its last ones, those of the newest token and
    its drafts. ``group``: the group whose tables are used. ``out``, of the shape of ``selected``, gets the
    device slots. Raises KernelArgumentError.
    """
    state, num_new = requests.state, requests.num_new
    lens, rows = _real_requests(requests)
    out.fill_(ABSENT)
    active = np.flatnonzero(_flag_without_host_slot(state, lens, rows, num_new))
    if not len(active):
        return _NO_COPIES
    rows, lens = rows[active], lens[active]

    # The selections of all new positions of a request are resolved together, as one list.
    positions = selected.numpy().reshape(requests.num_reqs, -1)[active].astype(np.int64)
    is_bad = (positions != ABSENT) & ((positions < 0) | (positions >= lens[:, None]))
    state.error_flags.numpy()[rows[is_bad.any(axis=1)]] |= HotBufferError.BAD_POSITION
    # Drafts beyond the context or the request's pages do not exist; selecting them has no effect.
    first_new = lens - num_new
    ends = first_new + _num_new_with_page(state, rows, lens, num_new)
    is_valid = (positions >= 0) & (positions < ends[:, None])

    is_dense = state.capacity.numpy()[rows] == 0
    dense, hot = np.flatnonzero(is_dense), np.flatnonzero(~is_dense)
    out_slots = out.numpy().reshape(requests.num_reqs, -1)
    out_slots[active[dense]] = _dense_slots(state, rows[dense], positions[dense], is_valid[dense])
    hot_step = _HotStep(state, group, rows[hot], first_new[hot], ends[hot])
    out_slots[active[hot]] = hot_step.resolve(positions[hot], is_valid[hot])
    return hot_step.copies()


class _HotStep:
    """One swap-in step of some hisparse rows in one group. Each row's new positions are [first_new, ends).

    ``resolve`` is called once; ``copies`` then returns the copies of all misses.
    """

    def __init__(self, state: HotBufferState, group: int, rows: Ints, first_new: Ints, ends: Ints) -> None:
        self._lookup_to_hot = state.lookup_to_hot[group].numpy()
        self._hot_to_lookup = state.hot_to_lookup[group].numpy()
        self._stamps = state.stamps[group].numpy()
        self._counters = state.counters.numpy()
        self._error_flags = state.error_flags.numpy()
        self._state = state
        self._rows = rows
        self._first_new = first_new
        self._ends = ends
        self._capacity = state.capacity.numpy()[rows].astype(np.int64)
        step = state.step[group].numpy()
        step[rows] += 1
        self._now = step[rows]
        """The stamp of each row's entries that this step uses."""
        self._copies: list[Copies] = []

    def copies(self) -> Copies:
        if not self._copies:
            return _NO_COPIES
        return Copies(*(np.concatenate(parts) for parts in zip(*self._copies, strict=True)))

    def resolve(self, positions: Ints, is_valid: Mask) -> Table:
        """Return device slots of ``positions`` [num_reqs, n]; ABSENT where not valid or without an entry."""
        self._place_newest()

        # Look all positions up. Hits are stamped here, before a miss looks for entries that are not in use.
        rows = self._rows[:, None]
        lookup_slots = np.where(
            is_valid, lookup_slots_of(self._state, rows, np.where(is_valid, positions, 0)), ABSENT
        )
        lacks_slot = (is_valid & (lookup_slots < 0)).any(axis=1)
        self._error_flags[self._rows[lacks_slot]] |= HotBufferError.NO_HOST_SLOT
        hot_indices = np.where(lookup_slots >= 0, self._lookup_to_hot[lookup_slots], ABSENT)
        hit_req, hit_column = np.nonzero(hot_indices >= 0)
        hit_slots = hot_slots_of(self._state, self._rows[hit_req], hot_indices[hit_req, hit_column])
        self._stamps[hit_slots] = self._now[hit_req]
        self._counters[self._rows, HITS] += _num_distinct(hot_indices)

        is_miss = (lookup_slots >= 0) & (hot_indices < 0)
        for req in np.flatnonzero(is_miss.any(axis=1)).tolist():
            missing_slots = lookup_slots[req, is_miss[req]]
            missing, columns = np.unique(positions[req, is_miss[req]], return_index=True)
            self._place_misses(req, missing, missing_slots[columns])
            hot_indices[req, is_miss[req]] = self._lookup_to_hot[missing_slots]
        slots = hot_slots_of(self._state, rows, np.maximum(hot_indices, 0))
        return np.where(hot_indices >= 0, slots, ABSENT)

    def _place_newest(self) -> None:
        """Give every row's new positions the entries that ``ring_entries`` fixes, and evict the former
        occupants."""
        num_new = self._ends - self._first_new
        req, offset = np.nonzero(np.arange(num_new.max(initial=0)) < num_new[:, None])
        rows, positions = self._rows[req], self._first_new[req] + offset
        lookup_slots = lookup_slots_of(self._state, rows, positions)
        entries = ring_entries(positions, self._capacity[req], self._state.max_new)
        slots = hot_slots_of(self._state, rows, entries)
        occupants = self._hot_to_lookup[slots]
        is_evicted = (occupants != ABSENT) & (occupants != lookup_slots)
        self._lookup_to_hot[occupants[is_evicted]] = ABSENT
        np.add.at(self._counters, (rows[is_evicted], EVICTIONS), 1)
        self._lookup_to_hot[lookup_slots] = entries
        self._hot_to_lookup[slots] = lookup_slots
        self._stamps[slots] = self._now[req]

    def _place_misses(self, req: int, missing: Ints, lookup_slots: Ints) -> None:
        """Give entries to positions of one request that are not in its hot buffer, and plan their copies.

        ``missing``: the positions, ascending and distinct. ``lookup_slots``: their lookup slots.
        """
        row = self._rows[req]
        self._counters[row, MISSES] += len(missing)
        capacity = int(self._capacity[req])
        ring_start = capacity - self._state.max_new
        # A row fits while max_new positions from its first new one on are below the capacity: then every
        # position has the entry of its own number (``ring_entries``).
        fits = self._first_new[req] <= ring_start
        entries = missing if fits else self._least_recent(row, ring_start, self._now[req], len(missing))
        if len(entries) < len(missing):
            self._error_flags[row] |= HotBufferError.TOO_MANY_MISSES
            missing, lookup_slots = missing[: len(entries)], lookup_slots[: len(entries)]
        slots = hot_slots_of(self._state, row, entries)
        evicted = self._hot_to_lookup[slots]
        evicted = evicted[evicted != ABSENT]
        self._lookup_to_hot[evicted] = ABSENT
        self._counters[row, EVICTIONS] += len(evicted)
        self._lookup_to_hot[lookup_slots] = entries
        self._hot_to_lookup[slots] = lookup_slots
        self._stamps[slots] = self._now[req]
        self._copies.append(copies_of(self._state, int(row), missing, entries))

    def _least_recent(self, row: int, ring_start: int, now: int, num_wanted: int) -> Ints:
        """Return up to ``num_wanted`` entries below ``ring_start`` that this step does not use: the oldest
        age class first, and within a class in the order of their hot_index.
        """
        movable = hot_slots_of(self._state, row, np.arange(ring_start))
        ages = age_classes(self._stamps[movable], now)
        num_taken = min(num_wanted, int(np.count_nonzero(ages)))
        if num_taken == 0:
            return _NO_SLOTS
        # Keys order entries by age class, the oldest first, then by hot_index. Entries that this step uses
        # have class 0, so they come last and are never taken.
        sort_keys = np.arange(len(ages)) - ages * len(ages)
        oldest = np.argpartition(sort_keys, num_taken - 1)[:num_taken]
        taken: Ints = oldest[np.argsort(sort_keys[oldest])]
        return taken


def age_classes(stamps: Table, now: int) -> Ints:
    """Return the age classes of entries with these ``stamps`` in step ``now``: the age itself below
    NUM_EXACT_AGES (0 for this step), then two classes for every doubling up to FREE_CLASS - 1, and FREE_CLASS
    for free entries. Class 16 has the ages 16 to 23, 17 those from 24 on, 18 those from 32 on, and 30 those
    from 2048 on.
    """
    ages = now - stamps.astype(np.int64)
    # An age in [2^octave, 2^(octave + 1)) is in the first or the second half of its octave.
    octave = np.frexp(np.maximum(ages, NUM_EXACT_AGES))[1].astype(np.int64) - 1
    half = np.maximum(ages, NUM_EXACT_AGES) >> (octave - 1) & 1
    coarse = np.minimum(NUM_EXACT_AGES + 2 * (octave - 4) + half, FREE_CLASS - 1)
    classes: Ints = np.where(stamps == ABSENT, FREE_CLASS, np.where(ages < NUM_EXACT_AGES, ages, coarse))
    return classes


def enter_warm_positions(state: HotBufferState, group: int, row: int, positions: Ints) -> None:
    """Record in the tables that ``positions`` are in ``row``'s hot buffer, which was empty, from hot_index 0
    on."""
    lookup_slots = lookup_slots_of(state, row, positions)
    entries = np.arange(len(positions))
    slots = hot_slots_of(state, row, entries)
    state.lookup_to_hot[group].numpy()[lookup_slots] = entries
    state.hot_to_lookup[group].numpy()[slots] = lookup_slots
    state.stamps[group].numpy()[slots] = 0


def copies_of(state: HotBufferState, row: int, positions: Ints, entries: Ints) -> Copies:
    """Return the copies of one row's ``positions`` to the hot_indices ``entries``."""
    rows = np.full_like(positions, row)
    return Copies(host_slots_of(state, rows, positions), hot_slots_of(state, rows, entries), rows, positions)


def copy_items(
    pools: Pools, layer: int, copies: Copies, state: HotBufferState | None, read_at: ReadAt
) -> None:
    """Copy items of one layer from the host pool to the device pool, and verify the copied bytes.

    ``state``: has the items' row checks; without it, or without checks in it, nothing is verified.
    ``read_at``: why they are copied, to be recorded with a wrong item.
    """
    if not len(copies.positions):
        return
    items = pools.host[layer].numpy()[copies.src_host_slots]
    pools.dev[layer].numpy()[copies.dst_device_slots] = items
    if state is not None and state.row_checks is not None:
        _verify(state, state.row_checks[layer], torch.from_numpy(items), layer, copies, read_at)


def _verify(
    state: HotBufferState, row_checks: Tensor, items: Tensor, layer: int, copies: Copies, read_at: ReadAt
) -> None:
    """Compare copied ``items`` with their row checks, and record each row's first wrong item and its flag."""
    rows, positions = copies.req_rows, copies.positions
    # An item's check is at the slot of the position's indexer key.
    check_slots = _slots_of(state.index_pages, state.page_size, rows, positions)
    expected = row_checks.numpy()[check_slots]
    actual = reference_checks(items, layer, torch.from_numpy(positions)).numpy()
    flags = state.error_flags.numpy()
    for i in np.flatnonzero(expected != actual).tolist():
        if flags[rows[i]] & HotBufferError.WRONG_ROW:
            continue
        flags[rows[i]] |= HotBufferError.WRONG_ROW
        record = (read_at, layer, positions[i], copies.src_host_slots[i], expected[i], actual[i])
        state.wrong_rows.numpy()[rows[i]] = record


def backup_newest(requests: StepRequests, pools: Pools, num_newest: Tensor | None = None) -> None:
    """Copy the newest items of hisparse requests from the device to the host pool, in all layers.

    These are each request's last ``num_newest`` positions, or its last one (``swap_in.backup_newest``).
    Raises KernelArgumentError.
    """
    state, (host, dev) = requests.state, pools
    lens, rows = _real_requests(requests)
    if num_newest is not None:
        nums = num_newest.numpy()[: len(rows)].astype(np.int64)
        is_bad = (nums < 0) | (nums > np.minimum(lens, state.max_new))
        if is_bad.any():
            raise KernelArgumentError(
                f"num_newest: expected values in [0, {state.max_new}] and up to seq_lens, "
                f"got {nums[is_bad].tolist()} for {lens[is_bad].tolist()}"
            )
        req = np.repeat(np.arange(len(rows)), nums)
        # A request's positions are a run of the flat arrays, up to index ``end``. The run's last one is
        # len - 1, so the one at ``index`` is len - end + index.
        ends = np.repeat(np.cumsum(nums), nums)
        rows, positions = rows[req], lens[req] - ends + np.arange(len(req))
    else:
        positions = lens - 1

    capacity = state.capacity.numpy()[rows].astype(np.int64)
    dst_host_slots = host_slots_of(state, rows, positions)
    state.error_flags.numpy()[rows[(capacity > 0) & (dst_host_slots < 0)]] |= HotBufferError.NO_HOST_SLOT
    is_backed_up = dst_host_slots >= 0
    rows, positions, capacity = rows[is_backed_up], positions[is_backed_up], capacity[is_backed_up]
    dst_host_slots = dst_host_slots[is_backed_up]

    has_page = np.ones(len(rows), bool)[:, None]
    page_slots = _dense_slots(state, rows, positions[:, None], has_page)[:, 0]
    # Rows without a hot buffer have capacity 0. Their ring entries are not used, but must be valid indices.
    entries = ring_entries(positions, np.maximum(capacity, state.max_new), state.max_new)
    src_device_slots = np.where(capacity == 0, page_slots, hot_slots_of(state, rows, entries))
    is_there = src_device_slots >= 0  # not so in a resident row without a page for its newest item
    state.error_flags.numpy()[rows[~is_there]] |= HotBufferError.NO_HOST_SLOT
    host.numpy()[:, dst_host_slots[is_there]] = dev.numpy()[:, src_device_slots[is_there]]


def newest_slots(requests: StepRequests, out: Tensor) -> None:
    """Fill ``out`` with the device slots to which the model writes new items (``kernels.swap_in``)."""
    state, num_new = requests.state, requests.num_new
    lens, rows = _real_requests(requests)
    capacity = state.capacity.numpy()[rows].astype(np.int64)[:, None]
    _flag_without_host_slot(state, lens, rows, num_new)
    offsets = np.arange(num_new)
    positions = lens[:, None] - num_new + offsets
    has_page = offsets < _num_new_with_page(state, rows, lens, num_new)[:, None]
    dense_slots = _dense_slots(state, rows, positions, has_page)
    # Dense rows have capacity 0. Their ring entries are not used, but must be valid indices.
    entries = ring_entries(positions, np.maximum(capacity, state.max_new), state.max_new)
    hot_slots = np.where(has_page, hot_slots_of(state, rows[:, None], entries), ABSENT)
    out_slots = out.numpy().reshape(requests.num_reqs, num_new)
    out_slots.fill(ABSENT)
    out_slots[: len(rows)] = np.where(capacity == 0, dense_slots, hot_slots)


def _real_requests(requests: StepRequests) -> tuple[Ints, Ints]:
    """Check the values of seq_lens and req_rows, and return both as int64 without the padding."""
    state, num_new, num_real = requests.state, requests.num_new, int(requests.num_real_reqs)
    if not 0 <= num_real <= requests.num_reqs:
        raise KernelArgumentError(
            f"num_real_reqs: expected a value in [0, {requests.num_reqs}], got {num_real}"
        )
    lens = requests.seq_lens.numpy()[:num_real].astype(np.int64)
    rows = requests.req_rows.numpy()[:num_real].astype(np.int64)
    longest = state.max_context + num_new - 1  # drafts may be beyond the context
    if num_real and not num_new <= lens.min() <= lens.max() <= longest:
        raise KernelArgumentError(
            f"seq_lens: expected values in [{num_new}, {longest}], got {lens.min()} to {lens.max()}"
        )
    if num_real and not 0 <= rows.min() <= rows.max() < state.num_rows:
        raise KernelArgumentError(
            f"req_rows: expected values in [0, {state.num_rows}), got {rows.min()} to {rows.max()}"
        )
    if num_real > 1 and (np.diff(np.sort(rows)) == 0).any():
        raise KernelArgumentError(f"req_rows: expected distinct rows, got {rows.tolist()}")
    return lens, rows


def host_slots_of(state: HotBufferState, rows: Ints, positions: Ints) -> Ints:
    """Return host slots of ``positions`` in ``rows``, which broadcast; ABSENT where there is none."""
    return _slots_of(state.host_pages, state.page_size, rows, positions)


def lookup_slots_of(state: HotBufferState, rows: Ints | int, positions: Ints) -> Ints:
    """Return lookup slots of ``positions`` in ``rows``, which broadcast; ABSENT where there is none."""
    return _slots_of(state.lookup_pages, state.page_size, rows, positions)


def hot_slots_of(state: HotBufferState, rows: Ints | int, entries: Ints) -> Ints:
    """Return device slots of ``entries`` of the hot buffers of ``rows``, which broadcast; ABSENT where there
    is none."""
    return _slots_of(state.hot_pages, state.page_size, rows, entries)


def _slots_of(pages: Tensor, page_size: int, rows: Ints | int, positions: Ints) -> Ints:
    page_ids = pages.numpy()[rows, positions // page_size].astype(np.int64)
    slots: Ints = np.where(page_ids == ABSENT, ABSENT, page_ids * page_size + positions % page_size)
    return slots


def _num_new_with_page(state: HotBufferState, rows: Ints, lens: Ints, num_new: int) -> Ints:
    """Return how many of each request's ``num_new`` new positions, from the first one on, are inside the
    context and have a page in the pool that the row uses.
    """
    positions = lens[:, None] - num_new + np.arange(num_new)
    pages = np.minimum(positions, state.max_context - 1) // state.page_size
    is_hisparse = state.capacity.numpy()[rows][:, None] > 0
    page_ids = np.where(
        is_hisparse,
        state.host_pages.numpy()[rows[:, None], pages],
        state.page_table.numpy()[rows[:, None], pages],
    )
    has_page = (positions < state.max_context) & (page_ids != ABSENT)
    num_with_page: Ints = np.logical_and.accumulate(has_page, axis=1).sum(axis=1)
    return num_with_page


def _flag_without_host_slot(state: HotBufferState, lens: Ints, rows: Ints, num_new: int) -> Mask:
    """Flag hisparse requests that have no host slot for their first new position. Returns which requests are
    not flagged, and so take part in the step."""
    first_slots = host_slots_of(state, rows, lens - num_new)
    lacks_slot = (state.capacity.numpy()[rows] > 0) & (first_slots < 0)
    state.error_flags.numpy()[rows[lacks_slot]] |= HotBufferError.NO_HOST_SLOT
    takes_part: Mask = ~lacks_slot
    return takes_part


def _dense_slots(state: HotBufferState, rows: Ints, positions: Ints, is_valid: Mask) -> Table:
    """Return device slots [num_reqs, n] from the page table; ABSENT where not valid or without a page."""
    pages = np.where(is_valid, positions, 0) // state.page_size
    page_ids = state.page_table.numpy()[rows[:, None], pages]
    slots = page_ids * state.page_size + positions % state.page_size
    return np.where(is_valid & (page_ids != ABSENT), slots, ABSENT)


def _num_distinct(hot_indices: Table) -> Ints:
    """Return the number of distinct values other than ABSENT in each row."""
    if hot_indices.shape[1] == 0:
        return np.zeros(len(hot_indices), dtype=np.int64)
    ordered = np.sort(hot_indices, axis=1)
    is_first = np.ones_like(ordered, dtype=np.bool_)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    counts: Ints = (is_first & (ordered >= 0)).sum(axis=1)
    return counts
