"""The phases of a request, as an engine keeps and reports them."""

from __future__ import annotations

import time

import pytest

from hisparse_pd.engine.phases import Phase, PhaseLog, wall_clock_ahead

NAMES = ("queue", "landing", "first_step")


def test_phases_follow_one_another_without_a_gap() -> None:
    log = PhaseLog(NAMES, 10.0)
    log.end(11.0)
    log.end(13.5)
    first, second = log.take()
    assert (first.name, second.name) == ("queue", "landing")
    assert (first.secs, second.secs) == pytest.approx((1.0, 2.5), abs=1e-5)
    assert first.ended_at == second.started_at
    assert [log.secs(name) for name in NAMES] == [1.0, 2.5, 0.0]


def test_each_phase_is_told_once() -> None:
    log = PhaseLog(NAMES, 10.0)
    assert log.take() == ()
    log.end(11.0)
    assert [phase.name for phase in log.take()] == ["queue"]
    assert log.take() == ()
    log.end(12.0)
    log.end(13.0)
    assert [phase.name for phase in log.take()] == ["landing", "first_step"]


def test_behind_the_last_phase_there_is_none() -> None:
    log = PhaseLog(("queue",), 10.0)
    log.end(11.0)
    log.end(12.0)
    (phase,) = log.take()
    assert phase.secs == pytest.approx(1.0, abs=1e-5)


def test_phases_are_told_in_unix_time() -> None:
    before, now = time.time(), time.monotonic()
    log = PhaseLog(("queue",), now)
    log.end(now)
    (phase,) = log.take()
    assert before - 1 <= phase.started_at == phase.ended_at <= time.time() + 1


def test_a_reading_between_which_the_thread_waited_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first reading, 5 s pass between the two clocks."""
    monotonic = iter((100.0, 105.0, 105.0, 105.1, 106.0, 106.2))
    wall = iter((1104.9, 1105.0, 1106.1))
    monkeypatch.setattr(time, "monotonic", lambda: next(monotonic))
    monkeypatch.setattr(time, "time", lambda: next(wall))
    assert wall_clock_ahead() == 1000.0


def test_no_phase_takes_less_than_nothing() -> None:
    assert Phase("queue", 2.0, 1.0).secs == 0.0
