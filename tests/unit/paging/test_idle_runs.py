"""Runs without users come back in the order of their last touch, over all kinds and for each of them."""

from __future__ import annotations

import pytest

from hisparse_pd.core.paging.idle_runs import IdleRuns
from hisparse_pd.core.paging.pools import Holding, PoolKind, Stage
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.protocol.messages import Room

DEVICE = (PoolKind.DEVICE,)
HOST = (PoolKind.HOST,)
HELD = (PoolKind.DEVICE, PoolKind.INDEX)


def run_of(kinds: Kinds) -> Prefix:
    return Prefix(kinds, None, end_page=1, keys=[b"key"], holding=Holding(Room(1), Stage.HELD))


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
