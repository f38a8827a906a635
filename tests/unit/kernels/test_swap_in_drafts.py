"""Swap-in of several new positions of a request: drafts without slots, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.swap_in import backup_newest, newest_slots, swap_in
from tests.unit.kernels.one_buffer import (
    CAPACITY,
    HOST_PAGES,
    HOT_PAGES,
    HOT_SLOTS,
    LOOKUP_PAGES,
    ROW,
    Buffer,
)
from tests.unit.kernels.table_rules import check_consistency

MAX_NEW = 2


class Drafting(Buffer):
    """A buffer of capacity 4: two shared entries, and the ring. Only the first ``num_pages`` pages exist."""

    def __init__(self, num_pages: int = 5) -> None:
        super().__init__(MAX_NEW)
        pages = torch.tensor(HOST_PAGES[:num_pages]), torch.tensor(LOOKUP_PAGES[:num_pages])
        self.state.assign_row(ROW, CAPACITY, torch.tensor(HOT_PAGES), *pages)

    def make_dense(self, pages: Tensor) -> None:
        self.state.reset_rows(ROW)
        self.state.set_pages(ROW, 0, pages)

    def new_slots(self, first_new: int, num_new: int) -> list[int]:
        slots = newest_slots(self.requests(first_new + num_new, num_new))
        result: list[int] = slots.tolist()
        return result

    def step(self, first_new: int, selected: list[list[int]]) -> list[list[int]]:
        num_new = len(selected)
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


@pytest.mark.I6
def test_a_draft_without_a_page_has_no_slot_and_changes_nothing() -> None:
    buffer = Drafting(num_pages=3)
    assert buffer.new_slots(11, 2) == [HOT_SLOTS[3], -1]
    out = buffer.step(11, [[11, 5], [12, 5]])
    assert out == [[HOT_SLOTS[3], HOT_SLOTS[0]], [-1, HOT_SLOTS[0]]]
    assert buffer.hot_positions()[:4] == [5, -1, -1, 11]
    assert not buffer.state.error_flags.any()
    # Without a page for the first new position there is no step.
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
        buffer.state.assign_row(0, 1, torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(KernelArgumentError, match=r"max_new: expected a value in \[1, 5\), got 5"):
        HotBufferState.create(1, 1, 20, 6, 4, 40, 40, max_new=5)
