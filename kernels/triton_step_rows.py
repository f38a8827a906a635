# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.step_rows`` on a GPU: one launch for each function, instead of ten or twenty in torch.

The functions of the same names there call these, and describe the arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.triton_launch import begin, launch_options

BLOCK = 128
"""Rows of one program of ``place_rows``."""
MOST_POSITIONS = 1024
"""Most positions of a row that one program of ``slots_of`` looks up."""


def place_rows(
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    ends: Tensor | None,
    newest_slots: Tensor,
    index_pages: Tensor,
    rows: Tensor,
    num_new: int,
    first_row: int,
    page_size: int,
    scratch_device_slot: int,
    scratch_index_slot: int,
) -> None:
    """Fill ``rows``, int64 [5, num_rows], with what ``kernels.step_rows.place_rows`` returns: positions,
    positions to select for (-1 for absent rows), req_rows, device slots, index slots.

    A request has rows for its new positions ``first_row`` to ``num_new - 1``. ``ends``: positions from here
    on have no slot.
    """
    num_rows = rows.shape[1]
    if num_rows == 0:
        return
    # It has no ``launch_options``: only the kernels of layers overlap, and this one runs before them.
    with torch.cuda.device_of(rows):
        place_rows_kernel[(triton.cdiv(num_rows, BLOCK),)](
            seq_lens, req_rows, num_real_reqs, seq_lens if ends is None else ends, newest_slots, index_pages,
            rows, num_rows, num_new, first_row, index_pages.shape[1], page_size, scratch_device_slot,
            scratch_index_slot, HAS_ENDS=ends is not None, BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_new",
        "first_row",
        "max_pages",
        "page_size",
        "scratch_device_slot",
        "scratch_index_slot",
    ]
)
def place_rows_kernel(
    seq_lens_ptr,
    req_rows_ptr,
    num_real_ptr,
    ends_ptr,
    newest_slots_ptr,
    index_pages_ptr,
    rows_ptr,
    num_rows,
    num_new,
    first_row,
    max_pages,
    page_size,
    scratch_device_slot,
    scratch_index_slot,
    HAS_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute all fields of BLOCK rows; the rows of ``rows_ptr`` are the fields in the order of StepRows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    rows_each = num_new - first_row
    req, number = row // rows_each, row % rows_each
    position = tl.load(seq_lens_ptr + req, mask=is_row, other=1) - rows_each + number
    is_there = is_row & (req < tl.load(num_real_ptr))
    if HAS_ENDS:
        is_there = is_there & (position < tl.load(ends_ptr + req, mask=is_row, other=0))
    req_row = tl.load(req_rows_ptr + req, mask=is_row, other=0)
    slot = tl.load(newest_slots_ptr + req * num_new + first_row + number, mask=is_there, other=-1)
    page = tl.load(index_pages_ptr + req_row * max_pages + position // page_size, mask=is_there, other=0)
    index_slot = page.to(tl.int64) * page_size + position % page_size
    tl.store(rows_ptr + row, position, mask=is_row)
    tl.store(rows_ptr + num_rows + row, tl.where(is_there, position, -1), mask=is_row)
    tl.store(rows_ptr + 2 * num_rows + row, req_row, mask=is_row)
    tl.store(rows_ptr + 3 * num_rows + row, tl.where(slot >= 0, slot, scratch_device_slot), mask=is_row)
    tl.store(rows_ptr + 4 * num_rows + row, tl.where(is_there, index_slot, scratch_index_slot), mask=is_row)


def slots_of(page_table: Tensor, page_size: int, table_rows: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write to ``out`` the slots, [num_rows, num_positions], that ``positions`` have by the pages in row
    ``table_rows`` of ``page_table``; -1 stays -1."""
    num_rows, num_positions = positions.shape
    if positions.numel() == 0:
        return
    block = min(MOST_POSITIONS, triton.next_power_of_2(num_positions))
    with torch.cuda.device_of(positions):
        slots_of_kernel[(num_rows, triton.cdiv(num_positions, block))](
            page_table, table_rows, positions, out, page_table.shape[1], num_positions,
            PAGE_SIZE=page_size, BLOCK=block, **launch_options(positions.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_pages"])
def slots_of_kernel(
    page_table,
    table_rows,
    positions,
    out,
    max_pages,
    num_positions,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Look up BLOCK positions of one row."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < num_positions
    position = tl.load(positions + row * num_positions + at, mask=is_there, other=-1)
    pages = page_table + tl.load(table_rows + row) * max_pages
    page = tl.load(pages + position // PAGE_SIZE, mask=position >= 0, other=0)
    slot = tl.where(position >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(out + row * num_positions + at, slot, mask=is_there)
