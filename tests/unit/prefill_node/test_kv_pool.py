"""The prefill node's page allocator: every page has one state, and runs are contiguous where they can be."""

from __future__ import annotations

import pytest

from prefill_node.kv_pool import IntegrityError, PageId, PagePool, PageState, PageStateError, PoolExhausted


def pages(*page_ids: int) -> list[PageId]:
    return [PageId(page_id) for page_id in page_ids]


def test_allocates_the_tightest_run_that_fits() -> None:
    pool = PagePool(num_pages=12, page_size=4)
    everything = pool.allocate(12)
    pool.free([*everything[0:5], *everything[7:10]])  # free: [0, 5) and [7, 10)
    assert pool.allocate(3) == pages(7, 8, 9)
    assert pool.allocate(4) == pages(0, 1, 2, 3)


def test_takes_the_longest_runs_first_when_none_fits() -> None:
    pool = PagePool(num_pages=10, page_size=4)
    everything = pool.allocate(10)
    pool.free([everything[0], *everything[2:5], *everything[6:8]])  # runs of 1, 3 and 2
    assert pool.allocate(5) == pages(2, 3, 4, 6, 7)
    assert pool.num_free == 1


def test_allocates_all_or_nothing() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pool.allocate(3)
    with pytest.raises(PoolExhausted, match="2 pages needed, 1 of 4 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert pool.allocate(0) == []


def test_every_state_is_left_by_its_own_operation_only() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    owned = pool.allocate(4)
    pool.cache(owned[:1])
    pool.hold(owned[1:2])
    for operation, page, found in (
        (pool.free, 0, "CACHED"),
        (pool.free, 1, "IN_FLIGHT"),
        (pool.evict, 1, "IN_FLIGHT"),
        (pool.let_go, 2, "OWNED"),
        (pool.evict, 2, "OWNED"),
        (pool.hold, 0, "CACHED"),
    ):
        with pytest.raises(PageStateError, match=f"page {page} is {found}"):
            operation(pages(page))
    pool.evict(owned[:1])
    pool.let_go(owned[1:2])
    pool.free(owned[2:])
    assert pool.num_free == 4


@pytest.mark.I2
def test_refuses_what_is_freed_twice_or_foreign() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    owned = pool.allocate(2)
    with pytest.raises(PageStateError, match="twice"):
        pool.free([owned[0], owned[0]])
    with pytest.raises(PageStateError, match="page 4 is not in a pool of 4"):
        pool.free(pages(4))
    with pytest.raises(PageStateError, match="page -1"):
        pool.free(pages(-1))
    pool.free(owned)
    with pytest.raises(PageStateError, match="is FREE"):
        pool.free(owned)
    assert pool.num_free == 4


def test_integrity_names_a_leaked_page_and_every_term() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    owned = pool.allocate(2)
    pool.check_integrity(owned=owned, cached=[], in_flight=[])
    with pytest.raises(
        IntegrityError, match=r"2 FREE \+ 2 OWNED \+ 0 CACHED \+ 0 IN_FLIGHT of 4.*pages \[0, 1\]"
    ):
        pool.check_integrity(owned=owned[:1], cached=[], in_flight=[])
    with pytest.raises(IntegrityError, match="CACHED"):
        pool.check_integrity(owned=owned, cached=owned[:1], in_flight=[])


def test_pages_for_rounds_up_to_whole_pages() -> None:
    pool = PagePool(num_pages=1, page_size=64)
    assert [pool.pages_for(n) for n in (0, 1, 63, 64, 65, 128)] == [0, 1, 1, 1, 2, 2]
    assert pool.count(PageState.FREE) == 1
