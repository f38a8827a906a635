"""The row check: its numbers, the errors that it detects, and where checks are kept and compared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.reference_check import reference_checks
from hisparse_pd.kernels.row_check import (
    begin_check,
    check_dense_row,
    check_in_place,
    row_checks_of,
    store_row_checks,
    void_row_checks,
    wrong_row,
)
from hisparse_pd.kernels.row_errors import HotBufferError, ReadAt

SIZES = [1, 2, 3, 4, 9, 656, 1152, 2304]
PAGE_SIZE, ROW = 4, 1


def check(item: Tensor, layer: int = 0, position: int = 0) -> int:
    return int(reference_checks(item[None], layer, torch.tensor([position]))) & 0xFFFFFFFF


def random_items(num_items: int, item_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(item_bytes)
    return torch.randint(0, 256, (num_items, item_bytes), dtype=torch.uint8, generator=generator)


def by_the_book(item: bytes, layer: int, position: int) -> int:
    """Compute the check as docs/kv-layout.md defines it, word by word."""
    total = (2 * ((layer << 22) + position) + 1) * 0x85EBCA6B
    for number, start in enumerate(range(0, len(item), 4), 1):
        mixed = number * 0x9E3779B1 % 2**32
        total += int.from_bytes(item[start : start + 4], "little") * (mixed ^ mixed >> 15 | 1)
    return total % 2**32


@pytest.mark.parametrize(
    ("item", "layer", "position", "expected"),
    [
        (bytes(656), 0, 0, 0x85EBCA6B),
        (bytes(656), 60, 163_839, 0xF82B3595),
        (bytes([1]), 0, 0, 0x2422104A),
        (bytes([1, 2, 3]), 3, 5, 0x3E00B678),
        (bytes(range(256)) * 2 + bytes(144), 7, 4096, 0xF42D94FB),
        (bytes([255]) * 1152, 61, 131_071, 0x490FDC8D),
    ],
)
def test_fixed_vectors(item: bytes, layer: int, position: int, expected: int) -> None:
    assert check(torch.tensor(list(item), dtype=torch.uint8), layer, position) == expected


@pytest.mark.parametrize("item_bytes", SIZES)
def test_as_the_documentation_says(item_bytes: int) -> None:
    for number, item in enumerate(random_items(20, item_bytes)):
        layer, position = number * 25, number * 220_000
        assert check(item, layer, position) == by_the_book(bytes(item.tolist()), layer, position)


@pytest.mark.parametrize("item_bytes", SIZES)
def test_every_flipped_bit_is_seen(item_bytes: int) -> None:
    item = random_items(1, item_bytes)
    flipped = item.repeat(8 * item_bytes, 1)
    bits = torch.arange(8 * item_bytes)
    flipped[bits, bits // 8] ^= (1 << bits % 8).to(torch.uint8)
    positions = torch.full((8 * item_bytes,), 77)
    assert (reference_checks(flipped, 5, positions) != check_of(item, 5, 77)).all()


def check_of(item: Tensor, layer: int, position: int) -> Tensor:
    return reference_checks(item, layer, torch.tensor([position]))


def test_every_change_of_one_word_is_seen() -> None:
    """Factors of words are odd, so that no product with a word but 0 is 0, and distinct."""
    words = torch.eye(4096, dtype=torch.int32).view(torch.uint8)
    nothing = torch.zeros_like(words[:1])
    factors = reference_checks(words, 0, torch.zeros(4096, dtype=torch.int64)) - check_of(nothing, 0, 0)
    assert bool((factors % 2 != 0).all())
    assert len(factors.unique()) == 4096


def test_the_same_item_elsewhere_is_seen() -> None:
    item = torch.zeros((2, 656), dtype=torch.uint8)
    places = [(layer, position) for layer in (0, 1, 2, 60, 511) for position in (0, 1, 63, 64, 4_194_303)]
    checks = {check(item[0], layer, position) for layer, position in places}
    assert len(checks) == len(places)
    assert 0 not in checks, "memory of checks that nobody has written would vouch for an empty row"


@pytest.mark.parametrize("item_bytes", [656, 1152, 9])
def test_zeroed_shifted_stale_and_half_written_rows_are_seen(item_bytes: int) -> None:
    item, stale = random_items(2, item_bytes)
    half = torch.cat((item[: item_bytes // 2], stale[item_bytes // 2 :]))
    for wrong in (item * 0, item.roll(1), item.roll(4), item.flip(0), stale, half):
        assert check(wrong, 3, 9) != check(item, 3, 9)


@pytest.mark.parametrize("item_bytes", [9, 24])
def test_checks_of_pools(item_bytes: int) -> None:
    pool = random_items(3 * 10, item_bytes).view(3, 10, -1)
    slots, positions = torch.tensor([7, 0, 7]), torch.tensor([100, 2, 3])
    found = row_checks_of(pool, slots, positions, first_layer=4)
    for layer in range(3):
        for i in range(3):
            item = pool[layer, slots[i]]
            assert int(found[layer, i]) & 0xFFFFFFFF == check(item, 4 + layer, int(positions[i]))
    assert row_checks_of(pool, slots[:0], positions[:0]).shape == (3, 0)


def test_stored_where_they_belong() -> None:
    pool = random_items(2 * 5, 24).view(2, 5, 24)
    row_checks = torch.zeros((2, 7), dtype=torch.int32)
    places = torch.tensor([5, 1]), pool, torch.tensor([0, 4]), torch.tensor([8, 9])
    expected = torch.zeros_like(row_checks)
    for layer, layers in ((1, range(1, 2)), (0, range(2))):
        store_row_checks(row_checks, *places, layers)
        expected[layer, 5] = check_of(pool[layer, :1], layer, 8)[0]
        expected[layer, 1] = check_of(pool[layer, 4:], layer, 9)[0]
        assert torch.equal(row_checks, expected)
    void_row_checks(row_checks, torch.tensor([2]), 2)
    expected[:, 4:6] = 0
    assert torch.equal(row_checks, expected)
    with pytest.raises(KernelArgumentError, match=r"row_checks: expected shape \[2, \*\], got \[1, 7\]"):
        store_row_checks(
            row_checks[:1], torch.tensor([5]), pool, torch.tensor([0]), torch.tensor([8]), range(1)
        )


class Dense:
    """A request of 10 positions in pages of 4, in the device pool of two layers."""

    def __init__(self) -> None:
        self.pool = random_items(2 * 20, 24).view(2, 20, 24)
        self.row_checks = torch.zeros((2, 20), dtype=torch.int32)
        self.state = HotBufferState.create(1, 3, 20, 6, PAGE_SIZE, 20, 20, row_checks=self.row_checks)
        self.slots = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7, 16, 17])
        self.positions = torch.arange(10)
        self.state.set_pages(ROW, 0, torch.tensor([3, 1, 4]))
        self.state.set_index_pages(ROW, 0, torch.tensor([2, 0, 1]))
        check_slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5])
        store_row_checks(self.row_checks, check_slots, self.pool, self.slots, self.positions, range(2))

    def go_through(self, is_there: Tensor | None = None) -> HotBufferError:
        is_there = torch.ones(10, dtype=torch.bool) if is_there is None else is_there
        check_in_place(self.state, ROW, self.pool, self.slots, self.positions, is_there, read_at=ReadAt.START)
        return HotBufferError(int(self.state.error_flags[ROW]))


def test_rows_in_place() -> None:
    dense = Dense()
    assert dense.go_through() == HotBufferError.NONE
    right = check(dense.pool[1, 5], 1, 5)
    dense.pool[1, 5, 23] ^= 128
    dense.pool[1, 6, 0] ^= 1
    assert dense.go_through(dense.positions < 5) == HotBufferError.NONE, "position 5 does not count"
    assert dense.go_through() == HotBufferError.WRONG_ROW
    found = wrong_row(dense.state, ROW)
    assert found == (ReadAt.START, (1, 5, 5, right, check(dense.pool[1, 5], 1, 5)), False)
    dense.pool[0, 12, 0] ^= 1
    assert dense.go_through() == HotBufferError.WRONG_ROW
    assert wrong_row(dense.state, ROW) == found, "the first one stays"
    assert dense.state.error_flags.tolist() == [0, HotBufferError.WRONG_ROW, 0]
    dense.state.reset_rows(ROW)
    assert int(dense.state.error_flags[ROW]) == 0


def test_a_dense_row_as_it_landed() -> None:
    dense = Dense()

    def go_through(num_tokens: int) -> HotBufferError:
        check_dense_row(dense.state, ROW, dense.pool, num_tokens)
        return HotBufferError(int(dense.state.error_flags[ROW]))

    assert go_through(10) == HotBufferError.NONE
    right = check(dense.pool[1, 5], 1, 5)
    dense.pool[1, 5, 23] ^= 128
    assert (go_through(0), go_through(5)) == (HotBufferError.NONE, HotBufferError.NONE)
    assert go_through(6) == HotBufferError.WRONG_ROW
    found = wrong_row(dense.state, ROW)
    assert found == (ReadAt.START, (1, 5, 5, right, check(dense.pool[1, 5], 1, 5)), False)
    with pytest.raises(KernelArgumentError, match=r"num_tokens: expected .* 21"):
        check_dense_row(dense.state, ROW, dense.pool, 21)


def test_pages_with_a_wrong_item() -> None:
    """One flipped bit is seen in any item that counts, in any layer; others are not looked at."""
    pool = random_items(2 * 20, 24).view(2, 20, 24)
    row_checks = torch.zeros((2, 20), dtype=torch.int32)
    pages = np.array([[3, 8, 4], [1, 0, 4], [4, 12, 2]], np.int32)  # positions 8 to 11, 0 to 3, 12 and 13
    slots = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7, 16, 17])
    positions = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 12, 13])
    store_row_checks(row_checks, slots, pool, slots, positions, range(2))
    assert not begin_check(pool, row_checks, pages, PAGE_SIZE).item()
    for layer, slot in itertools.product(range(2), range(20)):
        pool[layer, slot, slot] ^= 16
        assert begin_check(pool, row_checks, pages, PAGE_SIZE).item() == (slot in slots), (layer, slot)
        pool[layer, slot, slot] ^= 16
    pages[0, 1] = 12
    assert begin_check(pool, row_checks, pages, PAGE_SIZE).item(), "a page at another position"
    assert not begin_check(pool, row_checks, pages[1:], PAGE_SIZE).item()
    assert not begin_check(pool, row_checks, pages[:0], PAGE_SIZE).item()


def test_without_checks_nothing_can_be_compared() -> None:
    state = HotBufferState.create(1, 3, 20, 6, PAGE_SIZE, 20, 20)
    with pytest.raises(KernelArgumentError, match="row_checks: expected a tensor, got None"):
        state.require_row_checks()
