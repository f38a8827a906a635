"""Places where the rows of a forward write: against a plain loop, in torch and by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hisparse_pd.kernels.step_rows import StepRows, place_rows, slots_of
from tests.unit.kernels.drawn_rows import NUM_REQS, PAGE_SIZE, check, check_slots
from tests.unit.kernels.triton_here import compiled_for_hopper, interpreted, needs_triton


@pytest.mark.I6
def test_rows_in_torch() -> None:
    check(place_rows)


def test_slots_in_torch() -> None:
    check_slots(lambda table, rows, positions: slots_of(table, PAGE_SIZE, rows, positions))


def interpret_cases() -> None:
    from hisparse_pd.kernels import triton_step_rows

    def place(**given: Any) -> StepRows:
        rows = torch.full((5, NUM_REQS * (given["num_new"] - given["first_row"])), 77)
        triton_step_rows.place_rows(**given, rows=rows)
        return StepRows(*rows)

    triton_step_rows.BLOCK = 32  # several programs, the last in part
    check(place)

    def look_up(table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(positions)
        triton_step_rows.slots_of(table, PAGE_SIZE, rows, positions, out)
        return out

    triton_step_rows.MOST_POSITIONS = 32
    check_slots(look_up)


@needs_triton
def test_interpreted_kernel() -> None:
    interpreted(interpret_cases)


def compile_cases() -> None:
    from hisparse_pd.kernels.triton_step_rows import place_rows_kernel

    pointers = dict.fromkeys(("seq_lens_ptr", "req_rows_ptr", "ends_ptr", "rows_ptr"), "*i64")
    pointers |= dict.fromkeys(("num_real_ptr", "newest_slots_ptr", "index_pages_ptr"), "*i32")
    for has_ends in (False, True):
        compiled_for_hopper(place_rows_kernel, pointers, {"HAS_ENDS": has_ends, "BLOCK": 128}, [])


@needs_triton
def test_kernel_compiles() -> None:
    compile_cases()
