"""The page in which ranks agree: what was said, whoever is slow, and what the end of a rank does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.core.model import rank_page
from hisparse_pd.core.model.page_sharing import PageOffer, PageRequest, share_page
from hisparse_pd.core.model.rank_page import MAX_VALUE, RankLost, RankPage

REPO = Path(__file__).parents[3]
PATIENCE_SECS = 60.0
NEVER_SECS = 3600.0
"""Longer than any test may take."""


# --- ranks as threads ---------------------------------------------------------------------------------------


class Meeting:
    """What RankGroup.meet does, for threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=PATIENCE_SECS)
        self._words: dict[tuple[str, int], str] = {}
        self._size = size
        self.change: Callable[[int, str, dict[int, str]], dict[int, str]] = lambda rank, what, words: words
        """What a rank hears of what was said."""

    def of(self, rank: int) -> Callable[[str, str], dict[int, str]]:
        def meet(what: str, word: str) -> dict[int, str]:
            self._words[what, rank] = word
            self._barrier.wait()
            return self.change(rank, what, {each: self._words[what, each] for each in range(self._size)})

        return meet


def at_once(jobs: Sequence[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(jobs)) as threads:
        return [job.result(PATIENCE_SECS) for job in [threads.submit(job) for job in jobs]]


def shared(size: int, meeting: Meeting | None = None) -> list[RankPage | None]:
    meeting = meeting or Meeting(size)
    jobs = [lambda rank=rank: share_page(rank, size, meeting.of(rank)) for rank in range(size)]
    return at_once(jobs)  # type: ignore[return-value]


@contextlib.contextmanager
def pages_of(size: int) -> Iterator[list[RankPage]]:
    pages = [page for page in shared(size) if page is not None]
    assert len(pages) == size
    try:
        yield pages
    finally:
        for page in pages:
            page.close()


values_of_a_rank = st.integers(-MAX_VALUE, MAX_VALUE)


@st.composite
def histories(draw: st.DrawFn) -> list[list[list[int]]]:
    """Draw what each rank says in each agreement."""
    size = draw(st.integers(1, 5))
    rounds = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    return [
        [draw(st.lists(values_of_a_rank, min_size=count, max_size=count)) for _ in range(size)]
        for count in rounds
    ]


@settings(max_examples=60, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_every_rank_hears_what_every_rank_said(history: list[list[list[int]]], drawn: random.Random) -> None:
    """Agreements have any number of values, of all sizes, and ranks that are late in turn."""
    size = len(history[0])
    lags = [[drawn.choice((0, 0, 0, 0.0005)) for _ in range(size)] for _ in history]
    with pages_of(size) as pages:

        def take_part(rank: int) -> list[list[tuple[int, ...]]]:
            heard = []
            for said, lag in zip(history, lags, strict=True):
                time.sleep(lag[rank])
                heard.append(pages[rank].agree(said[rank], PATIENCE_SECS))
            return heard

        expected = [[tuple(values) for values in said] for said in history]
        for heard in at_once([partial(take_part, rank) for rank in range(size)]):
            assert heard == expected


def test_a_value_out_of_bounds_is_named() -> None:
    with pages_of(1) as (page,):
        assert page.agree([MAX_VALUE, -MAX_VALUE], PATIENCE_SECS) == [(MAX_VALUE, -MAX_VALUE)]
        for value in (MAX_VALUE + 1, -MAX_VALUE - 1):
            with pytest.raises(ValueError, match=f"a rank cannot say {value}; at most {MAX_VALUE}"):
                page.agree([1, value], PATIENCE_SECS)
        assert page.agree([3], PATIENCE_SECS) == [(3,)]


def agree_with_a_late_one(num_turns: int) -> None:
    """Three ranks, each late in its turn; the others sleep until it speaks."""
    with pages_of(3) as pages:

        def take_part(rank: int) -> None:
            for turn in range(num_turns):
                if turn % 3 == rank:
                    time.sleep(0.002)
                assert pages[rank].agree([turn, rank], NEVER_SECS) == [(turn, each) for each in range(3)]

        at_once([partial(take_part, rank) for rank in range(3)])


def test_who_sleeps_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_page, "LOOK_SECS", NEVER_SECS)
    monkeypatch.setattr(rank_page, "SPIN_SECS", 0.0)
    monkeypatch.setattr(rank_page, "SHORT_SPIN_SECS", 0.0)
    agree_with_a_late_one(60)


def test_one_whom_nobody_woke_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank wakes another, as if it had not seen yet that the other sleeps."""
    monkeypatch.setattr(RankPage, "wake_others", lambda self: None)
    agree_with_a_late_one(12)


def test_a_rank_may_leave_as_soon_as_it_has_agreed() -> None:
    """Others that still sleep for it find its word, and not that it is gone."""
    for turn in range(40):
        with pages_of(3) as pages:

            def take_part(rank: int, pages: list[RankPage] = pages, turn: int = turn) -> object:
                if turn % 3 == rank:
                    time.sleep(0.002)
                said = pages[rank].agree([rank], PATIENCE_SECS)
                pages[rank].close()
                return said

            said = at_once([partial(take_part, rank) for rank in range(3)])
            assert said == [[(0,), (1,), (2,)]] * 3


def test_a_rank_that_gave_up_is_lost_to_the_others_at_once() -> None:
    """One rank has less patience; those that say nothing in time learn of it when they come."""
    with pages_of(2) as pages:
        with pytest.raises(RankLost, match=r"no word from rank 1 within 0\.01 s"):
            pages[0].agree([1], 0.01)
        assert pages[1].agree([2], PATIENCE_SECS) == [(1,), (2,)], "this much was said"
        with pytest.raises(RankLost, match="rank 0 has ended, or has given up"):
            pages[1].agree([3], NEVER_SECS)
        for page, other in zip(pages, (1, 0), strict=True):
            with pytest.raises(RankLost, match=f"rank {other}"):
                page.agree([4], NEVER_SECS)


# --- whether ranks have one ---------------------------------------------------------------------------------


def descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add(f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "hisparse-pd ranks" in line]


def test_nothing_is_left_of_a_page() -> None:
    before = descriptors()
    with pages_of(4) as pages:
        assert len(maps()) == 4
        at_once([partial(page.agree, [1], PATIENCE_SECS) for page in pages])
    assert descriptors() == before
    assert not maps()


def test_all_do_without_where_one_finds_no_page() -> None:
    """A rank on another machine, that is, where the name is nobody's."""
    before = descriptors()
    meeting = Meeting(3)
    meeting.change = lambda rank, what, words: (
        {**words, 0: f"elsewhere {words[0]}"} if what.startswith("offered") and rank == 2 else words
    )
    assert shared(3, meeting) == [None] * 3
    assert descriptors() == before
    assert not maps()


@pytest.mark.parametrize("name", ["os.memfd_create", "socket.socketpair", "socket.recv_fds", "mmap.mmap"])
def test_all_do_without_where_one_cannot_map_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        raise OSError(errno.EMFILE, "no more of these")

    before = descriptors()
    module, function = name.split(".")
    monkeypatch.setattr(f"hisparse_pd.core.model.page_sharing.{module}.{function}", fail)
    assert shared(3) == [None] * 3
    monkeypatch.undo()
    assert descriptors() == before
    assert not maps()


def test_all_do_without_where_one_gets_some_descriptors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not have more descriptors keeps none of them."""
    receive = socket.recv_fds

    def some(sock: socket.socket, num_bytes: int, most: int) -> tuple[bytes, list[int], int, object]:
        return receive(sock, num_bytes, most - 1)

    before = descriptors()
    monkeypatch.setattr(socket, "recv_fds", some)
    assert shared(3) == [None] * 3
    assert descriptors() == before


def test_all_do_without_where_rank_0_can_offer_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PageOffer) -> None:
        raise OSError(errno.EACCES, "no sockets here")

    monkeypatch.setattr(PageOffer, "__init__", fail)
    assert shared(2) == [None] * 2


def test_strangers_get_no_page() -> None:
    """Without the nonce of this start, or without a word, before the ranks come and after."""
    offer = PageOffer()
    name, _, nonce = offer.word.rpartition(" ")
    stale = "0" * len(nonce)
    hellos = (f"{stale} 1".encode(), b"", b"\xff\xfe", f"{nonce} 0".encode(), f"{nonce} 3".encode(), b"a b c")
    strangers = []
    for hello in hellos:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(PATIENCE_SECS)
        stranger.connect("\0" + name)
        if hello:
            stranger.send(hello)
        strangers.append(stranger)
    requests = [PageRequest(offer.word, rank) for rank in (2, 1)]
    pages = [offer.share(3), *(request.share(3) for request in reversed(requests))]
    said = at_once([partial(page.agree, [rank], PATIENCE_SECS) for rank, page in enumerate(pages)])
    assert said == [[(0,), (1,), (2,)]] * 3
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            assert socket.recv_fds(stranger, 64, 8)[:2] == (b"", [])
    opened: tuple[PageRequest | PageOffer | RankPage | None, ...] = (*requests, *pages, offer)
    for each in opened:
        assert each is not None
        each.close()


# --- ranks as processes -------------------------------------------------------------------------------------

PROGRAM = """
import json, os, random, sys, time
from hisparse_pd.core.model.page_sharing import share_page
from hisparse_pd.core.model.rank_page import _NUMBER_MASK, WIDTH, RankLost

rank, size, directory, num_turns, lag_share, patience_secs, awaited = json.loads(sys.argv[1])

def meet(what, word):
    path = f"{directory}/{what}"
    with open(f"{path}.{rank}.new", "w") as file:
        file.write(word)
    os.rename(f"{path}.{rank}.new", f"{path}.{rank}")
    ends_at = time.monotonic() + 120
    while not all(os.path.exists(f"{path}.{each}") for each in range(size)):
        assert time.monotonic() < ends_at, what
        time.sleep(0.005)
    return {each: open(f"{path}.{each}").read() for each in range(size)}

def said(each, turn):
    return [turn, each, -(turn * 7919 + each * 104729) % 1000003, (turn << 20) ^ each][: 1 + turn % 4]

def has_spoken(each):
    number = page._number + 1
    return page._banks[number & 1][each * WIDTH + WIDTH - 1] & _NUMBER_MASK == number & _NUMBER_MASK

page = share_page(rank, size, meet)
drawn = random.Random(rank)
for turn in range(num_turns):
    if drawn.random() < lag_share:
        time.sleep(drawn.random() * 0.003)
    assert page.agree(said(rank, turn), 120) == [tuple(said(each, turn)) for each in range(size)], turn
print("agreed", flush=True)
if patience_secs:
    if rank == 1:
        sys.stdin.readline()
    while not all(map(has_spoken, awaited)):
        time.sleep(0.005)
    try:
        while True:
            page.agree([0], patience_secs)
    except RankLost as error:
        print(error, flush=True)
page.close()
"""


@contextlib.contextmanager
def ranks(
    directory: Path,
    size: int,
    num_turns: int,
    lag_shares: Sequence[float] = (),
    patience_secs: float = 0,
    impatient: int | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """They agree so many times; with ``patience_secs`` on and on after that, rank 1 when it is told to.

    Only the rank ``impatient``, if it is given, gives up after ``patience_secs``; this time begins when all
    others but rank 1 have spoken.
    """
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    processes = []
    try:
        for rank in range(size):
            lag_share = lag_shares[rank] if lag_shares else 0
            patience = patience_secs if impatient in (None, rank) else NEVER_SECS
            awaited = [each for each in range(size) if each not in (rank, 1)] if rank == impatient else []
            arguments = json.dumps([rank, size, str(directory), num_turns, lag_share, patience, awaited])
            command = [sys.executable, "-c", PROGRAM, arguments]
            processes.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def end_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize(
    ("num_turns", "lag_shares"),
    [
        pytest.param(
            70_000, [0, 0], id="two, and more often than numbers are kept apart", marks=pytest.mark.slow
        ),
        pytest.param(1_000, [0, 0, 0, 0.05], id="a slow one", marks=pytest.mark.slow),
        pytest.param(300, [0, 0, 0, 0.02, 0.02, 0.05, 0.1, 0], id="slow and quick ones"),
    ],
)
def test_processes_hear_what_each_said(tmp_path: Path, num_turns: int, lag_shares: list[float]) -> None:
    with ranks(tmp_path, len(lag_shares), num_turns, lag_shares) as processes:
        for process in processes:
            assert end_of(process) == "agreed\n"


@pytest.mark.I7
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_killed_is_noticed_at_once(tmp_path: Path, size: int) -> None:
    with ranks(tmp_path, size, 20, patience_secs=NEVER_SECS) as processes:
        killed = processes[1]
        assert killed.stdout is not None
        assert killed.stdout.readline() == "agreed\n"
        killed.kill()
        for process in processes:
            if process is not killed:
                assert "has ended, or has given up" in end_of(process)


@pytest.mark.I7
def test_a_rank_that_is_stopped_is_noticed_when_the_time_is_up(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, 20, patience_secs=1.0, impatient=0) as processes:
        stopped = processes[1]
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "agreed\n"
        stopped.send_signal(signal.SIGSTOP)
        assert "no word from rank 1 within 1 s" in end_of(processes[0])
        stopped.send_signal(signal.SIGCONT)
        out, err = stopped.communicate("go on\n", timeout=PATIENCE_SECS)
        assert "rank 0 has ended, or has given up" in out, err
        assert "has ended, or has given up" in end_of(processes[2])
