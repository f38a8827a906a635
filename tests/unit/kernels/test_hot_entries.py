"""Hot buffers that change their size, entry by entry; ``tests/property/test_hot_buffer.py`` has histories."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hisparse_pd.kernels import hot_entries
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_entries import enter_hot_buffer, resize_hot_buffer
from hisparse_pd.kernels.hot_state import ABSENT
from tests.unit.kernels.one_buffer import HOST_SLOTS, HOT_PAGES, HOT_SLOTS, PAGE_SIZE, ROW, Buffer
from tests.unit.kernels.table_rules import by_row, check_consistency

MORE_PAGES = [*HOT_PAGES, 1]
MORE_SLOTS = [*HOT_SLOTS, 4, 5]


def resized(buffer: Buffer, num_before: int, capacity: int, num_tokens: int) -> list[int]:
    """Give the hot buffer another capacity. Returns the positions in it, after checking their items."""
    arguments: dict[str, Any] = {"num_before": num_before, "num_tokens": num_tokens}
    resize_hot_buffer(
        buffer.state,
        ROW,
        capacity=capacity,
        hot_pages=torch.tensor(MORE_PAGES[: -(-capacity // PAGE_SIZE)]),
        layers_of_group=((0, 1),),
        k_dev=buffer.k_dev,
        **arguments,
    )
    check_consistency(buffer.state)
    positions = buffer.hot_positions()
    for entry, position in enumerate(positions):
        if position >= 0:
            item = buffer.k_dev[:, MORE_SLOTS[entry]]
            assert torch.equal(item, buffer.k_host[:, HOST_SLOTS[position]])
    return positions


def test_a_larger_one_has_empty_entries_behind_those_that_it_had() -> None:
    buffer = Buffer()
    assert buffer.start(12, [7, 3, 5]) == 3
    before = buffer.k_dev.clone()
    assert resized(buffer, 4, 6, 12) == [7, 3, 5, -1, -1, -1]
    assert torch.equal(buffer.k_dev, before), "no item moves"
    assert buffer.swap_in(13, [7, 1, 2, 9])[0] == HOT_SLOTS[0]
    assert buffer.hot_positions() == [7, 9, 5, 1, 2, 12], "empty ones are taken first, and then the oldest"


@pytest.fixture(params=["all layers at once", "one layer at a time"])
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many layers' items move by the same launches."""
    if request.param == "one layer at a time":
        monkeypatch.setattr(hot_entries, "MOVED_BYTES", 1)


@pytest.mark.usefixtures("moves")
def test_a_smaller_one_keeps_what_was_used_last() -> None:
    """Position 5 moves from hot_index 2 to that of position 3, which was not used for longer."""
    buffer = Buffer()
    buffer.start(12, [7, 3, 5])
    buffer.state.stamps[0, HOT_SLOTS[:3]] = torch.tensor([2, 1, 3], dtype=torch.int32)
    buffer.state.step[0, ROW] = 3
    assert resized(buffer, 4, 3, 12) == [7, 5, -1, -1, -1, -1]
    assert by_row(buffer.state, buffer.state.stamps)[0, ROW].tolist() == [2, 3, -1, -1, -1, -1]
    assert buffer.state.hot_pages[ROW].tolist() == [*HOT_PAGES, -1]
    assert resized(buffer, 3, 2, 12) == [5, -1, -1, -1, -1, -1]


@pytest.mark.usefixtures("moves")
def test_one_that_holds_all_positions_has_each_at_the_hot_index_of_its_own_number() -> None:
    """Positions 2, 4 and 1 of five; a swap of two items needs no third slot."""
    buffer = Buffer()
    buffer.start(5, [2, 4, 1])
    assert resized(buffer, 4, 6, 5) == [-1, 1, 2, -1, 4, -1]
    assert resized(buffer, 6, 6, 5) == [-1, 1, 2, -1, 4, -1]


def test_a_draft_that_was_not_accepted_is_forgotten() -> None:
    """Positions 8 to 10 were new, and 9 and 10 will be again, at other entries, as the ring is elsewhere."""
    buffer = Buffer(max_new=3)
    state = buffer.state
    lookup_slots = [int(state.lookup_pages[ROW, p // 4]) * 4 + p % 4 for p in (3, 8, 9, 10)]
    for entry, (lookup_slot, position) in enumerate(zip(lookup_slots, (3, 8, 9, 10), strict=True)):
        state.lookup_to_hot[0, lookup_slot] = entry
        state.hot_to_lookup[0, HOT_SLOTS[entry]] = lookup_slot
        state.stamps[0, HOT_SLOTS[entry]] = 0
        buffer.k_dev[:, HOT_SLOTS[entry]] = buffer.k_host[:, HOST_SLOTS[position]]
    assert resized(buffer, 4, 6, 9) == [3, 8, -1, -1, -1, -1]


@pytest.mark.I2
@pytest.mark.parametrize(("num_before", "capacity"), [(4, 2), (4, 6), (6, 3), (6, 4)])
def test_a_row_whose_items_cannot_be_moved_can_be_emptied(
    num_before: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may go to another row at once, which must find no words there. Memory for a move may lack."""
    buffer = Buffer()
    buffer.start(4, [2, 3, 1])
    if num_before > 4:
        resized(buffer, 4, num_before, 4)
    monkeypatch.setattr(hot_entries, "_move_items", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        resized(buffer, num_before, capacity, 4)
    buffer.state.reset_rows(ROW)
    check_consistency(buffer.state)
    for table in (buffer.state.lookup_to_hot, buffer.state.hot_to_lookup, buffer.state.stamps):
        assert (table == ABSENT).all()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"num_before": 7}, "num_before"),
        ({"num_tokens": 21}, "num_tokens"),
        ({"capacity": 7}, r"capacity: expected a value in \[1, 7\), got 7"),
        ({"capacity": 0}, r"capacity: expected a value in \[1, 7\), got 0"),
        ({"capacity": 4}, r"hot_pages: expected shape \[1\], got \[2\]"),
        ({"hot_pages": torch.tensor([5, 6])}, r"hot_pages highest: expected a value in \[0, 6\), got 6"),
        ({"hot_pages": torch.tensor([5, -1])}, r"hot_pages lowest: expected a value in \[0, 6\), got -1"),
        ({"layers_of_group": ((0,), (1,))}, "layers_of_group: expected 1 groups, got 2"),
        ({"layers_of_group": ((0,),)}, "layers_of_group: expected each of the 2 layers of k_dev once"),
    ],
)
def test_arguments_are_checked_before_anything_changes(changed: dict[str, Any], error: str) -> None:
    buffer = Buffer()
    buffer.start(12, [7, 3, 5])
    arguments: dict[str, Any] = {
        "num_before": 4,
        "capacity": 6,
        "hot_pages": torch.tensor(MORE_PAGES),
        "num_tokens": 12,
        "layers_of_group": ((0, 1),),
        "k_dev": buffer.k_dev,
    }
    with pytest.raises(KernelArgumentError, match=error):
        resize_hot_buffer(buffer.state, ROW, **(arguments | changed))
    assert buffer.hot_positions() == [7, 3, 5, -1, -1, -1]


@pytest.mark.parametrize(("first_position", "num_tokens"), [(0, 4), (8, 12), (13, 12), (1, 3)])
def test_pages_become_a_hot_buffer_only_with_room_for_its_ring(first_position: int, num_tokens: int) -> None:
    """Four entries have room for three positions, or for all of up to three."""
    buffer = Buffer()
    buffer.state.drop_hot_buffer(ROW)
    arguments: dict[str, Any] = {
        "capacity": 4,
        "hot_pages": torch.tensor(HOT_PAGES),
        "num_tokens": num_tokens,
    }
    with pytest.raises(KernelArgumentError, match="first_position"):
        enter_hot_buffer(buffer.state, ROW, first_position=first_position, **arguments)
    enter_hot_buffer(buffer.state, ROW, first_position=max(0, num_tokens - 3), **arguments)
    check_consistency(buffer.state)
    first = max(0, num_tokens - 3)
    assert buffer.hot_positions()[:4] == [*range(first, num_tokens), *[-1] * (4 - num_tokens + first)]
