"""The places where the rows of a forward write, on a GPU: the same as by a plain loop."""

from __future__ import annotations

from typing import Any

import torch

from hisparse_pd.kernels.step_rows import StepRows, place_rows, slots_of
from tests.gpu.support import DEVICE, needs_gpu
from tests.unit.kernels.drawn_rows import PAGE_SIZE, check, check_slots

pytestmark = needs_gpu


def test_rows() -> None:
    def place(**given: Any) -> StepRows:
        moved: dict[str, Any] = {
            name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        return place_rows(**moved)

    check(place)


def test_slots() -> None:
    check_slots(lambda table, rows, positions: slots_of(table, PAGE_SIZE, rows, positions), DEVICE)
