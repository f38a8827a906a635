"""What misses cost: by how much they lengthen a step, and what one more request brings."""

from __future__ import annotations

import pytest

from hisparse_pd.decode_node.miss_cost import CHEAP, FIRST_MISSES, STALE_AFTER, MissCost, MissCosts
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.swap_counts import SwapCounts
from tests.books import make_request


def hisparse(hot_capacity: int, hits: int, misses: int, seq_len: int = 0) -> Request:
    """Return a request in a step. By default its hot buffer holds half of its sequence."""
    counters = SwapCounts(hits=hits, misses=misses)
    num_tokens = seq_len or 2 * hot_capacity
    return make_request(num_prompt_tokens=num_tokens, hot_capacity=hot_capacity, row_counters=counters)


DENSE = make_request(row_counters=SwapCounts())


@pytest.mark.parametrize(
    ("num_hot", "num_slots", "num_missed"),
    [
        (0, 1000, 0),
        (1, 1000, 5),  # it has 200 entries, and no more
        (4, 800, 20),
        (8, 800, 80),  # twice as many, each with half as many entries
        (2, 0, 2000),
    ],
)
def test_hot_buffers_share_slots_and_miss_half_with_each_doubling(
    num_hot: int, num_slots: int, num_missed: int
) -> None:
    cost = MissCost(missed_entries=1000)
    assert cost.num_missed(num_hot, num_slots, most=200) == num_missed


@pytest.mark.parametrize(("seq_len", "num_missed"), [(800, 3.75), (400, 2.5), (200, 0), (100, 0)])
def test_the_larger_the_part_of_a_sequence_that_has_entries_the_less_is_missed(
    seq_len: int, num_missed: float
) -> None:
    assert MissCost(missed_entries=1000).num_missed(1, 300, 200, seq_len) == num_missed


def test_one_more_pays_if_it_adds_less_than_a_requests_part_of_a_step() -> None:
    cost = MissCost(missed_entries=1.0, miss_secs=1e-6, request_secs=1e-3)
    assert cost.pays(999)
    assert not cost.pays(1001)
    assert CHEAP.pays(1e9)
    assert cost.secs_of(4) == 2.5e-7


def test_tokens_a_second_are_most_where_misses_take_as_long_as_what_any_step_takes() -> None:
    cost = MissCost(missed_entries=1000, miss_secs=1e-6, fixed_secs=4e-3, growth_secs=1e-4)

    def tokens_per_sec(num_hot: int) -> float:
        return cost.tokens_per_sec(num_hot, cost.num_missed(num_hot, 1000, most=1000))

    assert tokens_per_sec(20) == 20 / (4e-3 + 20 * 1e-4 + 20 * 20e-6)
    best = max(range(1, 200), key=tokens_per_sec)
    assert best == round(cost.most_hot(1000)) == 63
    assert CHEAP.tokens_per_sec(5, 0) == 0
    assert CHEAP.most_hot(1000) == float("inf")


@pytest.mark.parametrize(
    ("num_requests", "step_secs", "pays"), [(61, 0.0164, False), (11, 0.0105, True), (1, 0.0045, True)]
)
def test_what_was_measured_with_a_x_k2_light(num_requests: int, step_secs: float, pays: bool) -> None:
    """67% of 2,048 positions were missed with 4,096 entries, of 48 layers of 320 bytes, at 55 GB/s."""
    costs = MissCosts(2048, 48 * 320 / 55e9)
    costs.estimate([hisparse(4096, hits=33, misses=67, seq_len=32768)], None)
    cost = costs.estimate([DENSE] * num_requests, step_secs)
    assert cost.pays(cost.num_missed(1, 1 << 20, most=4096, seq_len=32768)) == pays


def test_requests_count_by_what_they_have_selected() -> None:
    """Twice as much would be missed if no position had an entry because so much of a sequence has."""
    costs = MissCosts(index_topk=10, miss_secs=0.5)
    cost = costs.estimate([hisparse(100, 0, 10), hisparse(400, 25, 5), hisparse(0, 50, 0)], 60.0)
    num_missed = 10 * (10 / 10 + 5 / 30)
    missed_entries = 10 * 2 * (100 * 10 + 400 * 5) / 40
    assert cost == MissCost(missed_entries, 0.5, 20.0, fixed_secs=60 - num_missed / 2)


def test_what_a_large_hot_buffer_misses_tells_nothing() -> None:
    costs = MissCosts(index_topk=10, miss_secs=0.5)
    before = costs.estimate([hisparse(100, 5, 5, seq_len=400)], None)
    assert before.missed_entries == pytest.approx(10 * 100 * 5 / 7.5)
    assert costs.estimate([hisparse(390, 9, 1, seq_len=400)], None) == before


def test_what_a_request_adds_without_misses_is_known_from_steps_of_fewer() -> None:
    """Steps take 10 seconds, 1 for each request, and 3 for what one of them misses."""
    costs = MissCosts(index_topk=10, miss_secs=0.5)
    assert costs.estimate([DENSE] * 4, 14.0).request_secs == 14 / 4, "how it grows is not known"
    one_misses = [hisparse(100, hits=4, misses=6)] + [DENSE] * 9
    cost = costs.estimate(one_misses, 10 + 10 + 3.0)
    assert cost.request_secs == pytest.approx(23 / 10 - 1)
    assert (cost.fixed_secs, cost.growth_secs) == pytest.approx((10, 1))
    assert costs.estimate([DENSE] * 4, 14.0).request_secs == 14 / 4 - 1, "without fewer, by steps of more"
    assert costs.estimate([DENSE] * 20, 5.0).request_secs == 5 / 20, "no step is shorter with more"


def test_a_step_that_is_shorter_than_what_its_requests_add_leaves_one_more_nothing() -> None:
    costs = MissCosts(2048, 1e-6, {1: 1.0, 4: 10.0})
    assert costs.estimate([DENSE] * 4, 4.0).request_secs == 0


def test_steps_of_about_as_many_requests_do_not_tell_what_one_adds() -> None:
    costs = MissCosts(index_topk=10, miss_secs=0.5, step_secs={1: 11.0, 16: 26.0})
    cost = costs.estimate([DENSE] * 17, 40.0)
    assert cost.growth_secs == pytest.approx(29 / 16), "by the step of one"


def test_what_a_node_measures_at_its_start_tells_how_steps_grow() -> None:
    costs = MissCosts(index_topk=10, miss_secs=0.5, step_secs={1: 11.0, 4: 14.0, 16: 26.0})
    first = costs.present()
    assert (first.fixed_secs, first.growth_secs, first.request_secs) == (10, 1, float("inf"))
    assert first.missed_entries == FIRST_MISSES * 10 * 20
    assert first.is_stale
    assert first.tells_speed
    of_unknown = costs.estimate([DENSE] * 3, None)
    assert (of_unknown.fixed_secs, of_unknown.growth_secs) == (10, 1)
    for _ in range(50):
        cost = costs.estimate([DENSE] * 16, 42.0)
    assert (cost.fixed_secs, cost.growth_secs) == pytest.approx((4 + 2 / 3, 2 + 1 / 3), rel=1e-3)


def test_steps_in_which_misses_take_long_do_not_tell_how_long_others_take() -> None:
    def many_miss() -> list[Request]:
        return [hisparse(100, hits=0, misses=10) for _ in range(4)]

    costs = MissCosts(index_topk=10, miss_secs=0.5, step_secs={1: 11.0, 4: 14.0})
    cost = costs.estimate(many_miss(), 60.0)
    assert (cost.fixed_secs, cost.growth_secs) == (10, 1)
    costs = MissCosts(index_topk=10, miss_secs=0.5, step_secs={1: 11.0})
    cost = costs.estimate(many_miss(), 34.0)
    assert (cost.fixed_secs, cost.growth_secs) == pytest.approx((9, 2)), "half of a step, for want of better"


def test_without_a_gpu_misses_cost_nothing() -> None:
    costs = MissCosts(index_topk=10, miss_secs=0.0)
    assert costs.present().missed_entries == 0
    cost = costs.estimate([hisparse(100, 0, 10), DENSE], 2.0)
    assert cost.missed_entries > 0
    assert cost.pays(1e9)
    assert not cost.tells_speed


def test_what_was_missed_is_stale_when_nobody_has_had_a_hot_buffer_for_long() -> None:
    costs = MissCosts(index_topk=10, miss_secs=0.5)
    assert costs.present().is_stale
    seen = costs.estimate([hisparse(100, 5, 5)], None)
    assert (seen.missed_entries, seen.is_stale) == (1000, False)
    after = [costs.estimate([DENSE], 2.0) for _ in range(STALE_AFTER)]
    assert {cost.missed_entries for cost in after} == {1000}
    assert [cost.is_stale for cost in after] == [False] * (STALE_AFTER - 1) + [True]
    assert not costs.estimate([hisparse(100, 5, 5)], 2.0).is_stale
    assert costs.estimate([hisparse(100, 5, 5)], None).pays(1e9), "seconds of a step are not known"


def test_the_share_of_the_link_that_misses_take() -> None:
    """300 positions of 10 us each, in steps of 4 ms and of 2 ms."""
    costs = MissCosts(index_topk=2048, miss_secs=1e-5)
    assert costs.link_share(300, 4e-3) == pytest.approx(0.75)
    assert costs.link_share(300, 2e-3) == 1.0
    assert costs.link_share(300, None) == 0.0, "no step was measured"
    assert MissCosts(index_topk=2048, miss_secs=0.0).link_share(300, 4e-3) == 0.0, "there is no GPU"
