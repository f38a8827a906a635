"""Kernel wrappers: single cases and precise errors. Random histories are in ``tests/property``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels import hot_state
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import HITS, HotBufferState
from hisparse_pd.kernels.indexer import gather_pages, index_topk
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import (
    KernelUnavailableError,
    backup_newest,
    newest_slots,
    start_dense_row,
    swap_in,
)
from tests.unit.kernels.one_buffer import (
    CAPACITY,
    HOST_PAGES,
    HOT_PAGES,
    HOT_SLOTS,
    LOOKUP_PAGES,
    NUM_LOOKUP_SLOTS,
    NUM_SLOTS,
    PAGE_SIZE,
    ROW,
    Buffer,
)

TABLES = (
    *("lookup_to_hot", "hot_to_lookup", "stamps", "step", "hot_pages", "capacity", "page_table"),
    *("host_pages", "lookup_pages", "index_pages", "counters", "error_flags"),
)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_overflow_is_flagged_and_leaves_a_consistent_state() -> None:
    buffer = Buffer()
    assert buffer.swap_in(11, [1, 2, 3, 4]) == [HOT_SLOTS[0], HOT_SLOTS[1], HOT_SLOTS[2], -1]
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.TOO_MANY_MISSES
    assert buffer.swap_in(12, [1, 2, 3, -1]) == [*HOT_SLOTS[:3], -1]
    assert buffer.counters()[HITS] == 3


def test_bad_positions_and_missing_host_slots_are_flagged() -> None:
    buffer = Buffer()
    assert buffer.swap_in(5, [5, -3, 0, -1]) == [-1, -1, HOT_SLOTS[0], -1]
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.BAD_POSITION
    buffer.state.set_host_pages(ROW, 1, torch.tensor([-1]), torch.tensor([-1]))
    assert buffer.swap_in(9, [5, 1, -1, -1]) == [-1, HOT_SLOTS[1], -1, -1]
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.BAD_POSITION | HotBufferError.NO_HOST_SLOT
    assert buffer.counters() == [0, 2, 1]


@pytest.mark.I4
def test_without_a_host_slot_for_its_newest_token_a_row_takes_no_step() -> None:
    """Its token could not be backed up. Once it gets the page, the row goes on as if nothing had happened."""
    buffer = Buffer()
    buffer.start(8, [7, 3, 1])
    buffer.state.set_host_pages(ROW, 2, *[torch.full((3,), -1)] * 2)
    tables = ("lookup_to_hot", "hot_to_lookup", "stamps", "step", "counters")
    before = {name: getattr(buffer.state, name).clone() for name in tables}
    host, requests = buffer.k_host.clone(), buffer.requests(9)
    assert newest_slots(requests).tolist() == [-1]
    assert buffer.swap_in(9, [8, 7, 3, 99]) == [-1] * 4
    backup_newest(requests, **buffer.pools)
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.NO_HOST_SLOT
    assert all(torch.equal(getattr(buffer.state, name), table) for name, table in before.items())
    assert torch.equal(buffer.k_host, host)
    buffer.state.set_host_pages(ROW, 2, torch.tensor(HOST_PAGES[2:]), torch.tensor(LOOKUP_PAGES[2:]))
    assert newest_slots(requests).tolist() == [HOT_SLOTS[3]]
    assert buffer.swap_in(9, [8, 7, 3, -1]) == [HOT_SLOTS[3], HOT_SLOTS[0], HOT_SLOTS[1], -1]


def test_pages_that_are_added_before_the_first_slice_stay() -> None:
    """A request may grow while its row waits to be filled."""
    buffer = Buffer()
    row_start = buffer.row_start(8, [7, 3, 1], num_pages=2)
    buffer.state.set_host_pages(ROW, 2, torch.tensor(HOST_PAGES[2:]), torch.tensor(LOOKUP_PAGES[2:]))
    buffer.state.set_index_pages(ROW, 2, torch.tensor([2]))
    row_start.launch_slice(None)
    assert buffer.state.host_pages[ROW].tolist() == HOST_PAGES
    assert buffer.state.lookup_pages[ROW].tolist() == LOOKUP_PAGES
    assert buffer.state.index_pages[ROW].tolist()[:3] == [4, 1, 2]


def test_a_started_row_has_all_its_tables() -> None:
    buffer = Buffer()
    assert buffer.start(10, [7, 3, 7, -1, 1, 9]) == 3
    assert buffer.state.host_pages[ROW].tolist() == HOST_PAGES
    assert buffer.state.lookup_pages[ROW].tolist() == LOOKUP_PAGES
    assert buffer.state.index_pages[ROW].tolist() == [4, 1, 0, 0, 0]
    assert buffer.state.capacity.tolist() == [0, CAPACITY, 0]
    assert buffer.state.hot_pages.tolist() == [[-1, -1], [*HOT_PAGES, -1], [-1, -1]]
    buffer.state.set_index_pages(ROW, 2, torch.tensor([8]))
    start_dense_row(buffer.state, 0, pages=torch.tensor([5, 3]), index_pages=torch.tensor([6]))
    assert buffer.state.page_table[0].tolist() == [5, 3, -1, -1, -1]
    assert buffer.state.index_pages[:2].tolist() == [[6, 0, 0, 0, 0], [4, 1, 8, 0, 0]]
    with pytest.raises(KernelArgumentError, match=r"hints: expected values in \[0, 10\), got 3 to 10"):
        buffer.start(10, [7, 3, 10, -1])
    assert buffer.hot_positions() == [-1] * 6
    with pytest.raises(KernelArgumentError, match=r"num_tokens: expected a value in \[0, 21\), got 21"):
        buffer.start(21, [])


@pytest.mark.I3
def test_without_a_hint_the_latest_positions_are_warm() -> None:
    buffer = Buffer()
    assert buffer.start(10, None) == CAPACITY - 1
    assert buffer.hot_positions() == [9, 8, 7, -1, -1, -1]
    assert buffer.start(3, None) == 3
    assert buffer.hot_positions() == [0, 1, 2, -1, -1, -1]


@pytest.mark.I2
@pytest.mark.parametrize("most_entries", [1, 24, 100])
def test_rows_that_are_emptied_together_leave_others_as_they_are(
    most_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_state, "MAX_DROPPED_ENTRIES", most_entries)
    state, expected = (HotBufferState.create(2, 4, 20, 6, PAGE_SIZE, 80, 32) for _ in range(2))
    for row in range(4):
        pages = torch.arange(2) + 2 * row
        lookup_slots = 2 * PAGE_SIZE * row + torch.arange(6)
        for tables in (state, expected) if row == 2 else (state,):
            tables.assign_row(row, 6, pages, pages, pages)
            tables.set_index_pages(row, 0, pages)
            tables.set_pages(row, 0, pages)
            tables.counters[row] = tables.error_flags[row] = tables.step[:, row] = 1 + row
            slots = tables.entry_slots(row)
            tables.hot_to_lookup[:, slots] = lookup_slots.int()
            tables.stamps[:, slots] = 7
            tables.lookup_to_hot[:, lookup_slots] = torch.arange(6, dtype=torch.int32)
    state.reset_rows(0, 3, 1)
    for name in TABLES:
        assert torch.equal(getattr(state, name), getattr(expected, name)), name


@pytest.mark.I2
def test_reset_row_forgets_everything() -> None:
    buffer = Buffer()
    empty = HotBufferState.create(1, 3, 20, 6, PAGE_SIZE, NUM_LOOKUP_SLOTS, NUM_SLOTS)
    buffer.start(10, [7, 3, 1])
    buffer.swap_in(11, [1, 2, 3, 4])
    buffer.state.reset_rows(ROW)
    for name in TABLES:
        assert torch.equal(getattr(buffer.state, name), getattr(empty, name)), name


def test_errors_name_argument_expectation_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer()
    one = buffer.requests(5)
    lens, rows, num_real = one.seq_lens, one.req_rows, one.num_real_reqs
    selected = torch.zeros((1, 2), dtype=torch.int32)
    good = {"group": 0, "layer": 0, **buffer.pools}

    def failure(*arguments: Tensor, **changed: object) -> str:
        given, *requests = arguments or (selected, lens, rows, num_real)
        with pytest.raises(KernelArgumentError) as caught:
            swap_in(given, StepRequests(buffer.state, *requests), **{**good, **changed})  # type: ignore[arg-type]
        return str(caught.value)

    assert failure(selected.long(), lens, rows, num_real) == (
        "selected: expected dtype torch.int32, got torch.int64"
    )
    assert failure(selected, lens[:0], rows, num_real) == "req_rows: expected shape [0], got [1]"
    assert failure(selected, lens, rows.float(), num_real).startswith("req_rows: expected dtype")
    assert failure(selected, lens, rows + 2, num_real) == "req_rows: expected values in [0, 3), got 3 to 3"
    assert (
        failure(selected, lens + 16, rows, num_real) == "seq_lens: expected values in [1, 20], got 21 to 21"
    )
    assert failure(selected, lens, rows, num_real + 1) == "num_real_reqs: expected a value in [0, 1], got 2"
    assert failure(group=1) == "group: expected a value in [0, 1), got 1"
    assert failure(layer=2) == "layer: expected a value in [0, 2), got 2"
    assert failure(k_host=buffer.k_host[:, :, :7]) == "k_host: expected shape [2, *, 8], got [2, 40, 7]"
    assert failure(k_dev=buffer.k_dev.int()) == "k_dev: expected dtype torch.uint8, got torch.int32"
    assert failure(k_dev=buffer.k_dev[:, :, ::2]) == (
        "k_dev: expected a contiguous tensor, got strides (192, 8, 2)"
    )
    assert failure(k_host=buffer.k_host[:1].expand(2, -1, -1)).endswith("strides (0, 8, 1)")
    assert failure(out=selected[:, :1]) == "out: expected shape [1, 2], got [1, 1]"
    assert failure(miss_plan=MissPlan.create(1, 1)) == "miss_plan: expected room for 2 misses, got 1"
    two = torch.zeros((2, 1), dtype=torch.int32)
    assert failure(two, torch.tensor([5, 5]), torch.tensor([1, 1]), num_real + 1) == (
        "req_rows: expected distinct rows, got [1, 1]"
    )
    with pytest.raises(KernelArgumentError, match="capacity: expected a value in"):
        buffer.state.assign_row(0, 7, torch.arange(2), torch.arange(3), torch.arange(3))
    with pytest.raises(KernelArgumentError, match=r"hot_pages: expected shape \[2\], got \[1\]"):
        buffer.state.assign_row(0, 5, torch.arange(1), torch.arange(3), torch.arange(3))
    with pytest.raises(KernelArgumentError, match=r"hot_pages highest: expected a value in \[0, 6\), got 6"):
        buffer.state.assign_row(0, 5, torch.tensor([0, 6]), torch.arange(3), torch.arange(3))
    with pytest.raises(
        KernelArgumentError, match=r"lookup_pages highest: expected a value in \[0, 12\), got 12"
    ):
        buffer.state.assign_row(0, 3, torch.arange(1), torch.tensor([0, 9]), torch.tensor([0, 12]))
    monkeypatch.setattr("tests.unit.kernels.one_buffer.HOST_PAGES", [7, 3, 6, 2, 10])
    with pytest.raises(
        KernelArgumentError, match=r"host_pages highest: expected a value in \[0, 10\), got 10"
    ):
        buffer.start(3, [])
    with pytest.raises(KernelArgumentError, match="lookup_pages: expected shape"):
        buffer.state.assign_row(0, 3, torch.arange(1), torch.arange(2), torch.arange(3))
    with pytest.raises(
        KernelArgumentError, match=r"number of host_pages: expected a value in \[0, 6\), got 6"
    ):
        buffer.state.assign_row(0, 3, torch.arange(1), torch.arange(6), torch.arange(6))
    with pytest.raises(KernelArgumentError, match="num_lookup_slots: expected whole pages of 4, got 42"):
        HotBufferState.create(1, 3, 20, 6, 4, 42, 24)
    with pytest.raises(KernelArgumentError, match="num_device_slots: expected whole pages of 4, got 23"):
        HotBufferState.create(1, 3, 20, 6, 4, 40, 23)


def test_other_devices_are_refused_by_name() -> None:
    state = HotBufferState.create(1, 1, 4, 2, 4, 4, 4, device="meta")
    ones = torch.ones(1, dtype=torch.int32, device="meta")
    with pytest.raises(KernelUnavailableError, match=r"newest_slots: no kernel for device 'meta'.*'cpu'"):
        newest_slots(StepRequests(state, ones, ones, ones))


@pytest.mark.I5
@pytest.mark.I6
@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 400])
def test_index_topk_matches_a_plain_loop(seq_len: int, generator: torch.Generator) -> None:
    num_heads, head_dim, top_k = 4, 16, 16
    num_tokens = min(seq_len, 50)
    q = torch.randn((num_tokens, num_heads, head_dim), generator=generator)
    weights = torch.randn((num_tokens, num_heads), generator=generator)
    keys = torch.randn((seq_len, head_dim), generator=generator)
    positions = torch.arange(seq_len - num_tokens, seq_len)
    selected = index_topk(q, weights, keys, positions, top_k)
    assert selected.shape == (num_tokens, top_k)
    assert selected.dtype == torch.int32
    for token in range(num_tokens):
        seen = keys[: int(positions[token]) + 1].double()
        scores = weights[token].double() @ torch.relu(q[token].double() @ seen.T * head_dim**-0.5)
        best = scores.topk(min(top_k, len(seen))).values
        row = selected[token].tolist()
        chosen = row[: len(best)]
        assert len(set(chosen)) == len(best)
        # Compare by score, because rectified scores tie at 0 and any of those may be taken.
        torch.testing.assert_close(scores[chosen].sort(descending=True).values, best, rtol=1e-5, atol=1e-6)
        assert row[len(best) :] == [-1] * (top_k - len(best))


@pytest.mark.I6
def test_gather_pages_reads_a_partial_last_page() -> None:
    pool = torch.arange(24).view(12, 2)
    keys = gather_pages(pool, torch.tensor([2, 0, 1]), 4, 6)
    assert keys[:, 0].tolist() == [16, 18, 20, 22, 0, 2]
    with pytest.raises(KernelArgumentError, match="page_ids length: expected at least 2, got 1"):
        gather_pages(pool, torch.tensor([2]), 4, 6)
