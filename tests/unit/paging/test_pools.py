"""Pools: reservations of whole pages, all or nothing, and books that say when they do not add up."""

from __future__ import annotations

import re

import pytest

from hisparse_pd.core.paging.allocator import PoolExhausted, PoolIntegrityError
from hisparse_pd.core.paging.extents import extents_to_pages
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.protocol.messages import Room

TOTALS = SlotCounts(host=100, device=64, index=128, lookup=200, aux=4, req_row=4)
NEED = SlotCounts(host=10, device=17, index=10, lookup=10, aux=1, req_row=1)


def test_slot_counts_list_the_pools_in_order() -> None:
    counts = SlotCounts(*range(1, 7))
    assert [counts[kind] for kind in PoolKind] == [1, 2, 3, 4, 5, 6]
    assert SlotCounts(1, 1, 1, 1, 1, 1).fits_in(counts)
    assert not SlotCounts(aux=6).fits_in(counts)


@pytest.mark.I2
def test_a_reservation_takes_whole_pages_and_is_all_or_nothing() -> None:
    pools = Pools(TOTALS, page_size=16)
    holding = pools.reserve(Room(1), NEED)
    assert pools.totals - pools.free == SlotCounts(host=16, device=32, index=16, lookup=16, aux=1, req_row=1)
    before = pools.free
    with pytest.raises(PoolExhausted, match=r"room 2, device pool.*33 token slots needed, 32 of 64 free"):
        pools.reserve(Room(2), SlotCounts(host=5, device=33))
    for kind in PoolKind:
        with pytest.raises(PoolExhausted):
            pools.reserve(Room(2), SlotCounts(1, 1, 1, 1, 1, 1) + SlotCounts.of((kind,), before[kind]))
        assert pools.free == before, kind
    pools.release(holding)
    assert pools.free == pools.totals
    with pytest.raises(PoolIntegrityError, match="released already"):
        pools.release(holding)


@pytest.mark.I2
def test_integrity_prints_every_term() -> None:
    pools = Pools(TOTALS, page_size=16)
    stages = dict(zip((1, 2, 3, 4, 5, 6), Stage, strict=True))
    holdings = {room: pools.reserve(Room(room), SlotCounts(host=room)) for room in stages}
    for room, stage in stages.items():
        pools.move(holdings[room], stage)
    pools.check_integrity(dict.fromkeys(Stage, 1))
    holdings[2].extents[PoolKind.HOST] = ()
    law = "free 0 + landing 16 + running 0 + ending 16 + quarantined 16 + held 16 + set aside 16"
    with pytest.raises(PoolIntegrityError, match=re.escape(f"{law} is not total 96")):
        pools.check_integrity()


def test_integrity_finds_slots_with_two_owners() -> None:
    pools = Pools(TOTALS, page_size=16)
    first, second = (pools.reserve(Room(room), SlotCounts(host=5)) for room in (1, 2))
    second.extents[PoolKind.HOST] = first[PoolKind.HOST]
    with pytest.raises(PoolIntegrityError, match=r"belongs to two.*free 64 \+ landing 32"):
        pools.check_integrity()


@pytest.mark.I2
@pytest.mark.I9
def test_a_page_that_is_set_aside_comes_to_nobody_before_it_is_taken_back() -> None:
    """Free, or somebody's; the others of who had it are free as ever."""
    pools = Pools(TOTALS, page_size=16)
    holding = pools.reserve(Room(1), SlotCounts(host=48))
    assert pools.set_aside(PoolKind.HOST, 20) == 16
    assert pools.condemned == {(PoolKind.HOST, 16)}
    assert pools.set_aside(PoolKind.HOST, 95) == 80
    assert pools.set_aside(PoolKind.HOST, 80) == 80, "again"
    assert pools.condemned == {(PoolKind.HOST, 16)}, "the other page was free"
    assert (pools.free.host, pools.num_set_aside) == (32, 1)
    pools.release(holding)
    assert (pools.free.host, pools.num_set_aside) == (64, 2)
    assert pools.set_aside_slots == pools.used(Stage.SET_ASIDE) == SlotCounts(host=32)
    pools.check_integrity({Stage.SET_ASIDE: 2})
    rest = pools.reserve(Room(2), SlotCounts(host=64))
    assert sorted(extents_to_pages(rest[PoolKind.HOST], 16)) == [0, 2, 3, 4]
    assert pools.take_back(PoolKind.HOST, 16)
    assert not pools.take_back(PoolKind.HOST, 16)
    assert pools.free.host == 16
    pools.set_aside(PoolKind.HOST, 0)
    assert pools.take_back(PoolKind.HOST, 0)
    pools.release(rest)
    assert pools.free.host == 80
