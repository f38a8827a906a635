"""Runs without users come back in the order of their last touch, over all pools and for each set of them."""

from __future__ import annotations

import pytest

from hisparse_pd.core.paging.idle_runs import IdleRuns
from hisparse_pd.core.paging.pools import Holding, PoolKind, Stage
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.protocol.messages import Extent, Room

DEVICE = (PoolKind.DEVICE,)
HOST = (PoolKind.HOST,)
HELD = (PoolKind.DEVICE, PoolKind.INDEX)


def run_of(kinds: Kinds) -> Prefix:
    holding = Holding(Room(1), Stage.HELD, dict.fromkeys(kinds, (Extent(0, 4),)))
    return Prefix(kinds, None, end_page=1, keys=[b"key"], holding=holding)


def test_the_oldest_run_with_slots_in_a_pool_comes_first() -> None:
    host, device, held = (run_of(kinds) for kinds in (HOST, DEVICE, HELD))
    idle = IdleRuns()
    for run in (host, device, held):
        idle.touch(run)
    assert idle.oldest() is host
    assert idle.oldest({PoolKind.DEVICE}) is device
    assert idle.oldest({PoolKind.INDEX}) is held
    assert idle.oldest({PoolKind.LOOKUP}) is None
    idle.touch(host)
    idle.touch(device)
    assert idle.oldest() is held
    assert idle.oldest({PoolKind.DEVICE, PoolKind.HOST}) is held


def test_a_run_that_is_taken_out_is_not_found() -> None:
    first, second = run_of(DEVICE), run_of(DEVICE)
    idle = IdleRuns()
    idle.discard(first)
    idle.touch(first)
    idle.touch(second)
    assert first in idle
    assert list(idle) == [first, second]
    idle.discard(first)
    assert first not in idle
    assert idle.oldest() is second
    idle.discard(second)
    assert idle.oldest() is None


@pytest.mark.parametrize("kinds", [DEVICE, HOST])
def test_a_touched_run_is_the_last_of_its_kinds(kinds: Kinds) -> None:
    first, second = run_of(kinds), run_of(kinds)
    idle = IdleRuns()
    for run in (first, second, first):
        idle.touch(run)
    assert list(idle) == [second, first]


def test_a_run_with_slots_in_fewer_pools_keeps_its_place() -> None:
    runs = [run_of((PoolKind.HOST, PoolKind.INDEX)) for _ in range(4)]
    idle = IdleRuns()
    for run in runs:
        idle.touch(run)
    for run in (runs[2], runs[1]):  # the later one first
        del run.holding.extents[PoolKind.INDEX]
        idle.changed(run)
    assert list(idle) == runs
    assert idle.oldest({PoolKind.INDEX}) is runs[0]
    assert set(idle.firsts()) == {runs[0], runs[1]}
    idle.discard(runs[0])
    assert idle.oldest() is runs[1]
    assert idle.oldest({PoolKind.INDEX}) is runs[3]


def test_pages_are_counted_by_the_pools_in_which_runs_have_slots() -> None:
    first, second = run_of(HELD), run_of(HELD)
    idle = IdleRuns()
    idle.touch(first)
    idle.touch(second)
    idle.touch(first)
    assert idle.num_pages == {HELD: 2}
    first.keys *= 3
    idle.changed(first)
    assert idle.num_pages == {HELD: 4}
    assert list(idle) == [second, first]
    del first.holding.extents[PoolKind.INDEX]
    idle.changed(first)
    assert {pools: num for pools, num in idle.num_pages.items() if num} == {DEVICE: 3, HELD: 1}
    first.keys.clear()
    idle.discard(first)
    idle.changed(first)
    assert {pools: num for pools, num in idle.num_pages.items() if num} == {HELD: 1}
