"""The order in which all requests can end, against every order that there is, by any claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.request import Request
from decode_node.reserve import Claim, Reserve
from hisparse_pd.paging.pools import SlotCounts

pytestmark = [pytest.mark.I2]

Slots = tuple[int, int, int, int]

slots = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1), st.integers(0, 1))
pools = st.tuples(*[st.integers(0, 8)] * 4)
claims = st.builds(Claim, slots, st.lists(slots, min_size=1, max_size=2).map(tuple), st.none())


def fits(need: Slots, available: Sequence[int]) -> bool:
    return all(lack <= left for lack, left in zip(need, available, strict=True))


def ends(order: Sequence[Claim], landing: Sequence[Claim], available: Sequence[int]) -> bool:
    """Whether all can end in this order, and behind them each of those whose KV is on its way."""
    for claim in order:
        if not any(fits(way, available) for way in claim.ways):
            return False
        available = [left + owned for left, owned in zip(available, claim.owned, strict=True)]
    return all(any(fits(way, available) for way in claim.ways) for claim in landing)


@given(pools, st.lists(claims, max_size=4), st.lists(claims, max_size=2), st.lists(slots, max_size=4))
@settings(derandomize=True, max_examples=400)
def test_what_may_be_given_away_leaves_everybody_a_way_to_end(
    free: Slots, running: list[Claim], landing: list[Claim], asked: list[Slots]
) -> None:
    # A claim's place stands for its request, which nothing here looks at.
    numbered = [(cast(Request, number), claim) for number, claim in enumerate(running)]
    reserve = Reserve(SlotCounts(*free), numbered, {}, page_size=1)
    for place in reserve.order:
        reserve.keep(place.claim, place.available)
    for claim in landing:
        reserve.keep_landing(claim)

    order = [place.claim for place in reserve.order]
    assert Counter(order) == Counter(running)
    assert reserve.is_safe == any(ends(way, landing, free) for way in permutations(running))
    if not reserve.is_safe:
        return
    left = free
    for need in asked:
        rest = tuple(one - other for one, other in zip(left, need, strict=True))
        if min(rest) < 0:
            continue  # there is not as much in the pools
        assert reserve.allows(SlotCounts(*need)) == ends(order, landing, rest)
        if reserve.allows(SlotCounts(*need)):
            reserve.give(SlotCounts(*need))
            left = cast(Slots, rest)


@given(pools, st.lists(claims, max_size=3), st.lists(claims, max_size=4))
@settings(derandomize=True, max_examples=200)
def test_whoever_is_admitted_can_end_as_well(free: Slots, running: list[Claim], asked: list[Claim]) -> None:
    numbered = [(cast(Request, number), claim) for number, claim in enumerate(running)]
    reserve = Reserve(SlotCounts(*free), numbered, {}, page_size=1)
    for place in reserve.order:
        reserve.keep(place.claim, place.available)
    if not reserve.is_safe:
        return
    order, landing, left = [place.claim for place in reserve.order], list[Claim](), free
    for claim in asked:
        rest = tuple(one - other for one, other in zip(left, claim.owned, strict=True))
        if min(rest) < 0:
            continue
        assert reserve.allows_landing(claim) == ends(order, [*landing, claim], rest)
        if reserve.allows_landing(claim):
            reserve.give_landing(claim)
            landing.append(claim)
            left = cast(Slots, rest)
