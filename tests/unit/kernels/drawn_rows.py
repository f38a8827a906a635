"""Random rows of forwards, and the places where they write according to a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hisparse_pd.kernels.step_rows import StepRows

PAGE_SIZE, SCRATCH_DEVICE, SCRATCH_INDEX = 4, 1000, 2000
NUM_REQS, NUM_REAL = 40, 37
FORMS = [(1, 0, False), (1, 0, True), (3, 0, True), (3, 2, True), (4, 1, False)]
"""Number of new positions, number of the first position with a row, and whether positions have an end."""


def drawn(num_new: int, first_row: int, has_ends: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_new)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    seq_lens = integers(num_new, 60, NUM_REQS)
    return {
        "seq_lens": seq_lens,
        "req_rows": torch.randperm(NUM_REQS, generator=generator),
        "num_real_reqs": torch.tensor([NUM_REAL], dtype=torch.int32),
        "ends": seq_lens - integers(0, num_new + 1, NUM_REQS) if has_ends else None,
        "newest_slots": integers(-1, 30, NUM_REQS * num_new, dtype=torch.int32),
        "index_pages": integers(0, 90, NUM_REQS, 16, dtype=torch.int32),
        "num_new": num_new,
        "first_row": first_row,
        "page_size": PAGE_SIZE,
        "scratch_device_slot": SCRATCH_DEVICE,
        "scratch_index_slot": SCRATCH_INDEX,
    }


def by_loop(given: dict[str, Any]) -> list[list[int]]:
    """Return the fields of ``StepRows``, one row after the other."""
    rows = []
    for req in range(NUM_REQS):
        for number in range(given["first_row"], given["num_new"]):
            position = int(given["seq_lens"][req]) - given["num_new"] + number
            is_there = req < NUM_REAL and (given["ends"] is None or position < int(given["ends"][req]))
            req_row = int(given["req_rows"][req])
            device_slot = int(given["newest_slots"][req * given["num_new"] + number])
            page, offset = divmod(position, PAGE_SIZE)
            index_slot = int(given["index_pages"][req_row, page]) * PAGE_SIZE + offset
            rows.append([
                position,
                position if is_there else -1,
                req_row,
                device_slot if is_there and device_slot >= 0 else SCRATCH_DEVICE,
                index_slot if is_there else SCRATCH_INDEX,
            ])  # fmt: skip
    return rows


def check(place: Callable[..., StepRows]) -> None:
    for form in FORMS:
        given = drawn(*form)
        rows = place(**given)
        columns = (rows.positions, rows.select_at, rows.req_rows, rows.device_slots, rows.index_slots)
        assert all(column.dtype == torch.int64 and column.is_contiguous() for column in columns)
        assert torch.stack(columns, dim=1).tolist() == by_loop(given), form


def check_slots(slots_of: Callable[..., torch.Tensor], device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(5 * 9, generator=generator).view(5, 9).int()
    table_rows = torch.randint(0, 5, (13,), generator=generator)
    for num_positions in (1, 70):
        positions = torch.randint(-2, 9 * PAGE_SIZE, (13, num_positions), generator=generator).int()
        positions.clamp_(min=-1)
        found = slots_of(*(x.to(device) for x in (table, table_rows, positions)))
        expected = [
            [-1 if at < 0 else int(table[row, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for at in of_row]
            for row, of_row in zip(table_rows.tolist(), positions.tolist(), strict=True)
        ]
        assert found.dtype == torch.int32
        assert found.tolist() == expected
