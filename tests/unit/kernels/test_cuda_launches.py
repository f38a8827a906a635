"""The numbers of copies and launches of an admission, without a GPU: a list records the launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hisparse_pd.kernels import cuda, cuda_params
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.reference import Pools
from hisparse_pd.kernels.warm_up import FilledLayer, plan_warm_up

NUM_GROUPS, PAGE_SIZE = 61, 64


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let kernels be launched as on an H200, and do nothing. Returns a list of their names and parameters."""
    launches: list[Any] = []

    def launch(kernel: Any, device: Any, blocks: int, threads: int, parameters: Any, **_: Any) -> None:
        launches.append((kernel.name, parameters.copy()))

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(
        cuda, "compiled", lambda name, **_: SimpleNamespace(name=name, max_threads_per_block=1000)
    )
    monkeypatch.setattr(cuda_params, "mapped_address", lambda name, host: host.data_ptr())
    monkeypatch.setattr(cuda, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return launches


def started(monkeypatch: pytest.MonkeyPatch, num_tokens: int, capacity: int) -> tuple[list[Any], list[Any]]:
    """Start a row in one slice. Returns the launches and the staged numbers."""
    staged: list[Any] = []
    empty = torch.empty

    def pinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if pin_memory:
            staged.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", pinned)
    launches = record_launches(monkeypatch)
    state = HotBufferState.create(NUM_GROUPS, 2, 1024, 512, PAGE_SIZE, 2048, 2048)
    pool = torch.zeros((NUM_GROUPS, 2048, 8), dtype=torch.uint8)
    hints = [np.arange(group, group + 100, dtype=np.int32) for group in range(NUM_GROUPS)]
    num_pages = -(-num_tokens // PAGE_SIZE)
    cuda.start_row(
        state,
        1,
        capacity,
        torch.arange(-(-capacity // PAGE_SIZE)) + 5,
        torch.arange(num_pages) + 3,
        torch.arange(num_pages) + 1,
        torch.arange(2) + 7,
        plan_warm_up(NUM_GROUPS, capacity, 1, num_tokens, hints),
        [FilledLayer(group, group, 1) for group in range(NUM_GROUPS)],
        Pools(pool, pool),
    )
    return launches, staged


def test_a_row_of_many_groups_is_one_copy_and_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, staged = started(monkeypatch, num_tokens=900, capacity=90)
    ((name, parameters),) = launches
    assert name == "fill_row"
    (numbers,) = staged
    parts = (2, 15, 15, 2, 3 * NUM_GROUPS, NUM_GROUPS, NUM_GROUPS * 89)
    assert numbers.shape == (sum(parts),)
    hot_pages, host_pages, lookup_pages, index_pages, layers, num_warm, positions = numbers.split(parts)
    assert hot_pages.tolist() == [5, 6]
    assert parameters["num_entries"] == 90
    assert host_pages.tolist() == list(range(3, 18))
    assert lookup_pages.tolist() == list(range(1, 16))
    assert index_pages.tolist() == [7, 8]
    assert layers.view(-1, 3).tolist() == [[group, group, 1] for group in range(NUM_GROUPS)]
    assert num_warm.tolist() == [89] * NUM_GROUPS
    assert positions.view(NUM_GROUPS, 89)[7].tolist() == list(range(7, 96))
    assert (parameters["num_hints"], parameters["max_warm"], parameters["row"]) == (NUM_GROUPS, 89, 1)


def test_positions_that_all_groups_share_are_staged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, parameters),), (numbers,) = started(monkeypatch, num_tokens=300, capacity=512)
    assert (parameters["num_hints"], parameters["max_warm"]) == (1, 300)
    assert numbers[-300:].tolist() == list(range(300))
