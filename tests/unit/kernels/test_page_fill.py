"""``PageFill`` on the CPU: all items, in slices, verified; wrong arguments change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels import page_fill
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import ABSENT, HotBufferState
from hisparse_pd.kernels.page_fill import PageFill
from hisparse_pd.kernels.row_check import store_row_checks, wrong_row
from hisparse_pd.kernels.row_errors import HotBufferError

PAGE, ITEM_BYTES, NUM_LAYERS, NUM_SLOTS = 16, 12, 3, 640
NUM_TOKENS, NUM_PAGES = 150, 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has three chunks, whose ends are inside pages."""
    monkeypatch.setattr(page_fill, "CHUNK_TOKENS", 60)


class Row:
    """Pools with random host items, their checks, and the arguments that start row 1."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = NUM_LAYERS, NUM_SLOTS, ITEM_BYTES
        self.host = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.dev = torch.zeros_like(self.host)
        orders = [torch.randperm(NUM_SLOTS // PAGE, generator=generator)[:NUM_PAGES] for _ in range(4)]
        self.arguments: dict[str, Any] = {
            **dict(zip(("pages", "host_pages", "lookup_pages", "index_pages"), orders, strict=True)),
            **{"num_tokens": NUM_TOKENS, "k_host": self.host, "k_dev": self.dev},
        }
        checks = torch.zeros((NUM_LAYERS, NUM_SLOTS), dtype=torch.int32)
        positions = torch.arange(NUM_TOKENS)
        items = self.host[:, self.slots("host_pages")]
        store_row_checks(checks, self.slots("index_pages"), items, positions, positions, range(NUM_LAYERS))
        self.state = HotBufferState.create(1, 3, NUM_SLOTS, 32, PAGE, NUM_SLOTS, NUM_SLOTS, row_checks=checks)

    def slots(self, name: str) -> Tensor:
        pages: Tensor = self.arguments[name]
        return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:NUM_TOKENS]

    def start(self, **changes: Any) -> PageFill:
        return PageFill(self.state, 1, **(self.arguments | changes))


@pytest.mark.I3
@pytest.mark.parametrize("most_bytes", [1, 60 * ITEM_BYTES, 200 * ITEM_BYTES, None])
def test_all_items_come_in_slices_of_no_more_than_what_is_allowed(most_bytes: int | None) -> None:
    row = Row()
    start = row.start()
    left = [start.num_left_bytes]
    while start.num_left_bytes is not None:
        num_bytes = start.launch_slice(most_bytes)
        assert most_bytes is None or num_bytes <= max(most_bytes, 60 * ITEM_BYTES)
        left.append(start.num_left_bytes)
    assert left[0] == NUM_LAYERS * NUM_TOKENS * ITEM_BYTES
    assert left[-1] is None
    assert len(left) == {1: 10, 60 * ITEM_BYTES: 9, 200 * ITEM_BYTES: 4, None: 2}[most_bytes]
    slots = row.slots("pages")
    assert torch.equal(row.dev[:, slots], row.host[:, row.slots("host_pages")])
    untouched = torch.ones(NUM_SLOTS, dtype=torch.bool)
    untouched[slots] = False
    assert (row.dev[:, untouched] == 0).all()
    state = row.state
    assert int(state.capacity[1]) == 0
    for name in ("page_table", "host_pages", "lookup_pages", "index_pages"):
        given = row.arguments["pages" if name == "page_table" else name]
        assert torch.equal(getattr(state, name)[1, :NUM_PAGES].long(), given)
    assert int(state.error_flags[1]) == HotBufferError.NONE


@pytest.mark.I3
@pytest.mark.parametrize("num_filled", [16, 64, 96])
def test_items_that_are_there_are_not_copied(num_filled: int) -> None:
    row = Row()
    start = row.start(num_filled=num_filled)
    assert start.num_left_bytes == NUM_LAYERS * (NUM_TOKENS - num_filled) * ITEM_BYTES
    start.launch_slice(None)
    slots, host_slots = row.slots("pages"), row.slots("host_pages")
    assert (row.dev[:, slots[:num_filled]] == 0).all()
    assert torch.equal(row.dev[:, slots[num_filled:]], row.host[:, host_slots[num_filled:]])
    assert row.state.page_table[1, :NUM_PAGES].tolist() == row.arguments["pages"].tolist()


@pytest.mark.I7
def test_a_wrong_item_is_found_on_its_way() -> None:
    row = Row()
    slot = int(row.slots("host_pages")[77])
    row.host[2, slot, 5] ^= 8
    row.start().launch_slice(None)
    assert int(row.state.error_flags[1]) == HotBufferError.WRONG_ROW
    wrong = wrong_row(row.state, 1)
    assert (wrong.item.layer, wrong.item.position, wrong.item.slot, wrong.is_on_host) == (2, 77, slot, True)


def test_a_row_without_tokens_has_its_pages_alone() -> None:
    row = Row()
    start = row.start(num_tokens=0)
    assert start.num_left_bytes == 0
    assert start.launch_slice(None) == 0
    assert start.num_left_bytes is None
    assert int(row.state.page_table[1, 0]) == int(row.arguments["pages"][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": torch.arange(9)}, "num_tokens"),
        ({"num_filled": NUM_TOKENS + 1}, "num_filled"),
        ({"host_pages": torch.arange(9), "lookup_pages": torch.arange(9)}, "num_tokens"),
        ({"index_pages": torch.arange(9)}, "num_tokens"),
        ({"lookup_pages": torch.arange(9)}, "lookup_pages"),
        ({"pages": torch.arange(31, 41)}, "pages highest"),
        ({"lookup_pages": torch.arange(-1, 9)}, "lookup_pages lowest"),
        ({"pages": torch.arange(41)}, "pages"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"host_pages": torch.zeros(10)}, "host_pages"),
    ],
)
def test_wrong_arguments_change_nothing(changes: Mapping[str, Any], message: str) -> None:
    row = Row()
    with pytest.raises(KernelArgumentError, match=message):
        row.start(**changes)
    assert (row.state.page_table == ABSENT).all()
    assert (row.state.host_pages == ABSENT).all()
    assert (row.dev == 0).all()
