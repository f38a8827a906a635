"""Helpers of the CUDA swap-in's tests: the device, and the comparison of a step with the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.hot_state import ABSENT, HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.reference import resolve as expected_resolve
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.step_requests import StepRequests, ring_entries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xA5
"""Every byte of a pool that must not be read or written."""

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device: the swap-in kernel runs on NVIDIA GPUs only"),
]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Make operations that wait for the GPU raise, as far as torch detects them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch has already set the mode when it warns, so the mode must be reset too.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def on_host(state: HotBufferState) -> HotBufferState:
    """Copy the tables to the CPU."""
    tensors: dict[str, Any] = {
        f.name: value.to("cpu", copy=True)
        for f in dataclasses.fields(state)
        if isinstance(value := getattr(state, f.name), Tensor)
    }
    return dataclasses.replace(state, **tensors)


def requests_on_host(requests: StepRequests, state: HotBufferState) -> StepRequests:
    """Return the same requests on tables of the CPU."""
    seq_lens, req_rows, num_real = (
        requests.seq_lens.cpu(),
        requests.req_rows.cpu(),
        requests.num_real_reqs.cpu(),
    )
    return StepRequests(state, seq_lens, req_rows, num_real, requests.num_new)


def assert_same_tables(state: HotBufferState, expected: HotBufferState) -> None:
    """Compare all tables but ``wrong_rows``, because which of several wrong rows came first may differ."""
    for f in dataclasses.fields(state):
        if f.name != "wrong_rows" and isinstance(value := getattr(state, f.name), Tensor):
            assert torch.equal(value.cpu(), getattr(expected, f.name)), f.name


def check_step(
    before: HotBufferState,
    selected: Tensor,
    requests: StepRequests,
    out: Tensor,
    *,
    group: int = 0,
    miss_plan: MissPlan | None = None,
) -> None:
    """Compare the tables, ``out`` and the plan after a swap-in of ``requests`` with the reference's.
    ``before``, ``selected`` and ``out`` are on the CPU.

    The kernel may choose which miss of a request takes which victim and, if there are too few victims, which
    misses are served. The victims themselves, all stamps and everything else must be equal.
    """
    expected, expected_out = on_host(before), torch.empty_like(selected)
    expected_requests, num_new = requests_on_host(requests, expected), requests.num_new
    src_host_slots = expected_resolve(selected, expected_requests, group, expected_out).src_host_slots
    # The selections of a request's new positions count as one.
    shape = (requests.num_reqs, num_new * selected.shape[1])
    selected, out, expected_out = selected.view(shape), out.view(shape), expected_out.view(shape)
    after = on_host(requests.state)
    for tables in (after, expected):  # the reference only plans here, so it verifies nothing
        tables.error_flags.bitwise_and_(~HotBufferError.WRONG_ROW)
    for name in ("counters", "error_flags", "step", "stamps",
                 "hot_pages", "capacity", "page_table", "host_pages", "lookup_pages",
                 "index_pages"):  # fmt: skip
        assert torch.equal(getattr(after, name), getattr(expected, name)), name

    num_real = int(requests.num_real_reqs)
    rows, lens = expected_requests.req_rows[:num_real].long(), expected_requests.seq_lens[:num_real].long()
    positions = selected[:num_real].long()
    capacity = before.capacity[rows].long()[:, None]
    new = lens[:, None] - num_new + torch.arange(num_new)
    new_pages = before.host_pages[rows[:, None], new.clamp(max=before.max_context - 1) // before.page_size]
    has_slot = (capacity > 0) & (new < before.max_context) & (new_pages >= 0)
    first_new, end = new[:, :1], new[:, :1] + has_slot.sum(dim=1, keepdim=True)
    entries = torch.from_numpy(
        ring_entries(new.numpy(), capacity.clamp(min=before.max_new).numpy(), before.max_new)
    )
    # the last column stands for no entry
    is_taken = torch.zeros((num_real, before.max_capacity + 1), dtype=torch.bool)
    is_taken[torch.nonzero(has_slot).unbind(1)[0], entries[has_slot]] = True
    is_valid = (positions >= 0) & (positions < end) & (capacity > 0)
    row_of = rows[:, None].expand_as(positions)
    known = positions.clamp(0, before.max_context - 1)
    page_ids = before.lookup_pages[row_of, known // before.page_size].long()
    lookup_slots = torch.where(
        is_valid & (page_ids >= 0), page_ids * before.page_size + known % before.page_size, ABSENT
    )
    hot_index = before.lookup_to_hot[group, lookup_slots]  # ABSENT reads the last slot, which is empty
    is_hit = ((hot_index >= 0) & ~is_taken.gather(1, hot_index.long() % is_taken.shape[1])) | (
        (positions >= first_new) & (positions < end)
    )
    is_miss = torch.zeros_like(selected, dtype=torch.bool)
    is_miss[:num_real] = (lookup_slots >= 0) & ~is_hit
    is_missing = torch.zeros(before.num_lookup_slots + 1, dtype=torch.bool)
    is_missing[lookup_slots[is_miss[:num_real]]] = True

    def got_a_miss(tables: HotBufferState) -> Tensor:
        """Return which entries hold a position that this step missed."""
        result = torch.zeros_like(tables.hot_to_lookup, dtype=torch.bool)
        result[group] = is_missing[tables.hot_to_lookup[group].long()]
        return result

    taken = got_a_miss(expected)
    assert torch.equal(got_a_miss(after), taken), "other entries were taken"
    assert torch.equal(after.hot_to_lookup[~taken], expected.hot_to_lookup[~taken]), "hot_to_lookup"
    inverse = torch.full_like(after.lookup_to_hot, ABSENT)
    row_of_slot, entry_of_slot = places_of(after)
    used = torch.nonzero(after.hot_to_lookup >= 0).unbind(1)
    inverse[used[0], after.hot_to_lookup[used].long()] = entry_of_slot[used[1]].int()
    assert torch.equal(after.lookup_to_hot, inverse), "lookup_to_hot is not the inverse"

    assert torch.equal(out[~is_miss], expected_out[~is_miss]), "device slots of hits"
    entry = after.lookup_to_hot[group, lookup_slots].long()
    entry_pages = after.hot_pages[row_of, entry.clamp(min=0) // after.page_size]
    slots = torch.where(entry >= 0, entry_pages * after.page_size + entry % after.page_size, ABSENT)
    assert torch.equal(out[is_miss], slots[is_miss[:num_real]]), "device slots of misses"

    if miss_plan is not None:
        device_slots = torch.nonzero(taken[group]).flatten()
        row, lookup_slots = row_of_slot[device_slots], after.hot_to_lookup[group, device_slots].long()
        page_number = (after.lookup_pages[row] == (lookup_slots // after.page_size)[:, None]).int().argmax(1)
        host_slots = after.host_pages[row, page_number] * after.page_size + lookup_slots % after.page_size
        copies = torch.stack((device_slots, host_slots.long()))
        num_misses = int(miss_plan.num_misses)
        assert num_misses == len(src_host_slots), f"{num_misses} planned copies for {len(src_host_slots)}"
        planned = torch.stack(
            (miss_plan.dst_device_slots[:num_misses].cpu(), miss_plan.src_host_slots[:num_misses].cpu())
        )
        in_order = [pairs[:, pairs[0].argsort()] for pairs in (planned, copies)]
        assert torch.equal(*in_order), "the plan holds other copies"


def places_of(state: HotBufferState) -> tuple[Tensor, Tensor]:
    """Return the row and the hot_index of each device slot, ABSENT where it is no entry."""
    row_of_slot, entry_of_slot = torch.full((2, state.hot_to_lookup.shape[1]), ABSENT)
    for row, capacity in enumerate(state.capacity.tolist()):
        slots = state.entry_slots(row)[:capacity]
        row_of_slot[slots], entry_of_slot[slots] = row, torch.arange(capacity)
    return row_of_slot, entry_of_slot


def padded(positions: Sequence[int], top_k: int) -> Tensor:
    """Return ``positions`` as int32 [top_k], padded with ABSENT."""
    row = torch.full((top_k,), ABSENT, dtype=torch.int32)
    row[: len(positions)] = torch.tensor(positions, dtype=torch.int32)
    return row
