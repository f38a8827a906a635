"""Calls that keep the interpreter are made one at a time, and the loop gets its turns between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
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


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the module's clock, and forget earlier calls. Returns the time in a list."""
    now = [1e9]
    monkeypatch.setattr("hisparse_pd.serving.http.off_loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(off_loop_module, "_large_calls", off_loop_module._LargeCalls())
    return now


def test_no_large_call_begins_for_as_long_as_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call's own thread goes on at once. The longest pause is a quarter of a second, and none is
    behind a call within a thread's turn of the interpreter."""
    now, pauses = fake_clock(monkeypatch), list[float]()

    def make_no_turns(loop: asyncio.AbstractEventLoop, max_secs: float) -> None:
        pauses.append(max_secs)
        now[0] += max_secs

    monkeypatch.setattr(off_loop_module, "_await_turns", make_no_turns)

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
    assert asyncio.run(off_loop(calls, (2**-12, 0.0), (2**-12, 0.0), (2**-10, 0.0), (0.5, 0.0))) == [
        0.25,
        2**-10,
    ]


class ManualLoop:
    """An event loop that makes a turn when it is told to."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self._is_closed = is_closed
        self._ready: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._ready.append(callback)

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")
        self._ready.append(callback)

    def turn(self) -> int:
        """Make a turn. Returns how many callbacks it made."""
        due, self._ready = self._ready, []
        for callback in due:
            callback()
        return len(due)


def wait_for_turns(
    monkeypatch: pytest.MonkeyPatch, loop: ManualLoop, num_turns: int, max_secs: float
) -> tuple[list[float], bool]:
    """Call ``_await_turns``, in whose wait the loop makes turns. Returns the limits of its waits, and whether
    it was woken."""
    waits, events = list[float](), list[threading.Event]()

    class Event(threading.Event):
        was_woken = False

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            events.append(self)
            for _ in range(num_turns):
                loop.turn()
            self.was_woken = self.is_set()
            return self.was_woken

    monkeypatch.setattr(off_loop_module, "threading", SimpleNamespace(Event=Event))
    off_loop_module._await_turns(loop, max_secs)  # type: ignore[arg-type]
    return waits, any(event.was_woken for event in events)  # type: ignore[attr-defined]


def test_the_pause_ends_when_the_loop_has_made_ten_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eleventh shows that ten have ended. What a pause that is over has left in the loop ends there."""
    loop = ManualLoop()
    assert wait_for_turns(monkeypatch, loop, 10, 0.125) == ([0.125], False)
    assert [loop.turn(), loop.turn()] == [1, 0]
    assert wait_for_turns(monkeypatch, loop, 11, 0.25) == ([0.25], True)
    assert loop.turn() == 0


def test_a_closed_loop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait_for_turns(monkeypatch, ManualLoop(is_closed=True), 0, 0.125) == ([], False)


def test_a_busy_loop_makes_ten_turns_before_the_next_large_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call took so long, by the clock, that the turns end the pause."""
    now, num_turns = fake_clock(monkeypatch), 0
    monkeypatch.setattr(off_loop_module, "_MAX_PAUSE_SECS", 600.0)

    def calls() -> int:
        with taking_interpreter(LARGE):
            now[0] += 3600.0
            made_before = num_turns
        with taking_interpreter(LARGE):
            return num_turns - made_before

    async def main() -> int:
        nonlocal num_turns
        working = asyncio.create_task(off_loop(calls))
        while not working.done():
            num_turns += 1
            await asyncio.sleep(0)
        return await working

    assert asyncio.run(main()) >= 10


def test_a_loop_that_stands_still_holds_up_large_calls_for_the_time_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, has_begun = fake_clock(monkeypatch), threading.Event()

    def calls() -> None:
        with taking_interpreter(LARGE):
            now[0] += 0.0625
        with taking_interpreter(LARGE):
            has_begun.set()

    async def main() -> None:
        working = asyncio.create_task(off_loop(calls))
        await asyncio.sleep(0)  # hands the work over
        assert has_begun.wait(60), "the large call waited for the loop"
        await working

    asyncio.run(main())


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
