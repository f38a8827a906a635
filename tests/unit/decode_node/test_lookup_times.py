"""The order in which look-ups get a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace

import pytest

from hisparse_pd.base.call_threads import CallThreads
from hisparse_pd.decode_node import lookup_times
from hisparse_pd.decode_node.lookup_times import Endpoint, LookUpTimes
from tests.waiting import WAIT_SECS

pytestmark = [pytest.mark.I7, pytest.mark.I8]

DROPPED_SECS, REFUSED_SECS, ANSWERED_SECS = 5.0, 0.001, 0.01


class OneThread:
    """One thread for look-ups, and a clock that only they move on."""

    def __init__(self) -> None:
        self.times = LookUpTimes()
        self.threads: CallThreads[Endpoint] = CallThreads(1, "tried", self.times.fastest)
        self.now = 0.0
        self.asked: list[str] = []
        """Hosts that were looked up, in order."""

    def ask(self, host: str, secs: float = ANSWERED_SECS, error: Exception | None = None) -> Future[str]:
        """Submit a look-up that takes this time, and ends with the host or the error."""

        def look_up() -> str:
            self.asked.append(host)
            self.now += secs
            if error is not None:
                raise error
            return host

        return self._submit(host, look_up)

    def while_busy(self, submit: Callable[[], list[Future[str]]]) -> list[str]:
        """Submit look-ups while the thread is busy. Returns their hosts in the order of being looked up."""
        is_busy, may_end = threading.Event(), threading.Event()

        def look_up() -> str:
            is_busy.set()
            assert may_end.wait(WAIT_SECS)
            return "busy"

        busy = self._submit("busy", look_up)
        assert is_busy.wait(WAIT_SECS)
        self.asked.clear()
        futures = submit()
        may_end.set()
        for future in (busy, *futures):
            if not future.cancelled():
                future.exception(WAIT_SECS)
        return self.asked

    def close(self) -> None:
        self.threads.close(wait=True)

    def _submit(self, host: str, look_up: Callable[[], str]) -> Future[str]:
        return self.threads.submit((host, 1), self.times.measured, (host, 1), look_up)


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneThread]:
    with closing(OneThread()) as one:
        monkeypatch.setattr(lookup_times, "time", SimpleNamespace(monotonic=lambda: one.now))
        yield one


def test_hosts_that_drop_packets_keep_no_other_waiting(one: OneThread) -> None:
    """However many of them are looked up again and again."""
    late, refusal = OSError("no answer"), OSError("refused")
    dropping = [f"dropping-{number}" for number in range(40)]
    for host in dropping:
        assert one.ask(host, DROPPED_SECS, late).exception(WAIT_SECS) is late
    assert one.ask("known").result(WAIT_SECS) == "known"
    assert one.ask("starting", REFUSED_SECS, refusal).exception(WAIT_SECS) is refusal
    order = one.while_busy(
        lambda: [
            *(one.ask(host, DROPPED_SECS, late) for host in dropping),
            *map(one.ask, ("new-0", "new-1", "known", "starting")),
        ]
    )
    assert order == ["starting", "known", "new-0", "new-1", *dropping]


def test_a_host_that_answers_again_is_looked_up_early_again(one: OneThread) -> None:
    for secs in (DROPPED_SECS, ANSWERED_SECS):
        one.ask("restarted", secs).result(WAIT_SECS)
    assert one.while_busy(lambda: [one.ask("new"), one.ask("restarted")]) == ["restarted", "new"]


def test_of_many_hosts_those_looked_up_last_are_remembered(
    one: OneThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_times, "MAX_REMEMBERED", 3)
    for host in ("first", "second", "first", "third"):
        one.ask(host, DROPPED_SECS).result(WAIT_SECS)
    # The look-up that keeps the thread busy is remembered, too.
    first, *_ = one.while_busy(lambda: [one.ask(host) for host in ("first", "third", "second")])
    assert first == "second", "it is as good as never tried"
