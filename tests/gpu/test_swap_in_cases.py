"""The CUDA swap-in in cases that are rare in random histories; every step is checked as in a history."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import MISSES, HotBufferState
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import backup_newest, newest_slots, swap_in
from tests.gpu.history import ONE_LAYER, PAGE_SIZE, History
from tests.gpu.support import DEVICE, needs_gpu
from tests.unit.kernels.table_rules import check_consistency

pytestmark = [*needs_gpu, pytest.mark.I4]


def wide(num_rows: int, capacity: int, *, top_k: int = 2048, max_context: int = 6000) -> History:
    """Return a history with cold hisparse requests of 5000 positions and 16-byte items in ``num_rows``
    rows."""
    history = History(
        capacity, 16, top_k=top_k, num_rows=num_rows, max_context=max_context, capacities=(2, capacity),
        group_layers=ONE_LAYER, has_dense=False,
    )  # fmt: skip
    for _ in range(num_rows):
        history.admit(capacity=capacity, prompt=5000, is_warm=False)
    return history


def shuffled(history: History, positions: list[int]) -> list[int]:
    history.random.shuffle(positions)
    return positions


@pytest.mark.parametrize("num_rows", [1, 5, 90])
def test_one_missing_position_selected_everywhere(num_rows: int) -> None:
    history = wide(num_rows, 40, top_k=400)
    for position in (17, 4000, 17):
        slots = history.step({row: [position] * 400 for row in range(num_rows)})
        assert (slots[:num_rows] == slots[:num_rows, :1]).all()
    # The newest position of a step evicts that of the previous step.
    assert history.state.counters.tolist() == [[1, 2, 2]] * num_rows
    history.finish()


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_duplicates_of_missing_positions_in_every_block(num_rows: int) -> None:
    """Each block has positions that other blocks have too and positions of its own, hot ones and not."""
    history = wide(num_rows, 2049)
    for step in range(4):
        common = [100 * step + i for i in range(10)]
        selections = {}
        for row in range(num_rows):
            own = [1000 + 300 * step + row + i for i in range(600)]  # half of them are hot from the last step
            selections[row] = shuffled(history, common * 100 + own + [-1] * 448)
        history.step(selections)
    history.finish()


def test_one_request_misses_everything_and_the_others_nothing() -> None:
    history = wide(40, 4096)
    first, second, third = (list(range(2048 * i, 2048 * (i + 1))) for i in range(3))
    third = [position % 5000 for position in third]
    everywhere = {row: shuffled(history, first) for row in range(40)}
    history.step(everywhere)
    assert (history.state.counters[:, MISSES] == 2048).all()
    for row in (0, 39, 17):
        history.step({**everywhere, row: shuffled(history, second)}, num_padding=0)
    for row in (5, 38):  # alone among requests that select nothing
        history.step({**dict.fromkeys(range(40), ()), row: shuffled(history, second)})
    assert (history.state.counters[:, MISSES] == 2048).sum() == 35
    for row in (0, 39, 21):  # the reverse: all but one
        selections = {other: shuffled(history, third if row != 39 else second) for other in range(40)}
        history.step({**selections, row: ()})
    history.finish()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 70])
def test_newest_in_place_of_the_former_newest_that_is_selected(num_rows: int) -> None:
    """The former newest position loses its entry in the same step in which many blocks look it up."""
    top_k = 2048 if num_rows < 10 else 300
    history = wide(num_rows, top_k + 1, top_k=top_k)
    for step in range(6):
        selections = {}
        for row in range(num_rows):
            newest = history.requests[row].seq_len
            others = list(range(7 * step, 7 * step + top_k - 20))
            selections[row] = shuffled(history, others + [newest - 1] * 15 + [newest] * 5)
        history.step(selections)
    # In every step one miss is the former newest position; in the first step that is the prompt's last one.
    assert int(history.state.counters[0, MISSES]) == top_k - 20 + 1 + 5 * (7 + 1)
    history.finish()


@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_more_misses_than_entries_over_many_blocks(num_rows: int) -> None:
    history = wide(num_rows, 1000)
    slots = history.step({row: shuffled(history, list(range(2048))) for row in range(num_rows)})
    assert ((slots[:num_rows] >= 0).sum(dim=1) == 999).all()
    assert history.state.error_flags.tolist() == [HotBufferError.TOO_MANY_MISSES] * num_rows
    assert history.state.counters.tolist() == [[0, 2048, 0]] * num_rows
    # Entries that are hit must stay, whatever is missing.
    state = history.state
    kept = {}
    for row, request in history.requests.items():
        pages = request.lookup_pages.tolist()
        kept[row] = [
            pages.index(slot // PAGE_SIZE) * PAGE_SIZE + slot % PAGE_SIZE
            for slot in state.hot_to_lookup[0, state.entry_slots(row)[:400]].tolist()
        ]
    slots = history.step(
        {row: shuffled(history, kept[row] + list(range(3000, 4648))) for row in range(num_rows)}
    )
    assert ((slots[:num_rows] >= 0).sum(dim=1) == 999).all()
    # After that, a step that fits is served in full.
    slots = history.step({row: shuffled(history, list(range(4200, 4900))) for row in range(num_rows)})
    assert ((slots[:num_rows] >= 0).sum(dim=1) == 700).all()
    history.finish()


class Single:
    """One hisparse request of 64 positions in a buffer of 9, without a history."""

    def __init__(self) -> None:
        self.state = HotBufferState.create(1, 1, 64, 9, 16, 64, 16, DEVICE)
        self.host = torch.randint(0, 256, (1, 64, 32), dtype=torch.uint8)
        if DEVICE == "cuda":
            self.host = self.host.pin_memory()
        self.dev = torch.zeros((1, 16, 32), dtype=torch.uint8, device=DEVICE)
        pages = torch.arange(4)
        # Entry e is in device slot e, and position p in host slot p.
        self.state.assign_row(0, 9, pages[:1], pages, pages)
        self.one = torch.ones(1, dtype=torch.int32, device=DEVICE)

    def pools(self) -> dict[str, Any]:
        return {"k_host": self.host, "k_dev": self.dev}

    def __call__(self, seq_len: int, selected: list[int]) -> list[int]:
        slots: list[int] = swap_in(
            torch.tensor([selected], dtype=torch.int32, device=DEVICE),
            self.requests(seq_len),
            group=0,
            layer=0,
            **self.pools(),
        )[0].tolist()
        check_consistency(self.state)
        return slots

    def requests(self, seq_len: int) -> StepRequests:
        return StepRequests(self.state, self.one * seq_len, self.one * 0, self.one)

    def flags(self) -> int:
        return int(self.state.error_flags[0])

    def counters(self) -> list[int]:
        result: list[int] = self.state.counters[0].tolist()
        return result


@pytest.mark.parametrize("top_k", [4, 600])
def test_without_a_host_slot_for_its_newest_token_a_row_takes_no_step(top_k: int) -> None:
    """The row is alone, spread over many blocks, and gets its pages back."""
    one = Single()
    one(20, [3, 4])
    page_ids = one.state.host_pages.clone()
    one.state.host_pages[0, 2:] = one.state.lookup_pages[0, 2:] = -1
    names = ("lookup_to_hot", "hot_to_lookup", "stamps", "step", "counters")
    before = {name: getattr(one.state, name).clone() for name in names}
    host = one.host.clone()
    assert newest_slots(one.requests(40)).tolist() == [-1]
    assert one(40, [39, 3, 4, *[99] * (top_k - 3)]) == [-1] * top_k
    backup_newest(one.requests(40), **one.pools())
    assert one.flags() == HotBufferError.NO_HOST_SLOT
    assert all(torch.equal(getattr(one.state, name), table) for name, table in before.items())
    assert torch.equal(one.host, host)
    one.state.host_pages.copy_(page_ids)
    one.state.lookup_pages.copy_(page_ids)
    assert one(40, [39, 3, 4])[0] == 8
    assert one.counters()[MISSES] == 2


@pytest.mark.parametrize("top_k", [0, 4])
def test_empty_calls(top_k: int) -> None:
    one = Single()
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    empty = torch.empty((0, top_k), dtype=torch.int32, device=DEVICE)
    nobody = StepRequests(one.state, none, none, one.one * 0)
    assert swap_in(empty, nobody, group=0, layer=0, **one.pools()).shape == (0, top_k)
    backup_newest(nobody, **one.pools())
    assert newest_slots(nobody).shape == (0,)
    nothing = torch.empty((1, 0), dtype=torch.int32, device=DEVICE)
    assert swap_in(nothing, one.requests(1), group=0, layer=0, **one.pools()).shape == (1, 0)


def test_sizes_beyond_the_limits_are_refused() -> None:
    one = Single()

    def failure(num_reqs: int, top_k: int, state: HotBufferState) -> str:
        numbers = torch.zeros(num_reqs, dtype=torch.int32, device=DEVICE)
        selected = torch.zeros((num_reqs, top_k), dtype=torch.int32, device=DEVICE)
        requests = StepRequests(state, numbers, numbers, one.one)
        with pytest.raises(KernelArgumentError) as caught:
            swap_in(selected, requests, group=0, layer=0, **one.pools())
        return str(caught.value)

    assert failure(1, 4097, one.state) == "top_k: expected a value in [1, 4097), got 4097"
    assert failure(4096, 4096, one.state).startswith(
        "num_reqs * num_new * top_k: expected a value in [1, 16777216)"
    )
    large = HotBufferState.create(1, 1, 64, 32769, 16, 64, 16, DEVICE)
    assert failure(1, 4, large) == "state.max_capacity: expected a value in [1, 32769), got 32769"


def test_pageable_host_memory_is_refused() -> None:
    one = Single()
    one.host = torch.zeros((1, 64, 32), dtype=torch.uint8)
    with pytest.raises(KernelArgumentError, match="k_host: expected pinned host memory"):
        one(5, [1])


def test_rows_and_lengths_out_of_range_are_padding() -> None:
    one = Single()
    selected = torch.zeros((3, 2), dtype=torch.int32, device=DEVICE)
    lens, rows = (torch.tensor(of, dtype=torch.int32, device=DEVICE) for of in ([5, 5, 65], [1, -1, 0]))
    requests = StepRequests(one.state, lens, rows, one.one * 3)
    slots = swap_in(selected, requests, group=0, layer=0, **one.pools())
    assert (slots == -1).all()
    assert one.flags() == HotBufferError.BAD_POSITION
    assert one.counters() == [0, 0, 0]
    assert int(one.state.step[0, 0]) == 0
