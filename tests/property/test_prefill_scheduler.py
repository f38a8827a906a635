"""The prefill node's planning of forwards: bounds, order and shares, by any limits and queues.

The life of its rooms under everything that happens to them: ``test_rooms_both_ends.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.prefill_node.scheduler import (
    MAX_LOOKED_AT,
    Running,
    StepLimits,
    Waiting,
    plan_step,
    why_never,
)
from hisparse_pd.protocol.messages import (
    Room,
)
from tests.examples import num_examples

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5, pytest.mark.I7, pytest.mark.I8]

PAGE_SIZE = 4
ITEM_BYTES = 8

# --- planning ---------------------------------------------------------------------------------------------

limits_strategy = st.builds(
    StepLimits,
    chunk_tokens=st.integers(1, 40),
    short_tokens=st.integers(0, 20),
    max_requests=st.integers(1, 6),
    page_size=st.just(PAGE_SIZE),
    num_pages=st.integers(1, 30),
    graph_tokens=st.integers(0, 40),
    graph_requests=st.integers(1, 6),
)


@st.composite
def waiting_rooms(draw: st.DrawFn) -> list[Waiting]:
    rooms = []
    for number in range(draw(st.integers(0, 8))):
        num_tokens = draw(st.integers(1, 60))
        keys = tuple(
            bytes([draw(st.integers(0, 1)), *position.to_bytes(2)])
            for position in range((num_tokens - 1) // PAGE_SIZE)
        )
        num_cached = draw(st.integers(0, len(keys)))
        num_unused = draw(st.integers(0, num_cached))
        rooms.append(Waiting(Room(100 + number), num_tokens, keys, num_cached, num_unused))
    return rooms


@st.composite
def running_rooms(draw: st.DrawFn) -> list[Running]:
    rooms = []
    for number in range(draw(st.integers(0, 4))):
        num_tokens = draw(st.integers(1, 60))
        rooms.append(Running(Room(number), num_tokens, draw(st.integers(0, num_tokens - 1)), ()))
    return rooms


@settings(derandomize=True, max_examples=num_examples(54, 300))
@given(limits_strategy, running_rooms(), waiting_rooms(), st.integers(0, 30), st.integers(0, 8))
def test_a_plan_keeps_every_bound_and_the_order(
    limits: StepLimits, running: list[Running], waiting: list[Waiting], num_pages: int, num_aux_slots: int
) -> None:
    chunks = plan_step(running, waiting, limits, num_available_pages=num_pages, num_aux_slots=num_aux_slots)
    assert sum(chunk.stop - chunk.start for chunk in chunks) <= limits.chunk_tokens
    assert all(chunk.start < chunk.stop for chunk in chunks)
    assert len(chunks) <= limits.max_requests
    rooms = [chunk.room for chunk in chunks]
    assert len(set(rooms)) == len(rooms)

    admitted = [chunk for chunk in chunks if chunk.admits]
    continued = [chunk for chunk in chunks if not chunk.admits]
    known: list[Running | Waiting] = [*running, *waiting]
    order = [room.room for room in known]
    assert rooms == sorted(rooms, key=order.index)
    assert chunks == (*continued, *admitted)
    assert len(running) + len(admitted) <= max(limits.max_requests, len(running))
    assert len(admitted) <= num_aux_slots
    by_room = {room.room: room for room in waiting}
    needed = sum(
        limits.pages_for(by_room[chunk.room].num_tokens)
        - by_room[chunk.room].num_cached_pages
        + by_room[chunk.room].num_unused_pages
        for chunk in admitted
    )
    assert needed <= num_pages
    for chunk in admitted:
        assert chunk.start == by_room[chunk.room].num_cached_pages * PAGE_SIZE
    num_tokens = {room.room: room.num_tokens for room in known}
    long = [chunk for chunk in chunks if chunk.stop < num_tokens[chunk.room]]
    assert len(long) <= 1
    if long:
        assert sum(chunk.stop - chunk.start for chunk in chunks) == limits.chunk_tokens
        behind = chunks[chunks.index(long[0]) + 1 :]
        assert sum(chunk.stop - chunk.start for chunk in behind) <= limits.short_tokens
    else:
        assert [chunk.room for chunk in continued] == [room.room for room in running][: len(continued)]


def waiting(number: int, num_tokens: int, keys: tuple[bytes, ...] = (), num_cached: int = 0) -> Waiting:
    return Waiting(Room(number), num_tokens, keys, num_cached, 0)


LIMITS = StepLimits(chunk_tokens=32, short_tokens=0, max_requests=4, page_size=PAGE_SIZE, num_pages=16)


def test_a_forward_of_few_tokens_takes_few_requests() -> None:
    """Where a request makes it larger, it takes as many as any other."""
    limits = replace(LIMITS, max_requests=9, num_pages=99, graph_tokens=9, graph_requests=3)
    for num_tokens, rooms in ((3, [1, 2, 3]), (4, [1, 2, 3, 4, 5])):
        queue = [waiting(number, num_tokens) for number in range(1, 6)]
        chunks = plan_step([], queue, limits, num_available_pages=99, num_aux_slots=9)
        assert [chunk.room for chunk in chunks] == rooms
    running = [Running(Room(number), 3, 0, ()) for number in range(1, 6)]
    chunks = plan_step(running, [], limits, num_available_pages=99, num_aux_slots=9)
    assert [chunk.room for chunk in chunks] == [1, 2, 3]


def test_a_room_that_does_not_fit_holds_back_those_behind_it() -> None:
    queue = [waiting(1, 4), waiting(2, 40), waiting(3, 4)]
    chunks = plan_step([], queue, LIMITS, num_available_pages=5, num_aux_slots=4)
    assert [chunk.room for chunk in chunks] == [1]


SHORT_TOO = replace(LIMITS, short_tokens=12)


def test_short_prompts_end_beside_a_long_one_that_gives_a_share() -> None:
    running = [Running(Room(1), 50, 3, ())]
    queue = [waiting(2, 13), waiting(3, 7), waiting(4, 6), waiting(5, 5)]
    limits = replace(SHORT_TOO, max_requests=9, num_pages=99)
    chunks = plan_step(running, queue, limits, num_available_pages=99, num_aux_slots=9)
    assert [(chunk.room, chunk.start, chunk.stop) for chunk in chunks] == [(1, 3, 23), (3, 0, 7), (5, 0, 5)]
    assert [chunk.admits for chunk in chunks] == [False, True, True]


@pytest.mark.parametrize(("graph_tokens", "num_requests"), [(31, 5), (32, 3)])
def test_a_long_prompt_leaves_no_forward_of_few_tokens(graph_tokens: int, num_requests: int) -> None:
    """Tokens that it may give up, and has not yet, are in the forward: 32 in all. Only a graph that has room
    for them bounds the requests."""
    limits = replace(SHORT_TOO, max_requests=9, num_pages=99, graph_tokens=graph_tokens, graph_requests=3)
    queue = [waiting(2 + number, 3) for number in range(5)]
    chunks = plan_step([Running(Room(1), 50, 0, ())], queue, limits, num_available_pages=99, num_aux_slots=9)
    assert sum(chunk.stop - chunk.start for chunk in chunks) == limits.chunk_tokens
    assert len(chunks) == num_requests


def test_a_long_prompt_goes_on_however_many_short_ones_come() -> None:
    limits = replace(SHORT_TOO, max_requests=9, num_pages=99)
    num_computed = steps = 0
    while num_computed < 200:
        queue = [waiting(2 + number, 4) for number in range(20)]
        running = [Running(Room(1), 200, num_computed, ())]
        first, *_ = plan_step(running, queue, limits, num_available_pages=99, num_aux_slots=9)
        assert first.room == 1
        num_computed, steps = first.stop, steps + 1
    assert steps == 200 // (32 - 12)


def test_a_prompt_that_is_passed_by_keeps_its_pages() -> None:
    """Those of 2 are not there for 3, or short prompts could keep it out for ever."""
    running = [Running(Room(1), 50, 3, ())]
    queue = [waiting(2, 40), waiting(3, 4)]
    for num_pages, rooms in ((10, [1]), (11, [1, 3])):
        chunks = plan_step(running, queue, SHORT_TOO, num_available_pages=num_pages, num_aux_slots=4)
        assert [chunk.room for chunk in chunks] == rooms


def test_what_is_found_in_the_cache_counts_for_being_short() -> None:
    running = [Running(Room(1), 50, 3, ())]
    queue = [waiting(2, 42, tuple(bytes([key]) for key in range(10)), num_cached=10)]
    chunks = plan_step(running, queue, SHORT_TOO, num_available_pages=16, num_aux_slots=4)
    assert [(chunk.room, chunk.start, chunk.stop) for chunk in chunks] == [(1, 3, 33), (2, 40, 42)]


def test_a_long_queue_is_looked_at_no_further_than_its_beginning() -> None:
    looked_at = 0

    def queue() -> Iterator[Waiting]:
        nonlocal looked_at
        for number in range(1000):
            looked_at += 1
            yield waiting(number, 13)

    running = [Running(Room(1001), 50, 3, ())]
    limits = replace(SHORT_TOO, num_pages=9999)
    plan_step(running, queue(), limits, num_available_pages=9999, num_aux_slots=4)
    assert looked_at == MAX_LOOKED_AT


def test_an_equal_prompt_waits_for_the_one_that_computes_and_others_go_ahead() -> None:
    keys = (b"a", b"b")
    queue = [waiting(1, 10, keys), waiting(2, 10, keys), waiting(3, 10, (b"x", b"y"))]
    chunks = plan_step([], queue, LIMITS, num_available_pages=16, num_aux_slots=4)
    assert [chunk.room for chunk in chunks] == [1, 3]
    later = plan_step(
        [Running(Room(1), 10, 4, keys)], queue[1:2], LIMITS, num_available_pages=16, num_aux_slots=4
    )
    assert [chunk.room for chunk in later] == [1]


def test_a_prompt_that_finds_all_it_shares_in_the_cache_does_not_wait() -> None:
    running = [Running(Room(1), 12, 4, (b"a", b"b", b"c"))]
    queue = [waiting(2, 12, (b"a", b"z"), num_cached=1)]
    chunks = plan_step(running, queue, LIMITS, num_available_pages=16, num_aux_slots=4)
    assert [(chunk.room, chunk.start, chunk.stop) for chunk in chunks] == [(1, 4, 12), (2, 4, 12)]


def test_only_a_prompt_beyond_the_whole_pool_can_never_run() -> None:
    assert why_never(64, LIMITS) is None
    assert "need 17 pages" in str(why_never(65, LIMITS))
