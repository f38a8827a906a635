"""The order in which all requests can end, against every order that there is, by any claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.reserve import Claim, Order, Reserve, order_ends
from tests.examples import num_examples

pytestmark = [pytest.mark.I2]

Slots = tuple[int, int, int, int]

slots = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1), st.integers(0, 1))
pools = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(1, 6))
claims = st.builds(Claim, slots, st.lists(slots, min_size=1, max_size=2).map(tuple), st.just(()))


def fits(need: Slots, available: Sequence[int]) -> bool:
    return all(lack <= left for lack, left in zip(need, available, strict=True))


def ends(order: Sequence[Claim], landing: Sequence[Claim], available: Sequence[int]) -> bool:
    """Whether all can end in this order, and behind them each of those whose KV is on its way."""
    for claim in order:
        if not any(fits(way, available) for way in claim.ways):
            return False
        available = [left + owned for left, owned in zip(available, claim.owned, strict=True)]
    return all(any(fits(way, available) for way in claim.ways) for claim in landing)


def ordered(free: Slots, running: Sequence[Claim]) -> Order:
    """Return the order of all claims. A number stands for each request: nothing looks at it."""
    numbered = [(cast(Request, number), claim) for number, claim in enumerate(running)]
    return order_ends(SlotCounts(*free), numbered, {}, page_size=1)


def rest_of(available: Slots, taken: Slots) -> Slots | None:
    """None: there is not as much in the pools."""
    rest = tuple(left - lost for left, lost in zip(available, taken, strict=True))
    return cast(Slots, rest) if min(rest) >= 0 else None


@given(pools, st.lists(claims, max_size=4), st.lists(claims, max_size=2), st.lists(slots, max_size=4))
@settings(derandomize=True, max_examples=num_examples(40, 400))
def test_what_may_be_given_away_leaves_everybody_a_way_to_end(
    free: Slots, running: list[Claim], landing: list[Claim], asked: list[Slots]
) -> None:
    found = ordered(free, running)
    reserve, order = Reserve(found, landing), [place.claim for place in found.places]
    assert Counter(order) == Counter(running)
    assert reserve.is_safe == any(ends(way, landing, free) for way in permutations(running))
    if not reserve.is_safe:
        return
    left = free
    for need in asked:
        if (rest := rest_of(left, need)) is None:
            continue
        assert reserve.allows(SlotCounts(*need)) == ends(order, landing, rest)
        if reserve.allows(SlotCounts(*need)):
            reserve.give(SlotCounts(*need))
            left = rest


@given(pools, st.lists(claims, max_size=3), st.lists(claims, max_size=4))
@settings(derandomize=True, max_examples=num_examples(54, 800))
def test_whoever_is_admitted_can_end_as_well(free: Slots, running: list[Claim], asked: list[Claim]) -> None:
    found = ordered(free, running)
    if not found.is_safe:
        return
    reserve, landing, left = Reserve(found, []), list[Claim](), free
    order = [place.claim for place in found.places]
    for claim in asked:
        if (rest := rest_of(left, claim.owned)) is None:
            continue
        assert reserve.allows_landing(claim) == ends(order, [*landing, claim], rest)
        if reserve.allows_landing(claim):
            reserve.give_landing(claim)
            landing.append(claim)
            left = rest
