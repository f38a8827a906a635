"""Swap-in of several new positions a request: exact results on small cases, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.checks import KernelArgumentError
from kernels.hot_state import HotBufferError, HotBufferState
from kernels.swap_in import backup_newest, newest_slots, swap_in
from tests.unit.kernels.one_buffer import HOST_PAGES, HOST_SLOTS, HOT_SLOTS, LOOKUP_PAGES, ROW, Buffer
from tests.unit.kernels.table_rules import check_consistency

MAX_NEW = 2


class Drafting(Buffer):
    """Capacity 4: two entries that others share, and the ring. Only the first pages are there."""

    def __init__(self, num_pages: int = 5) -> None:
        super().__init__(MAX_NEW)
        pages = torch.tensor(HOST_PAGES[:num_pages]), torch.tensor(LOOKUP_PAGES[:num_pages])
        self.state.assign_row(ROW, torch.tensor(HOT_SLOTS), *pages)

    def make_dense(self, pages: Tensor) -> None:
        self.state.reset_row(ROW)
        self.state.set_pages(ROW, 0, pages)

    def new_slots(self, first_new: int, num_new: int) -> list[int]:
        slots = newest_slots(self.requests(first_new + num_new, num_new))
        result: list[int] = slots.tolist()
        return result

    def step(self, first_new: int, selected: list[list[int]], byte: int = 0) -> list[list[int]]:
        """The model writes ``byte``, one more in each new position, and selects."""
        num_new = len(selected)
        for i, slot in enumerate(self.new_slots(first_new, num_new)):
            if slot >= 0:
                self.k_dev[:, slot] = byte + i
        out = swap_in(
            torch.tensor(selected, dtype=torch.int32),
            self.requests(first_new + num_new, num_new),
            group=0,
            layer=0,
            miss_plan=self.plan,
            **self.pools,
        )
        check_consistency(self.state, {ROW: first_new + num_new}, {ROW: num_new})
        result: list[list[int]] = out.tolist()
        return result

    def back_up(self, seq_len: int, num_newest: int) -> None:
        nums = torch.tensor([num_newest], dtype=torch.int32)
        backup_newest(self.requests(seq_len), num_newest=nums, **self.pools)

    def bytes_on_host(self, position: int) -> Tensor:
        return self.k_host[:, HOST_SLOTS[position]].unique()


def test_what_several_positions_select_is_fetched_and_counted_once() -> None:
    buffer = Drafting()
    out = buffer.step(10, [[3, 7, 10], [7, 3, 11]])
    assert out == [[HOT_SLOTS[0], HOT_SLOTS[1], HOT_SLOTS[2]], [HOT_SLOTS[1], HOT_SLOTS[0], HOT_SLOTS[3]]]
    assert int(buffer.plan.num_misses) == 2
    assert buffer.counters() == [2, 2, 0]
    assert torch.equal(buffer.k_dev[0, HOT_SLOTS[1]], buffer.k_host[0, HOST_SLOTS[7]])


def test_new_positions_have_their_own_entries_and_then_the_ring_in_turn() -> None:
    buffer = Drafting()
    entries = [[HOT_SLOTS.index(slot) for slot in buffer.new_slots(first, 2)] for first in range(7)]
    assert entries == [[0, 1], [1, 2], [2, 3], [3, 2], [2, 3], [3, 2], [2, 3]]
    assert buffer.new_slots(5, 1) == buffer.new_slots(5, 2)[:1]


@pytest.mark.I3
@pytest.mark.I4
def test_a_rejected_draft_reaches_neither_the_host_nor_a_later_step() -> None:
    buffer = Drafting()
    before = buffer.k_host.clone()
    buffer.step(10, [[0], [11]], byte=100)
    buffer.back_up(11, 1)  # position 11 is rejected
    assert buffer.bytes_on_host(10).tolist() == [100]
    assert torch.equal(buffer.k_host[:, HOST_SLOTS[11]], before[:, HOST_SLOTS[11]])
    # In between another step of one position, in which nobody can ask for 12 or more.
    ((slot, newest, _),) = buffer.step(11, [[10, 11, -1]], byte=150)
    assert (buffer.k_dev[:, newest] == 150).all()
    assert (buffer.k_dev[:, slot] == 100).all()
    buffer.back_up(12, 1)
    assert buffer.bytes_on_host(11).tolist() == [150]
    out = buffer.step(12, [[11, 12], [11, 13]], byte=200)
    assert buffer.k_dev[0, out[0]].unique().tolist() == [150, 200]
    assert buffer.k_dev[0, out[1]].unique().tolist() == [150, 201]
    buffer.back_up(14, 2)
    assert [buffer.bytes_on_host(p).tolist() for p in (12, 13)] == [[200], [201]]
    assert buffer.counters()[2] == 2  # 10 and 11, from the ring by those that are new now


@pytest.mark.I3
def test_a_row_whose_drafts_are_rejected_does_not_fit_again() -> None:
    """With drafts it has outgrown its buffer; by its last position alone it would fit in the step after."""
    buffer = Drafting()
    assert buffer.step(3, [[0, 2], [1, 2]]) == [[HOT_SLOTS[0], -1], [HOT_SLOTS[1], -1]]  # 2 finds no entry
    buffer.back_up(4, 0)
    (out,) = buffer.step(3, [[1, 0, 3]])
    items = buffer.k_dev[0, out[:2]]
    assert torch.equal(items, buffer.k_host[0, [HOST_SLOTS[1], HOST_SLOTS[0]]])
    buffer = Drafting()
    buffer.step(3, [[1, -1], [-1, -1]])  # to hot_index 0, which is not its own
    (out,) = buffer.step(3, [[1, 0, 3]])
    for slot, position in zip(out, (1, 0), strict=False):
        assert torch.equal(buffer.k_dev[0, slot], buffer.k_host[0, HOST_SLOTS[position]])


@pytest.mark.I6
def test_a_draft_without_a_page_has_no_slot_and_changes_nothing() -> None:
    buffer = Drafting(num_pages=3)
    assert buffer.new_slots(11, 2) == [HOT_SLOTS[3], -1]
    out = buffer.step(11, [[11, 5], [12, 5]])
    assert out == [[HOT_SLOTS[3], HOT_SLOTS[0]], [-1, HOT_SLOTS[0]]]
    assert buffer.hot_positions()[:4] == [5, -1, -1, 11]
    assert not buffer.state.error_flags.any()
    # Without a page for the first one there is no step.
    assert buffer.new_slots(12, 2) == [-1, -1]
    assert buffer.step(12, [[5, -1], [-1, -1]]) == [[-1, -1], [-1, -1]]
    assert buffer.state.error_flags[ROW] == HotBufferError.NO_HOST_SLOT


@pytest.mark.I6
@pytest.mark.parametrize("is_dense", [False, True])
def test_drafts_behind_the_context_are_not_there(is_dense: bool) -> None:
    buffer = Drafting()
    if is_dense:
        buffer.make_dense(torch.arange(5))
    last = 19 if is_dense else HOT_SLOTS[3]
    assert buffer.new_slots(19, 2) == [last, -1]
    assert buffer.step(19, [[19, -1], [20, 19]]) == [[last, -1], [-1, last]]
    assert not buffer.state.error_flags.any()
    assert buffer.step(19, [[21, -1], [-1, -1]]) == [[-1, -1], [-1, -1]]
    assert buffer.state.error_flags[ROW] == HotBufferError.BAD_POSITION
    with pytest.raises(KernelArgumentError, match=r"seq_lens: expected values in \[2, 21\], got 22 to 22"):
        buffer.new_slots(20, 2)


def test_dense_rows_have_a_slot_for_each_new_position() -> None:
    buffer = Drafting()
    buffer.make_dense(torch.tensor([3, 1]))
    assert buffer.new_slots(3, 2) == [15, 4]
    assert buffer.new_slots(7, 2) == [7, -1]
    assert buffer.step(3, [[3, 4], [4, -1]]) == [[15, 4], [4, -1]]


def test_a_warm_row_leaves_room_for_a_whole_ring() -> None:
    buffer = Drafting()
    assert buffer.start(2, []) == 2
    assert buffer.step(2, [[0, 1], [2, 3]])[0] == HOT_SLOTS[:2]
    assert buffer.counters() == [4, 0, 0]
    assert buffer.start(3, [0, 1, 2]) == 2  # the hint: 3 and 4 do not both fit


def test_errors_of_several_positions() -> None:
    buffer = Drafting()

    def failure(num_rows: int = 2, **changes: Any) -> str:
        selected = torch.zeros((num_rows, 3), dtype=torch.int32)
        with pytest.raises(KernelArgumentError) as error:
            swap_in(selected, replace(buffer.requests(8, 2), **changes), group=0, layer=0, **buffer.pools)
        return str(error.value)

    assert failure(num_new=3) == "num_new: expected a value in [1, 3), got 3"
    assert failure(3) == "selected: expected 2 rows for each of 1 requests, got 3 rows"
    assert failure(num_new=1) == "selected: expected 1 rows for each of 1 requests, got 2 rows"
    assert failure(seq_lens=torch.tensor([1])) == "seq_lens: expected values in [2, 21], got 1 to 1"
    with pytest.raises(
        KernelArgumentError, match=r"num_newest: expected values in \[0, 2\].*got \[3\] for \[8\]"
    ):
        buffer.back_up(8, 3)
    with pytest.raises(KernelArgumentError, match=r"capacity: expected a value in \[2, 7\), got 1"):
        buffer.state.assign_row(0, torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(KernelArgumentError, match=r"max_new: expected a value in \[1, 5\), got 5"):
        HotBufferState.create(1, 1, 20, 6, 4, 40, max_new=5)
