"""Positions and slots of the rows of a forward: in torch, and on a GPU in one launch.

Each forward of a decode step calls ``place_rows`` once, before the layers, for its rows of the requests' new
positions.
``slots_of`` translates selected positions to token slots, in both nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.kernels.hot_state import ABSENT


@dataclass(frozen=True)
class StepRows:
    """Rows of a forward, one for each new position; the rows of one request are adjacent.

    A row is absent if its request is padding or its position is behind those that have slots (``ends`` of
    ``place_rows``). Then it writes to the scratch slots, which no request reads, and selects nothing.
    """

    positions: Tensor
    """int64 [num_rows]"""
    select_at: Tensor
    """int64 [num_rows]: the position that a row selects for; ABSENT for absent rows."""
    req_rows: Tensor
    """int64 [num_rows]: the row that each row's request has in the tables."""
    device_slots: Tensor
    """int64 [num_rows]: slots in the device pool."""
    index_slots: Tensor
    """int64 [num_rows]: slots in the index pool."""


def place_rows(
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    ends: Tensor | None,
    newest_slots: Tensor,
    index_pages: Tensor,
    *,
    num_new: int,
    first_row: int,
    page_size: int,
    scratch_device_slot: int,
    scratch_index_slot: int,
) -> StepRows:
    """Return rows for each request's new positions ``first_row`` to ``num_new - 1``, counted from 0. The last
    one is position ``seq_len - 1`` of its request. Earlier forwards of the step have written those before
    ``first_row``, as when each draft has a forward of its own. With a seq_len of 100, a ``num_new`` of 4 and
    a ``first_row`` of 1, a request has rows for the positions 97, 98 and 99.

    ``seq_lens``, ``req_rows``: int64 [num_reqs], valid for padding too; ``num_real_reqs``: int32 [1].
    ``ends``: int64 [num_reqs]: positions from here on have no slot; None: all positions have one.
    ``newest_slots``: int32 [num_reqs * num_new], device slots of all new positions; where it is ABSENT, a row
    writes to the scratch slot. ``index_pages``: int32 [rows of the tables, max_pages]. All are contiguous, on
    one device, and not changed; nothing synchronises.
    """
    num_reqs, rows_each = seq_lens.shape[0], num_new - first_row
    if seq_lens.device.type == "cuda":
        from hisparse_pd.kernels import triton_step_rows

        rows = seq_lens.new_empty((5, num_reqs * rows_each))
        triton_step_rows.place_rows(
            seq_lens, req_rows, num_real_reqs, ends, newest_slots, index_pages, rows, num_new, first_row,
            page_size, scratch_device_slot, scratch_index_slot,
        )  # fmt: skip
        return StepRows(*rows)
    positions = seq_lens[:, None] - torch.arange(rows_each, 0, -1)
    is_there = (torch.arange(num_reqs) < num_real_reqs)[:, None].expand_as(positions)
    if ends is not None:
        is_there = is_there & (positions < ends[:, None])
    row_of_each = req_rows[:, None].expand_as(positions)
    slots = newest_slots.view(num_reqs, num_new)[:, first_row:].long()
    select_at = torch.where(is_there, positions, ABSENT)
    pages = index_pages[row_of_each, torch.where(is_there, positions, 0) // page_size].long()
    index_slots = torch.where(is_there, pages * page_size + positions % page_size, scratch_index_slot)
    device_slots = torch.where(is_there & (slots >= 0), slots, scratch_device_slot)
    columns = (positions, select_at, row_of_each, device_slots, index_slots)
    return StepRows(*(column.flatten().contiguous() for column in columns))


def slots_of(page_table: Tensor, page_size: int, table_rows: Tensor, positions: Tensor) -> Tensor:
    """Return token slots, int32 [num_rows, n], of ``positions``, int32 [num_rows, n]; ABSENT stays ABSENT.

    ``page_table``: int32 [rows of the table, max_pages]; ``table_rows``: int64 [num_rows], the page table's
    row for each row of positions. All are contiguous, on one device, and not changed; nothing synchronises.
    """
    if positions.device.type == "cuda":
        from hisparse_pd.kernels import triton_step_rows

        out = torch.empty_like(positions)
        triton_step_rows.slots_of(page_table, page_size, table_rows, positions, out)
        return out
    known = positions.clamp(min=0)
    pages = page_table[table_rows[:, None], known // page_size]
    return (pages * page_size + known % page_size).masked_fill_(positions < 0, ABSENT)
