"""Extents and token slots: both directions, slices, and the expansion of pages."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.core.paging.extents import (
    as_slots,
    extents_to_slots,
    joined,
    ranges_to_slots,
    slice_extents,
    total_length,
)
from hisparse_pd.protocol.messages import Extent
from tests.slot_plans import expand_pages

extent_lists = st.lists(st.builds(Extent, st.integers(0, 500), st.integers(1, 40)), max_size=12)
quick = settings(derandomize=True, max_examples=100)


@quick
@given(st.lists(st.integers(0, 50), max_size=60))
def test_slots_survive_the_way_through_extents(slots: list[int]) -> None:
    extents = joined(Extent(slot, 1) for slot in slots)
    assert extents_to_slots(extents).tolist() == slots
    assert total_length(extents) == len(slots)
    assert all(before.end != after.start for before, after in pairwise(extents))


def test_slots_are_int64_whatever_came_in() -> None:
    assert extents_to_slots(()).dtype == np.int64
    assert extents_to_slots((Extent(2**40, 2),)).tolist() == [2**40, 2**40 + 1]
    assert as_slots(np.array([1, 2], np.uint16)).dtype == np.int64
    assert ranges_to_slots(np.array([4, 0]), np.array([2, 1])).tolist() == [4, 5, 0]


@quick
@given(extent_lists, st.data())
def test_a_slice_of_extents_is_the_slice_of_their_slots(extents: list[Extent], data: st.DataObject) -> None:
    num_slots = total_length(extents)
    start = data.draw(st.integers(0, num_slots))
    stop = data.draw(st.integers(start, num_slots))
    sliced = slice_extents(extents, start, stop)
    assert extents_to_slots(sliced).tolist() == extents_to_slots(extents)[start:stop].tolist()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6), (6, 6)])
def test_a_slice_outside_the_extents_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\)"):
        slice_extents((Extent(10, 3), Extent(0, 2)), start, stop)


@pytest.mark.I6
@quick
@given(st.lists(st.integers(0, 99), max_size=8), st.integers(1, 9), st.data())
def test_page_expansion_matches_the_definition(
    page_ids: list[int], page_size: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(page_ids) * page_size))
    stop = data.draw(st.integers(start, len(page_ids) * page_size))
    expected = [page_ids[p // page_size] * page_size + p % page_size for p in range(start, stop)]
    assert expand_pages(page_ids, page_size, start, stop).tolist() == expected


@pytest.mark.parametrize(("page_size", "start", "stop"), [(4, 0, 13), (4, 5, 4), (4, -1, 2), (0, 0, 0)])
def test_positions_outside_the_pages_are_refused(page_size: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"pages of|positions"):
        expand_pages([5, 2, 0], page_size, start, stop)


@pytest.mark.parametrize("values", [[0.5], [[1, 2]], ["3"]])
def test_only_lists_of_integers_are_slots(values: list[object]) -> None:
    with pytest.raises(ValueError, match="expected a list of integers"):
        as_slots(values)  # type: ignore[arg-type]
