"""The CUDA swap-in over random histories: item sizes, dtypes, buffer sizes, batch sizes and drafts.

A step has any number of new positions of a request up to ``max_new``; any of them are rejected, and some have
no page. A request is split over as many blocks as the batch leaves for it. The batch sizes cover all cases
from many blocks for a request to several requests for a block.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from hisparse_pd.core.memory.host import CudaPinning
from tests.gpu.history import ONE_LAYER, History, live_from_nothing
from tests.gpu.support import needs_gpu

pytestmark = [*needs_gpu, pytest.mark.I3]


@pytest.mark.parametrize(
    ("item_bytes", "max_new"),
    [
        *((item_bytes, 1) for item_bytes in (1, 7, 8, 15, 24, 576, 640, 656, 1152, 1153, 4608)),
        *itertools.product((656, 7), (2, 3, 4, 8)),
    ],
)
def test_history_of_each_item_size(item_bytes: int, max_new: int) -> None:
    """The requests outgrow their buffers."""
    capacities = tuple(25 * max_new + more for more in (0, 6, 23, 65))
    History(item_bytes + max_new, item_bytes, max_new=max_new, capacities=capacities).run(90)


@pytest.mark.I6
@pytest.mark.parametrize("max_new", [1, 4])
@pytest.mark.parametrize("item_bytes", [7, 656])
def test_requests_begin_with_nothing(item_bytes: int, max_new: int) -> None:
    live_from_nothing(item_bytes, max_new)


@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
def test_history_of_dtypes(lens_dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    History(7, 656, lens_dtype=lens_dtype, rows_dtype=rows_dtype).run(30)


@pytest.mark.parametrize(
    ("max_new", "capacities"), [(1, (2, 5, 11, 24, 25, 60)), (4, (4, 5, 11, 24, 60, 120))]
)
@pytest.mark.parametrize("seed", range(4))
def test_history_with_faults(seed: int, max_new: int, capacities: tuple[int, ...]) -> None:
    """Selections may be larger than the buffer, and positions may be out of range or without a host slot."""
    History(seed, 24, max_new=max_new, has_faults=True, capacities=capacities).run(90)


def test_history_with_faults_over_many_blocks() -> None:
    History(
        5, 16, top_k=2048, num_rows=2, max_context=6000, capacities=(300, 1000, 1900, 2500),
        group_layers=ONE_LAYER, has_faults=True,
    ).run(25)  # fmt: skip


def test_history_over_registered_host_memory() -> None:
    history = History(13, 656, is_pinned=False)
    pinning, address = CudaPinning(), history.host.data_ptr()
    pinning.register(address, history.host.numel())
    try:
        history.run(40)
    finally:
        pinning.unregister(address)


@pytest.mark.parametrize(
    ("top_k", "capacities", "max_context", "num_steps"),
    [
        (1, (2,), 60, 80),
        (3, (4, 5), 100, 80),
        (31, (32,), 100, 80),
        (2048, (2049, 3072, 6144), 9000, 30),
        (2500, (2501, 4097), 7000, 20),
        (4096, (4097, 8192), 12000, 20),
    ],
)
def test_history_of_each_size(
    top_k: int, capacities: tuple[int, ...], max_context: int, num_steps: int
) -> None:
    History(
        top_k, 16, top_k=top_k, capacities=capacities, max_context=max_context, num_rows=4,
        group_layers=ONE_LAYER,
    ).run(num_steps)  # fmt: skip


@pytest.mark.parametrize(
    ("num_rows", "top_k", "max_new", "num_steps"),
    [
        (1, 300, 1, 40),
        (1, 300, 4, 30),
        (2, 300, 1, 40),
        (2, 300, 3, 30),
        (3, 200, 1, 40),
        (3, 200, 4, 30),
        (3, 200, 8, 20),
        (10, 200, 1, 30),
        (10, 100, 2, 20),
        (40, 100, 1, 20),
        (40, 60, 4, 12),
        (70, 48, 1, 16),
        (70, 48, 4, 10),
        (132, 40, 1, 12),
        (140, 300, 1, 6),
        (140, 40, 3, 8),
        (140, 150, 4, 4),
        (140, 100, 8, 4),
        (200, 24, 1, 12),
        (200, 24, 4, 8),
    ],
)
def test_history_of_each_batch_size(num_rows: int, top_k: int, max_new: int, num_steps: int) -> None:
    num_selected = max_new * top_k
    History(
        num_rows, 32, num_rows=num_rows, top_k=top_k, max_context=5 * top_k, max_new=max_new,
        capacities=(num_selected + max_new, num_selected + 100, 2 * num_selected, 3 * num_selected),
        group_layers=ONE_LAYER,
    ).run(num_steps, num_started=num_rows)  # fmt: skip


@pytest.mark.I5
@pytest.mark.parametrize(
    ("copy_blocks", "num_rows", "item_bytes", "top_k", "max_new", "num_steps"),
    [
        (1, 1, 656, 300, 1, 30),
        (1, 3, 7, 700, 1, 20),
        (1, 1, 656, 40, 3, 8),
        (3, 2, 1152, 300, 1, 30),
        (8, 10, 656, 200, 1, 20),
        (8, 10, 656, 40, 3, 8),
        (8, 40, 15, 60, 1, 8),
        (8, 64, 656, 100, 1, 6),
        (8, 140, 656, 40, 1, 5),
        (8, 140, 656, 40, 3, 8),
        (500, 20, 640, 300, 1, 12),
    ],
)
def test_history_of_misses_that_are_planned_first_and_copied_later(
    copy_blocks: int, num_rows: int, item_bytes: int, top_k: int, max_new: int, num_steps: int
) -> None:
    """Few blocks copy, among swap-ins on the same state that plan and copy at once."""
    num_selected = max_new * top_k
    History(
        num_rows, item_bytes, top_k=top_k, capacities=(num_selected + max_new, num_selected + 40),
        max_context=2 * num_selected + 60, max_new=max_new, num_rows=num_rows, copy_blocks=copy_blocks,
    ).run(num_steps, num_started=num_rows)  # fmt: skip
