"""Fixtures of the router's tests: limits that must not expire in them, and a clock of the nodes' silence."""

from __future__ import annotations

import pytest

from hisparse_pd.router import connect, fleet, health, kv_follower, node_calls, status
from tests.unit.router.silence import Silence
from tests.waiting import NEVER_SECS


@pytest.fixture(autouse=True)
def nodes_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the router's own limits for its nodes' answers. A test whose nodes are to be late sets one again.

    Router and nodes share a process here. If that does not run for seconds, each node looks silent.
    """
    for module, name in (
        (fleet, "ASK_TIMEOUT_SECS"),
        (health, "HEALTH_TIMEOUT_SECS"),
        (kv_follower, "INFO_TIMEOUT_SECS"),
        (node_calls, "CONNECT_TIMEOUT_SECS"),
        (status, "NODE_TIMEOUT_SECS"),
    ):
        monkeypatch.setattr(module, name, NEVER_SECS)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Silence:
    """The router's clock for the silence of its decode nodes."""
    silence = Silence()
    monkeypatch.setattr(connect, "WaitTimer", silence.wait_timer)
    return silence
