"""What the soak concludes from what processes had over time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.soak.resources import History, Recorder, Usage


def history(of_second: Callable[[float], Usage], secs: int = 1500) -> History:
    times = [float(at) for at in range(0, secs, 5)]
    return History("decode-0 engine #1", 1, times, [of_second(at) for at in times])


def recorder(*histories: History) -> Recorder:
    found = Recorder([], 1.0)
    found.histories.extend(histories)
    found.load_ended_at = 1500.0
    return found


def test_what_grows_while_it_warms_up_and_varies_later_is_flat() -> None:
    varying = history(lambda at: Usage(min(at, 290.0) + at % 15, 40 + int(at) % 35, 9))
    assert recorder(varying).too_much() == []
    growth = varying.growth(1500.0)
    assert growth is not None
    assert abs(growth["resident_mib"]) <= 5


@pytest.mark.parametrize(
    ("leaks", "kind"),
    [
        (lambda at: Usage(500 + at / 50, 40, 9), "resident_mib"),
        (lambda at: Usage(500, 40 + int(at / 80), 9), "descriptors"),
        (lambda at: Usage(500, 40, 9 + int(at / 150)), "threads"),
    ],
)
def test_what_keeps_growing_is_named(leaks: Callable[[float], Usage], kind: str) -> None:
    (found,) = recorder(history(lambda at: Usage(500, 40, 9)), history(leaks)).too_much()
    assert found.startswith(f"decode-0 engine #1: {kind} grew by ")


def test_a_prefill_engine_keeps_what_mooncake_does_not_close() -> None:
    leaking = history(lambda at: Usage(500, 40 + int(at / 80), 9))
    leaking.name = "prefill-0 engine #1"
    deaths = [
        History(f"decode-1 engine #{number}", 1, [400.0 + number], [Usage(1, 1, 1)]) for number in (2, 3)
    ]
    assert recorder(leaking).too_much() != []
    assert recorder(leaking, *deaths).too_much() == []


def test_of_a_short_life_or_of_the_time_after_the_load_nothing_is_said() -> None:
    short = history(lambda at: Usage(at, int(at), int(at)), secs=590)
    assert short.growth(1500.0) is None
    late = history(lambda at: Usage(500 if at < 1500 else 2000, 40, 9), secs=3000)
    assert recorder(late).too_much() == []
