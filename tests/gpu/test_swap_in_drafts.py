"""The CUDA swap-in of several new positions of a request, in cases that are rare in random histories.

The random histories are in ``test_swap_in_cuda.py``.
"""

from __future__ import annotations

import pytest
import torch

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import MISSES, HotBufferState
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import swap_in
from tests.gpu.history import ONE_LAYER, History
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = [*needs_gpu, pytest.mark.I3, pytest.mark.I4]


@pytest.mark.parametrize("context", [64, 71])
def test_history_of_drafts_at_the_end_of_the_context(context: int) -> None:
    """The context ends at the end of a page, or in the middle of one."""
    History(
        context, 24, max_new=4, max_context=context, capacities=(30, 40, 80), top_k=6, num_rows=4
    ).run(150)  # fmt: skip


@pytest.mark.parametrize(
    ("num_rows", "top_k", "max_new", "num_steps"),
    [
        (1, 2048, 4, 20),
        (4, 2048, 4, 12),
        (2, 2048, 3, 12),
        (3, 4096, 2, 10),
        (40, 2048, 4, 3),
        (140, 2048, 4, 2),
        (1, 2048, 8, 12),
        (4, 2048, 7, 6),
        (140, 2048, 8, 2),
    ],
)
def test_history_of_large_selections(num_rows: int, top_k: int, max_new: int, num_steps: int) -> None:
    """There are up to 16384 positions of a request, all of them in one block if the batch is large."""
    capacity = max_new * top_k + max_new
    History(
        num_rows, 16, top_k=top_k, max_new=max_new, num_rows=num_rows, max_context=2 * capacity,
        capacities=(capacity, capacity + 3000), group_layers=ONE_LAYER, has_dense=num_rows < 10,
    ).run(num_steps, num_started=num_rows)  # fmt: skip


@pytest.mark.parametrize(("num_rows", "top_k"), [(1, 2048), (1, 100), (5, 400), (90, 300), (140, 2048)])
def test_what_all_new_positions_miss_is_fetched_once(num_rows: int, top_k: int) -> None:
    """The positions are in every block of the request, or in one block that has them all."""
    capacity = top_k + 4
    history = History(
        capacity, 16, top_k=top_k, num_rows=num_rows, max_context=6000, capacities=(4, capacity),
        group_layers=ONE_LAYER, has_dense=False, max_new=4,
    )  # fmt: skip
    for _ in range(num_rows):
        history.admit(capacity=capacity, prompt=5000, is_warm=False)
    for step in range(3):
        num_misses = history.state.counters[:, MISSES].clone()
        selections = {}
        for row in range(num_rows):
            positions = (torch.arange(top_k) + step * top_k + row) % 5000
            shuffles = [torch.randperm(top_k, generator=history.generator) for _ in range(4)]
            selections[row] = torch.cat([positions[order] for order in shuffles]).tolist()
        history.step(selections, num_new=4)
        assert (history.state.counters[:, MISSES] - num_misses == top_k).all()
    history.finish()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 70])
def test_new_positions_in_place_of_former_ones_that_are_selected(num_rows: int) -> None:
    """Accepted positions lose their entries in the same step in which many blocks look them up."""
    top_k, max_new = (1024 if num_rows < 10 else 200), 3
    capacity = max_new * top_k + max_new
    history = History(
        num_rows, 16, top_k=top_k, num_rows=num_rows, max_context=6000, capacities=(3, capacity),
        group_layers=ONE_LAYER, has_dense=False, max_new=max_new,
    )  # fmt: skip
    for _ in range(num_rows):
        history.admit(capacity=capacity, prompt=5000, is_warm=False)
    for step in range(8):
        num_new = 1 + (step + 1) % max_new
        selections = {}
        for row in range(num_rows):
            first_new = history.requests[row].seq_len
            others = list(range(7 * step, 7 * step + top_k - 20))
            one = others + [first_new - 1] * 8 + [first_new - 2] * 4 + [first_new - 3] * 4 + [first_new] * 4
            selections[row] = [p for _ in range(num_new) for p in history.random.sample(one, top_k)]
        history.step(selections, num_new=num_new)
    history.finish()


def test_more_positions_than_a_block_can_take_are_refused() -> None:
    state = HotBufferState.create(1, 1, 64, 9, 16, 64, 16, DEVICE, max_new=9)
    number = torch.ones(1, dtype=torch.int32, device=DEVICE)
    selected = torch.zeros((9, 2048), dtype=torch.int32, device=DEVICE)
    host = torch.zeros((1, 64, 32), dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    dev = torch.zeros((1, 16, 32), dtype=torch.uint8, device=DEVICE)
    requests = StepRequests(state, number * 9, number * 0, number, 9)
    with pytest.raises(
        KernelArgumentError, match=r"num_new \* top_k: expected a value in \[1, 16385\), got 18432"
    ):
        swap_in(selected, requests, group=0, layer=0, k_host=host, k_dev=dev)
