"""The free slots of a plan, move by move: I2."""

from __future__ import annotations

import pytest

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.plan_slots import PlanSlots

pytestmark = pytest.mark.I2

NOTHING = SlotCounts()


def test_copies_find_index_slots_before_those_that_they_replace_are_free() -> None:
    given, freed = SlotCounts(host=80, index=64), SlotCounts(device=64, index=64)
    assert PlanSlots.of(SlotCounts(host=80, index=64)).with_exchange(given, freed).suffice
    slots = PlanSlots.of(SlotCounts(host=80, index=48)).with_exchange(given, freed)
    assert slots.at_end == SlotCounts(device=64, index=48)
    assert not slots.suffice


def test_the_next_exchange_finds_what_the_one_before_gives_back() -> None:
    given, freed = SlotCounts(index=64), SlotCounts(index=64)
    slots = PlanSlots.of(SlotCounts(index=64))
    for _ in range(3):
        slots = slots.with_exchange(given, freed)
    assert slots.suffice
    assert slots.at_end == SlotCounts(index=64)


def test_a_hot_buffer_finds_the_device_slots_of_pages_that_are_left_for_it() -> None:
    slots = PlanSlots.of(NOTHING).with_exchange(SlotCounts(device=48), SlotCounts(device=64))
    assert slots.suffice
    assert slots.at_end == SlotCounts(device=16)


def test_held_pages_are_used_before_any_exchange_gives_slots_back() -> None:
    larger, smaller = SlotCounts(device=16), SlotCounts(device=-32)
    slots = PlanSlots.of(SlotCounts(device=16)).with_exchange(larger, NOTHING).with_exchange(smaller, NOTHING)
    assert slots.with_given(SlotCounts(device=32)).suffice
    assert not slots.with_used(SlotCounts(device=16)).suffice
    assert PlanSlots.of(SlotCounts(device=32)).with_exchange(larger, NOTHING).with_used(larger).suffice


def test_what_is_given_at_the_end_finds_all_that_exchanges_give_back() -> None:
    slots = PlanSlots.of(SlotCounts(index=64)).with_exchange(SlotCounts(index=64), SlotCounts(index=64))
    assert slots.with_given(SlotCounts(index=64)).suffice
    assert not slots.with_given(SlotCounts(index=80)).suffice
