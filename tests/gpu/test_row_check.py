"""Row checks on a GPU: the CPU's numbers, and every wrong row is found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.reference_check import reference_checks
from hisparse_pd.kernels.row_check import (
    begin_check,
    check_dense_row,
    check_in_place,
    items_of_pages,
    row_checks_of,
    store_row_checks,
    wrong_row,
)
from hisparse_pd.kernels.row_errors import HotBufferError, ReadAt
from tests.gpu.history import ONE_LAYER, History
from tests.gpu.support import DEVICE, needs_gpu, no_waiting

pytestmark = [*needs_gpu, pytest.mark.I3]

SIZES = [1, 2, 3, 4, 6, 7, 8, 9, 15, 16, 24, 576, 640, 656, 1152, 1153, 2304, 4608]


def filled(shape: tuple[int, int, int], where: str) -> Tensor:
    generator = torch.Generator().manual_seed(shape[2])
    items = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return items.pin_memory() if where == "pinned" else items.to(DEVICE)


def expected_checks(pool: Tensor, slots: Tensor, positions: Tensor, first_layer: int = 0) -> Tensor:
    items = pool.cpu()[:, slots.cpu()].contiguous()
    checks = [reference_checks(of, first_layer + i, positions.cpu()) for i, of in enumerate(items)]
    return torch.stack(checks)


@pytest.mark.parametrize("where", ["device", "pinned"])
@pytest.mark.parametrize("item_bytes", SIZES)
def test_same_numbers_as_on_the_cpu(item_bytes: int, where: str) -> None:
    pool = filled((3, 400, item_bytes), where)
    slots = torch.randint(400, (1000,), device=DEVICE)
    positions = torch.randint(1 << 22, (1000,), device=DEVICE)
    found = row_checks_of(pool, slots, positions, first_layer=58)
    assert torch.equal(found.cpu(), expected_checks(pool, slots, positions, 58))


@pytest.mark.parametrize("num_items", [1, 7, 8, 9, 31, 100_003])
@pytest.mark.parametrize("layers", [slice(1, 2), slice(0, 2)], ids=["one", "all"])
def test_stored_where_they_belong_in_a_graph_too(num_items: int, layers: slice) -> None:
    pool = filled((2, num_items + 5, 656), "device")
    slots = torch.randperm(num_items + 5, device=DEVICE)[:num_items]
    check_slots = torch.randperm(num_items + 9, device=DEVICE)[:num_items]
    positions = torch.arange(num_items, device=DEVICE) % 5000
    row_checks = torch.full((2, num_items + 9), 3, dtype=torch.int32, device=DEVICE)
    expected = row_checks.clone()
    expected[layers, check_slots] = expected_checks(pool, slots, positions)[layers].to(DEVICE)
    arguments = (check_slots, pool, slots, positions, range(*layers.indices(2)[:2]))
    store_row_checks(row_checks, *arguments)
    assert torch.equal(row_checks, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_row_checks(row_checks, *arguments)
    pool[1, :, 655] ^= 1
    expected[layers, check_slots] = expected_checks(pool, slots, positions)[layers].to(DEVICE)
    graph.replay()
    assert torch.equal(row_checks, expected)


@pytest.mark.parametrize("item_bytes", [656, 1152, 9])
def test_every_flipped_bit_is_seen(item_bytes: int) -> None:
    bits = torch.arange(8 * item_bytes)
    item = torch.randint(0, 256, (item_bytes,), dtype=torch.uint8)
    flipped = item.repeat(8 * item_bytes + 1, 1)
    flipped[bits, bits // 8] ^= (1 << bits % 8).to(torch.uint8)
    slots = torch.arange(8 * item_bytes + 1, device=DEVICE)
    found = row_checks_of(flipped[None].to(DEVICE), slots, torch.full_like(slots, 77))[0]
    assert bool((found[:-1] != found[-1]).all())


def test_rows_in_place_without_a_wait() -> None:
    pool = filled((2, 200, 656), "device")
    row_checks = torch.zeros((2, 192), dtype=torch.int32, device=DEVICE)
    state = HotBufferState.create(1, 3, 160, 6, 16, 160, 160, DEVICE, row_checks=row_checks)
    state.set_index_pages(1, 0, torch.tensor([2, 0, 11, 1, 7]))
    positions = torch.arange(75, device=DEVICE)
    slots = torch.randperm(200, device=DEVICE)[:75]
    is_there = positions != 40
    at = state.index_pages[1, positions // 16].long() * 16 + positions % 16
    store_row_checks(row_checks, at, pool, slots, positions, range(2))

    def go_through() -> HotBufferError:
        with no_waiting():
            check_in_place(state, 1, pool, slots, positions, is_there, read_at=ReadAt.START)
        return HotBufferError(int(state.error_flags[1]))

    assert go_through() == HotBufferError.NONE
    pool[1, slots[40], 3] ^= 4
    assert go_through() == HotBufferError.NONE, "position 40 does not count"
    expected = int(row_checks[1, at[41]]) & 0xFFFFFFFF
    pool[1, slots[41], 655] ^= 128
    pool[1, slots[42], 0] ^= 1
    assert go_through() == HotBufferError.WRONG_ROW
    actual = int(expected_checks(pool, slots, positions)[1, 41]) & 0xFFFFFFFF
    found = wrong_row(state, 1)
    assert found == (ReadAt.START, (1, 41, int(slots[41]), expected, actual), False)
    assert state.error_flags.tolist() == [0, HotBufferError.WRONG_ROW, 0]


@pytest.mark.parametrize("item_bytes", [656, 1152, 24, 9, 7])
def test_a_dense_row_as_it_landed(item_bytes: int) -> None:
    pool = filled((3, 208, item_bytes), "device")
    row_checks = torch.zeros((3, 192), dtype=torch.int32, device=DEVICE)
    state = HotBufferState.create(1, 3, 160, 6, 16, 160, 160, DEVICE, row_checks=row_checks)
    state.set_pages(1, 0, torch.tensor([12, 3, 9, 0, 5]))
    state.set_index_pages(1, 0, torch.tensor([2, 0, 11, 1, 7]))
    positions = torch.arange(75, device=DEVICE)
    slots, at = (
        table[1, positions // 16].long() * 16 + positions % 16
        for table in (state.page_table, state.index_pages)
    )
    store_row_checks(row_checks, at, pool, slots, positions, range(3))
    for wrong, num_tokens in ((None, 75), (74, 74), (74, 75)):
        if wrong is not None:
            pool[2, slots[wrong], item_bytes - 1] ^= 64 if num_tokens == wrong else 0
        with no_waiting():
            check_dense_row(state, 1, pool, num_tokens)
        is_wrong = wrong is not None and num_tokens > wrong
        assert state.error_flags.tolist() == [0, HotBufferError.WRONG_ROW if is_wrong else 0, 0]
    expected, actual = (
        int(checks) & 0xFFFFFFFF
        for checks in (row_checks[2, at[74]], expected_checks(pool, slots, positions)[2, 74])
    )
    assert wrong_row(state, 1) == (ReadAt.START, (2, 74, int(slots[74]), expected, actual), False)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize("item_bytes", [656, 1152, 9])
def test_pages_with_a_wrong_item(item_bytes: int, page_size: int) -> None:
    pool = filled((3, 200 * page_size, item_bytes), "device")
    row_checks = torch.zeros(pool.shape[:2], dtype=torch.int32, device=DEVICE)
    page_ids = torch.randperm(200)[:150]
    first_positions = page_size * torch.arange(150)
    num_items = torch.full((150,), page_size)
    num_items[149] = 1
    pages = torch.stack((page_ids, first_positions, num_items), dim=1).int().numpy()
    slots, positions = (torch.from_numpy(found).to(DEVICE) for found in items_of_pages(pages, page_size))
    store_row_checks(row_checks, slots, pool, slots, positions, range(3))
    assert not begin_check(pool, row_checks, pages, page_size).item()
    last = int(slots[-1])
    for layer, slot in itertools.product(range(3), (int(slots[0]), int(slots[70 * page_size]), last)):
        pool[layer, slot, item_bytes - 1] ^= 64
        assert begin_check(pool, row_checks, pages, page_size).item()
        pool[layer, slot, item_bytes - 1] ^= 64
    if page_size > 1:
        pool[:, last + 1] ^= 1
        assert not begin_check(pool, row_checks, pages, page_size).item(), "the item does not count"
    row_checks[2, last] += 1
    assert begin_check(pool, row_checks, pages, page_size).item()
    assert not begin_check(pool, row_checks, pages[:149], page_size).item()


@pytest.mark.parametrize("item_bytes", [656, 1152, 24, 9, 7, 4608])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_new": 3, "capacities": (75, 90, 120)}, {"copy_blocks": 2}],
    ids=["plain", "drafts", "planned"],
)
def test_wrong_rows_are_found(item_bytes: int, options: dict[str, Any]) -> None:
    """Right rows are not reported. Which of several wrong rows comes first may differ from the CPU, but its
    record may not."""
    history = History(item_bytes, item_bytes, wrong_rows=1.0, has_dense=False, **options)
    history.run(80)
    assert history.num_found > 5


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_steps"), [(1, 700, 30), (3, 200, 30), (40, 100, 10), (140, 300, 4)]
)
def test_wrong_rows_are_found_in_each_batch_size(num_rows: int, top_k: int, num_steps: int) -> None:
    """Rows are verified whether fetched early or late, by the block that missed them or by others."""
    history = History(
        num_rows, 656, num_rows=num_rows, top_k=top_k, max_context=3 * top_k, wrong_rows=1.0,
        has_dense=False, capacities=(top_k + 1, top_k + 40), group_layers=ONE_LAYER, churns=(0.5, 1.0),
    )  # fmt: skip
    history.run(num_steps, num_started=num_rows)
    assert history.num_found > 0
