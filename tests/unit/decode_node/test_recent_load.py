"""How many requests had slots at a time a moment ago."""

from __future__ import annotations

from hisparse_pd.decode_node.recent_load import RECENT_SECS, RecentLoad


def test_a_number_counts_until_it_is_old_or_a_larger_one_comes() -> None:
    load = RecentLoad()
    assert load.most(3, 0.0) == 3
    assert load.most(1, 0.25) == 3
    assert load.most(2, 0.5) == 3
    assert load.most(0, RECENT_SECS) == 3
    assert load.most(0, 0.1 + RECENT_SECS) == 2, "1 was there before 2, and is not the most any more"
    assert load.most(0, 0.6 + RECENT_SECS) == 0
    assert load.most(5, 9.0) == 5
    assert load.most(0, 9.0 + 2 * RECENT_SECS) == 0


def test_it_keeps_no_more_numbers_than_differ() -> None:
    load = RecentLoad()
    for moment in range(10_000):
        load.most(moment * 7919 % 13, moment / 1e5)
    assert len(load._falling) <= 13
