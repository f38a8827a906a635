"""When a silent decode node counts as gone: once a probe was denied, or had its time."""

from __future__ import annotations

import threading

import pytest

from prefill_node import probes
from prefill_node.probes import ANSWER_SECS, Probes
from tests.waiting import wait_until

WAIT_SECS = 60.0
SESSION = "10.0.0.1:1"


def test_a_probe_that_is_under_way_denies_nothing_before_its_time() -> None:
    may_answer = threading.Event()
    asking = Probes(lambda session: may_answer.wait())
    heard_at, asked_at = 100.0, 106.0
    asking.ask(SESSION, asked_at)
    asking.ask(SESSION, asked_at + 4)  # under way still, since it was asked first
    assert not asking.is_denied(SESSION, heard_at, asked_at + ANSWER_SECS - 0.1)
    assert asking.is_denied(SESSION, heard_at, asked_at + ANSWER_SECS)
    assert not asking.is_denied(SESSION, asked_at + 1, asked_at + 2 * ANSWER_SECS), "heard since"
    assert not asking.is_denied("another", heard_at, asked_at + ANSWER_SECS)
    may_answer.set()
    wait_until(lambda: asking.take_answered() == [SESSION])
    wait_until(lambda: not asking.is_denied(SESSION, heard_at, asked_at + ANSWER_SECS))


def test_a_probe_that_fails_denies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ASK_AGAIN_SECS", 0.0)
    asking = Probes(lambda session: False)
    assert not asking.is_denied(SESSION, 100.0, 106.0), "nobody asked"
    asking.ask(SESSION, 106.0)
    wait_until(lambda: asking.is_denied(SESSION, 100.0, 106.1))
    assert not asking.is_denied(SESSION, 107.0, 120.0), "it was heard after the probe began"
    asking.forget(SESSION)
    assert not asking.is_denied(SESSION, 100.0, 106.1)
