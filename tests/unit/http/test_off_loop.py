"""Calls that keep the interpreter are made one at a time, and the loop gets its turns between them."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from hisparse_pd.serving.http import off_loop as off_loop_module
from hisparse_pd.serving.http.off_loop import off_loop, parse_body, taking_interpreter

pytestmark = [pytest.mark.I7, pytest.mark.I8]

LARGE, SMALL = 1 << 20, 1 << 10


def test_large_calls_are_made_one_at_a_time_and_small_ones_are_not_held_up() -> None:
    """Two requests are worked on beside the loop, as many as there are threads."""
    num_inside, most_inside, small_made = 0, 0, threading.Event()
    count = threading.Lock()

    def pieces(number: int) -> None:
        nonlocal num_inside, most_inside
        for _ in range(5):
            with taking_interpreter(LARGE):
                with count:
                    num_inside += 1
                    most_inside = max(most_inside, num_inside)
                assert number == 1 or small_made.wait(60), "a small call waited for a large one"
                with count:
                    num_inside -= 1

    def small() -> None:
        with taking_interpreter(SMALL):
            small_made.set()

    async def main() -> None:
        first = asyncio.create_task(off_loop(pieces, 0))
        await off_loop(small)
        await asyncio.gather(first, off_loop(pieces, 1))

    asyncio.run(main())
    assert most_inside == 1


def test_the_loop_itself_waits_for_nobody() -> None:
    is_inside, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with taking_interpreter(LARGE):
            is_inside.set()
            assert may_go_on.wait(60)

    async def main() -> None:
        held = asyncio.create_task(off_loop(hold))
        while not is_inside.is_set():
            await asyncio.sleep(0)
        with taking_interpreter(LARGE):
            may_go_on.set()
        await held

    asyncio.run(main())


def test_no_large_call_begins_for_as_long_as_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call's own thread goes on at once. The longest pause is a quarter of a second."""
    now, pauses = [1e9], list[float]()

    def sleep(secs: float) -> None:
        pauses.append(secs)
        now[0] += secs

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("hisparse_pd.serving.http.off_loop.time", clock)
    monkeypatch.setattr(off_loop_module, "_large_calls", off_loop_module._LargeCalls())

    def calls(*steps: tuple[float, float]) -> list[float]:
        """Make large calls of so many seconds, each with other work of so many behind it."""
        pauses.clear()
        for call_secs, other_secs in steps:
            with taking_interpreter(LARGE):
                now[0] += call_secs
            now[0] += other_secs
        return list(pauses)

    assert asyncio.run(off_loop(calls, (0.125, 0.0))) == []
    assert asyncio.run(off_loop(calls, (9.0, 0.0), (0.125, 0.0625), (0.5, 0.5), (0.5, 0.0))) == [
        0.125,
        0.25,
        0.0625,
    ]


def test_small_bodies_that_come_together_share_several_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes 4 ms of the 20 that a turn has for them; they are parsed in the order in which they came."""
    clock, turn, parsed_in = [0.0], 0, list[tuple[int, int]]()
    monkeypatch.setattr("hisparse_pd.serving.http.off_loop.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def parse(number: int) -> None:
        clock[0] += 0.004
        parsed_in.append((number, turn))

    async def main() -> None:
        nonlocal turn
        bodies = asyncio.gather(*(parse_body(b"{}", parse, number) for number in range(23)))
        while not bodies.done():
            await asyncio.sleep(0)
            turn += 1
        await bodies

    asyncio.run(main())
    assert [number for number, _ in parsed_in] == list(range(23))
    turns = [turn for _, turn in parsed_in]
    assert {turns.count(turn) for turn in turns} == {5, 3}
