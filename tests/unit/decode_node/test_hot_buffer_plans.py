"""Plans that change the sizes of hot buffers: who shrinks for others, and who grows while slots are free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from msgspec import structs

from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import StepPlan
from tests.books import end
from tests.unit.decode_node.plan_node import (
    FALSE,
    RESIDENTS,
    TRUE,
    Node,
    have_missed,
    request_slots,
    settled,
)


def test_hot_buffers_shrink_before_anybody_waits_for_one_and_grow_back() -> None:
    """160 device slots are 64 + 64 + 32; the fourth needs 32, which the latest large buffer gives up."""
    node = Node()
    requests = [node.arrive(TRUE, 80, max_new_tokens=10) for _ in range(3)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64, 64, 32]
    fourth = node.arrive(TRUE, 80, max_new_tokens=10)
    plan = node.step()
    assert [exchange.request for exchange in plan.exchanges] == [requests[1]]
    assert [request.hot_capacity for request in requests] == [64, 21, 32]
    assert fourth.hot_capacity == 32
    # 64 of 160 are free again: after an exchange there would be less than a hot buffer for the next one.
    end(node.rooms, requests[0])
    assert node.plan() == StepPlan()
    # With 96 free, the oldest gets its 64 back, the other does not.
    end(node.rooms, fourth)
    waiting = node.arrive(TRUE, 300, max_new_tokens=90)
    assert node.plan().exchanges == (), "not while somebody waits"
    end(node.rooms, waiting)
    node.step()
    assert [request.hot_capacity for request in requests[1:]] == [64, 32]
    assert [request.num_retractions for request in requests] == [0, 1, 0]
    assert node.plan() == StepPlan()


def test_a_hot_buffer_that_misses_nothing_stays_as_it_is() -> None:
    node = Node()
    *long, short = (node.arrive(TRUE, num_prompt_tokens, 60) for num_prompt_tokens in (80, 80, 30))
    node.step()
    assert short.hot_capacity == 32
    for request in long:
        end(node.rooms, request)
    assert node.plan() == StepPlan(), "its 30 tokens are all there"
    node.run(short, 10)
    node.step()
    assert short.hot_capacity == 64


AUTOMATIC = replace(RESIDENTS, largest_hot_buffer=128, keeps_residents=False)


def test_hot_buffers_get_their_share_of_the_pool_and_shrink_to_it_for_others() -> None:
    """Three have 128 of 512 slots each. Two more take what is free; a sixth gets what exceeds 96, the share
    of five, and then a dense one what exceeds the full size, from those with most first."""
    node = Node(AUTOMATIC)
    requests = [node.arrive(TRUE, 160, max_new_tokens=40) for _ in range(3)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64] * 3
    settled(node)
    assert [request.hot_capacity for request in requests] == [128] * 3
    later = [node.arrive(TRUE, 100, max_new_tokens=40) for _ in range(3)]
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [
        (requests[2], 96),
        (requests[1], 96),
    ]
    assert [request.hot_capacity for request in later] == [64] * 3
    dense = node.arrive(FALSE, 80, max_new_tokens=16)
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [
        (requests[0], 64),
        (requests[2], 64),
    ]
    assert dense.state is RequestState.RUNNING
    assert [request.num_retractions for request in requests] == [1, 1, 2]


def test_hot_buffers_grow_to_their_share_if_they_will_miss_enough_to_fill_it() -> None:
    """In 60 steps 48 of 20 selected positions are missed, fewer than the 64 entries that one would get."""
    node = Node(AUTOMATIC)
    requests = [node.arrive(TRUE, 130, max_new_tokens=60) for _ in range(7)]
    node.step()
    assert [request.hot_capacity for request in requests] == [64] * 7
    for request in requests[4:]:
        end(node.rooms, request)
    settled(node, miss_share=0.04)
    assert [request.hot_capacity for request in requests[:4]] == [64] * 4, "too few misses for that"
    first_slots = [request_slots(request) for request in requests[:4]]
    have_missed(requests[:4])
    assert [exchange.request for exchange in node.step().exchanges] == requests[:3], "all in one plan"
    assert [request.hot_capacity for request in requests[:4]] == [128, 128, 128, 64]
    assert node.rooms.pools.free.device == 64
    assert [request_slots(request)[:64] for request in requests[:4]] == first_slots
    assert node.plan() == StepPlan()
    dense = node.arrive(FALSE, 80, max_new_tokens=16)
    node.step()
    assert dense.state is RequestState.RUNNING
    assert [request_slots(request)[:64] for request in requests[:4]] == first_slots


def test_those_that_were_here_a_moment_ago_keep_their_part_of_the_share() -> None:
    """Two of five have ended. The others get a fifth of 512 slots each, until the five are long ago."""
    node = Node(AUTOMATIC)
    requests = [node.arrive(TRUE, 160, max_new_tokens=40) for _ in range(5)]
    node.step()
    for request in requests[3:]:
        end(node.rooms, request)
    have_missed(requests[:3])
    node.num_recent = 5
    assert [each.hot_capacity for each in node.step().exchanges] == [96] * 3
    have_missed(requests[:3])
    assert node.plan() == StepPlan()
    again = [node.arrive(TRUE, 160, max_new_tokens=40) for _ in range(2)]
    assert node.step().exchanges == (), "they find room"
    assert [request.hot_capacity for request in again] == [64] * 2
    for request in again:
        end(node.rooms, request)
    node.num_recent = 3
    assert [each.hot_capacity for each in node.step().exchanges] == [128] * 3


def test_no_pages_are_filled_that_those_of_a_moment_ago_would_take_back() -> None:
    node = Node(RESIDENTS)
    requests = [node.arrive(TRUE, 160, max_new_tokens=40) for _ in range(5)]
    node.step()
    for request in requests[1:]:
        end(node.rooms, request)
    have_missed(requests[:1])
    node.num_recent = 7  # whose hot buffers leave less than it would take
    assert node.plan().fills == ()
    node.num_recent = 1
    (fill,) = node.plan().fills
    assert fill.request is requests[0]


@pytest.mark.parametrize(("is_local", "capacity"), [(True, 96), (False, 64)])
def test_who_begins_at_once_has_its_share_at_once(is_local: bool, capacity: int) -> None:
    """One that begins without a prefill node gets no more than the others would leave it."""
    node = Node(AUTOMATIC)
    first = node.arrive(TRUE, 160, 40, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    node.num_recent = 5
    request = node.arrive(TRUE, 161, 40, family=1)
    node.rooms.queue(request, RequestState.WAITING, float("inf"), is_local=is_local)
    node.step()
    assert request.hot_capacity == capacity


def held_prompts(node: Node, num_prompts: int) -> None:
    """Let hisparse requests of ``num_prompts`` prompts of 160 tokens end, which are held then."""
    for family in range(1, num_prompts + 1):
        request = node.arrive(TRUE, 160, 10, family=family)
        node.step()
        end(node.rooms, request, is_sound=True)


def come_again(node: Node, families: Iterable[int]) -> list[Request]:
    """Let requests wait whose prompts have a token more than held ones, all at once."""
    requests = [node.arrive(TRUE, 161, 10, family=family) for family in families]
    for request in requests:
        node.rooms.queue(request, RequestState.WAITING, float("inf"), is_local=True)
    return requests


def test_many_who_begin_at_once_share_as_if_all_ran() -> None:
    """Otherwise the first would get what the others take back at once."""
    limits = replace(AUTOMATIC, totals=structs.replace(AUTOMATIC.totals, host=2000, index=2512, lookup=4000))
    node = Node(limits)
    held_prompts(node, 5)
    requests = come_again(node, range(1, 6))
    while any(not request.hot_capacity for request in requests):
        assert node.one_step().exchanges == ()
    assert [request.hot_capacity for request in requests[:3]] == [96, 96, 96]
    assert all(request.hot_capacity >= limits.device_buffer_size for request in requests)


@pytest.mark.parametrize(
    ("num_more", "num_recent", "is_resident"), [(1, 0, True), (2, 0, False), (0, 3, False)]
)
def test_who_begins_at_once_is_resident_where_all_can_be(
    num_more: int, num_recent: int, is_resident: bool
) -> None:
    """512 device slots are pages for two requests of 171 tokens: those that run, wait or are expected."""
    node = Node(RESIDENTS)
    held_prompts(node, 5)
    node.num_recent = num_recent
    requests = come_again(node, range(1, 2 + num_more))
    node.step()
    assert {request.is_resident for request in requests if request.holding} == {is_resident}
    if is_resident:
        assert [request.num_device_slots for request in requests] == [176] * 2


@pytest.mark.parametrize(("miss_share", "capacity"), [(0.2, 64), (0.7, 128)])
def test_hot_buffers_grow_into_held_pages_where_that_saves_more_copies(
    miss_share: float, capacity: int
) -> None:
    """A dense request's 160 slots are held of 240. In 40 steps 160 of 800 selected positions are missed, of
    which a hot buffer twice as large saves 80, or 560, of which it saves 280. What is held in the 64 slots
    that it takes counts for 256."""
    node = Node(replace(AUTOMATIC, totals=structs.replace(AUTOMATIC.totals, device=240)))
    dense = node.arrive(FALSE, 160, max_new_tokens=10, family=1)
    node.step()
    end(node.rooms, dense, is_sound=True)
    request = node.arrive(TRUE, 160, max_new_tokens=40)
    node.step()
    assert node.rooms.held.unused.device == 160
    settled(node, miss_share)
    assert request.hot_capacity == capacity
    assert (node.rooms.held.unused.device < 160) is (capacity > 64)
