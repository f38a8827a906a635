"""The decode node's pools through any sequence of reservations: the terms sum to the total (I2)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hisparse_pd.paging.allocator import PoolExhausted
from hisparse_pd.paging.extents import extents_to_slots
from hisparse_pd.paging.pools import Holding, PoolKind, Pools, SlotCounts, Stage
from protocol.messages import Room

pytestmark = pytest.mark.I2

PAGE_SIZE = 4
TOTALS = SlotCounts(host=41, device=32, index=48, lookup=48, aux=5, req_row=4)


class PoolsMachine(RuleBasedStateMachine):
    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pools = Pools(TOTALS, PAGE_SIZE)
        self.live: list[Holding] = []

    @rule(
        target=holdings,
        need=st.builds(
            SlotCounts,
            host=st.integers(0, 20),
            device=st.integers(0, 20),
            index=st.integers(0, 20),
            aux=st.integers(0, 2),
            req_row=st.integers(0, 2),
        ),
    )
    def reserve(self, need: SlotCounts) -> object:
        before = self.pools.free
        fits = self.pools.rounded(need).fits_in(self.pools.free)
        try:
            holding = self.pools.reserve(Room(len(self.live)), need)
        except PoolExhausted:
            assert not fits
            assert self.pools.free == before, "nothing of a refused reservation is kept"
            return multiple()
        assert fits
        assert self.pools.free == before - self.pools.rounded(need)
        self.live.append(holding)
        return holding

    @rule(holding=holdings, num_slots=st.integers(1, 12))
    def grow(self, holding: Holding, num_slots: int) -> None:
        before = list(extents_to_slots(holding[PoolKind.DEVICE]))
        try:
            self.pools.grow(holding, PoolKind.DEVICE, num_slots)
        except PoolExhausted:
            assert list(extents_to_slots(holding[PoolKind.DEVICE])) == before
            return
        after = list(extents_to_slots(holding[PoolKind.DEVICE]))
        assert after[: len(before)] == before, "positions keep their slots"
        assert len(after) >= len(before) + num_slots

    @rule(holding=holdings, kinds=st.sets(st.sampled_from(PoolKind)), stage=st.sampled_from(Stage))
    def give_up_and_move(self, holding: Holding, kinds: set[PoolKind], stage: Stage) -> None:
        self.pools.give_up(holding, kinds)
        self.pools.move(holding, stage)
        assert all(holding.num_slots(kind) == 0 for kind in kinds)

    @rule(holding=consumes(holdings))
    def release(self, holding: Holding) -> None:
        self.pools.release(holding)
        self.live.remove(holding)

    @invariant()
    def is_whole(self) -> None:
        stages = [holding.stage for holding in self.live]
        self.pools.check_integrity({stage: stages.count(stage) for stage in Stage})
        for kind in PoolKind:
            used = sum(self.pools.used(stage)[kind] for stage in Stage)
            assert self.pools.free[kind] + used == self.pools.totals[kind]

    def teardown(self) -> None:
        for holding in self.live:
            self.pools.release(holding)
        assert self.pools.free == self.pools.totals


TestPools = PoolsMachine.TestCase
TestPools.settings = settings(
    derandomize=True,
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
