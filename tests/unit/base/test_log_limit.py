"""The limit of log lines about what others send."""

from __future__ import annotations

import time

import pytest

from hisparse_pd.base.log_limit import MAX_SUBJECTS, QUIET_SECS, LogLimiter


@pytest.mark.I8
def test_lines_have_a_bound_by_time_whoever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limiter = LogLimiter()
    for start in (now, now + QUIET_SECS):
        now = start
        assert [limiter.permits("a") for _ in range(3)] == [True, False, False]
        assert [limiter.permits("b") for _ in range(3)] == [True, False, False]
        assert sum(limiter.permits(number) for number in range(10_000)) == MAX_SUBJECTS - 2 + 1
        now += QUIET_SECS - 0.001
        assert not limiter.permits("a")
    now += 0.001
    assert limiter.permits("one that has waited for a place")
