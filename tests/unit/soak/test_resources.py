"""What the soak concludes from what processes had over time."""

from __future__ import annotations

from collections.abc import Callable

from tests.soak.resources import History, Recorder, Usage


def too_much(of_second: Callable[[float], Usage], name: str = "decode-0", num_deaths: int = 0) -> list[str]:
    times = [float(at) for at in range(0, 1500, 5)]
    found = Recorder([], 1.0)
    found.histories.append(History(f"{name} engine #1", 1, times, [of_second(at) for at in times]))
    found.histories += [
        History(f"decode-1 engine #{number}", 1, [400.0 + number], [Usage(1, 1, 1)])
        for number in range(num_deaths)
    ]
    found.load_ended_at = 1500.0
    return found.too_much()


def test_what_keeps_growing_once_it_is_warm_is_named() -> None:
    assert too_much(lambda at: Usage(min(at, 290.0) + at % 15, 40 + int(at) % 35, 9)) == []
    for kind, leak in (
        ("resident_mib", lambda at: Usage(500 + at / 50, 40, 9)),
        ("descriptors", lambda at: Usage(500, 40 + int(at / 80), 9)),
        ("threads", lambda at: Usage(500, 40, 9 + int(at / 150))),
    ):
        (found,) = too_much(leak)
        assert found.startswith(f"decode-0 engine #1: {kind} grew by ")


def test_a_prefill_engine_keeps_what_mooncake_does_not_close() -> None:
    for num_deaths, is_flat in ((0, False), (2, True)):
        found = too_much(lambda at: Usage(500, 40 + int(at / 80), 9), "prefill-0", num_deaths)
        assert (found == []) is is_flat
