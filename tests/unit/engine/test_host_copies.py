"""How a copy between main memory and a GPU is divided between the GPU's copy engine and a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hisparse_pd.core.model.layer_arrivals import layers_of_part
from hisparse_pd.engine import host_copies
from hisparse_pd.engine.host_copies import SlotCopy, copy_slots
from hisparse_pd.protocol.messages import Extent
from hisparse_pd.transfer import plan

Columns = Sequence[NDArray[np.int64]]
LONG = 64
ITEM = 8
RUN_SLOTS = 2 * LONG // ITEM
NUM_LAYERS = 6


class Arrivals:
    """Parts of layers, without events."""

    num_parts = 3

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def layers(self, part: int, num_layers: int) -> range:
        return layers_of_part(part, self.num_parts, num_layers)

    def record(self, part: int) -> None:
        self.recorded.append(part)


@pytest.mark.parametrize("by_layers", [False, True])
@pytest.mark.parametrize(("num_runs", "are_calls"), [(1, True), (20, True), (100, False)])
def test_the_loop_waits_for_few_calls_however_scattered_slots_are(
    num_runs: int, are_calls: bool, by_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer of a pool has ``num_runs`` long ranges, in two pools and in one part or three."""
    monkeypatch.setattr(plan, "LONG_BYTES", LONG)
    calls: list[tuple[int, int]] = []

    def enqueue(device: torch.device, runs: Columns, pieces: Columns) -> None:
        calls.append((runs[0].size, pieces[0].size))
        for columns in (runs, pieces):
            for src, dst, length in zip(*(column.tolist() for column in columns), strict=True):
                ctypes.memmove(dst, src, length)

    monkeypatch.setattr(host_copies, "enqueue_copies", enqueue)
    num_slots = 2 * num_runs * RUN_SLOTS
    here = [torch.randint(0, 255, (NUM_LAYERS, num_slots, ITEM), dtype=torch.uint8) for _ in range(2)]
    there = [torch.zeros_like(pool) for pool in here]
    src = [Extent(2 * number * RUN_SLOTS, RUN_SLOTS) for number in range(num_runs)]
    dst = src[::-1]
    arrivals = Arrivals() if by_layers else None
    copies = [SlotCopy(list(zip(here, there, strict=True)), src, dst)]
    copy_slots(copies, torch.device("cuda"), arrivals)  # type: ignore[arg-type]
    for pool, copied in zip(here, there, strict=True):
        for from_, to in zip(src, dst, strict=True):
            assert torch.equal(copied[:, to.start : to.end], pool[:, from_.start : from_.end])
        assert copied.count_nonzero() <= pool.numel() // 2, "nothing else is written"
    num_long, num_short = map(sum, zip(*calls, strict=True))
    assert num_long == (2 * NUM_LAYERS * num_runs if are_calls else 0)
    assert num_long <= plan.MOST_LONG
    assert bool(num_short) != are_calls
    if arrivals is not None:
        assert arrivals.recorded == [0, 1, 2]
