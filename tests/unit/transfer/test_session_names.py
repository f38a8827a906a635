"""Names of sessions: none stands for two processes, and few are kept and made."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hisparse_pd.transfer import session_names
from hisparse_pd.transfer.session_names import SessionNames

pytestmark = pytest.mark.I8

SESSION = "[fd00::1]:15001"


def test_a_run_keeps_its_name_however_often_it_returns() -> None:
    names = SessionNames()
    found = list[str]()
    for run in ("first", "first", "second", "second", "first"):
        names.renew(SESSION, run)
        found.append(names.of(SESSION))
    assert found == [f"[fd00::1]:{zeros}15001" for zeros in ("", "", "0", "0", "00")]


def test_a_run_that_does_not_say_which_it_is_may_be_another() -> None:
    names = SessionNames()
    found = list[str]()
    for run in ("", "", "first", ""):
        names.renew(SESSION, run)
        found.append(names.of(SESSION))
    assert len(set(found)) == len(found)


def test_a_name_that_was_never_used_is_not_replaced() -> None:
    names = SessionNames()
    for run in ("first", "second", ""):
        names.renew(SESSION, run)
    assert names.of(SESSION) == SESSION


USED, RENEWED = "used", "renewed"


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([USED, RENEWED])), max_size=60))
@example([(1, USED), (2, USED), (3, USED), (1, RENEWED), (1, USED)])
@example([(1, USED), (1, RENEWED), *((port, USED) for port in (1, 2, 3, 4)), (1, RENEWED), (1, USED)])
def test_no_name_comes_back_for_another_run_and_few_sessions_are_remembered(
    steps: list[tuple[int, str]],
) -> None:
    runs = dict.fromkeys(range(1, 6), 0)
    """The run that has each session, by port."""
    used = dict[str, int]()
    """The run for which each name was first used."""
    names = SessionNames()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_names, "MAX_REMEMBERED", 2)
        for port, step in steps:
            session = f"host:{port}"
            if step == USED:
                name = names.of(session)
                assert int(name.removeprefix("host:")) == port
                assert used.setdefault(name, runs[port]) == runs[port]
            else:
                runs[port] += 1
                names.renew(session, f"{port}-{runs[port]}")
            assert len(names._sessions) <= 2


def test_the_sessions_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_names, "MAX_REMEMBERED", 2)
    names = SessionNames()
    for host in ("kept", "forgotten", "kept", "new"):
        names.renew(f"{host}:1", "run")
        names.of(f"{host}:1")
    assert names.of("kept:1") == "kept:1"
    assert names.of("forgotten:1") == "forgotten:01"


def test_names_hardly_become_longer_while_sessions_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_names, "MAX_REMEMBERED", 100)
    names = SessionNames()
    longest = max(len(names.of(f"host:{port}")) for _, port in product(range(5), range(10_000, 10_200)))
    assert longest - len("host:10000") <= 5 * 200 / 100
