"""A pool of threads: which of the waiting calls is made next, and which are never made."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from unittest.mock import Mock
from weakref import ref

import pytest

from hisparse_pd.base.call_threads import CallThreads
from tests.waiting import WAIT_SECS, wait_until

pytestmark = [pytest.mark.I7, pytest.mark.I8]


def pool(num_threads: int = 1, *, keeps_unstarted: bool = False) -> AbstractContextManager[CallThreads[int]]:
    """Threads that take the call with the least key."""
    return closing_pool(CallThreads(num_threads, "tried", min, keeps_unstarted=keeps_unstarted))


@contextmanager
def closing_pool(threads: CallThreads[int]) -> Iterator[CallThreads[int]]:
    try:
        yield threads
    finally:
        threads.close(wait=True)


@contextmanager
def busy(threads: CallThreads[int]) -> Iterator[None]:
    """Keep a pool's only thread busy for as long as the context is open."""
    has_begun, may_end = Event(), Event()

    def hold() -> None:
        has_begun.set()
        assert may_end.wait(WAIT_SECS)

    held = threads.submit(0, hold)
    try:
        assert has_begun.wait(WAIT_SECS)
        yield
    finally:
        may_end.set()
    held.result(WAIT_SECS)


@contextmanager
def no_thread_starts() -> Iterator[None]:
    """A container that has as many threads as it may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        yield


def results(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result(WAIT_SECS)


def test_the_order_decides_and_of_calls_with_equal_keys_the_first_that_came() -> None:
    order = list[str]()
    with pool() as threads:
        with busy(threads):
            asked = [threads.submit(int(name[0]), order.append, name) for name in ("2a", "1a", "2b", "1b")]
        results(asked)
    assert order == ["1a", "1b", "2a", "2b"]


def test_as_many_calls_are_made_at_a_time_as_there_are_threads() -> None:
    have_begun, may_end = [Event(), Event()], Event()

    def hold(has_begun: Event) -> None:
        has_begun.set()
        assert may_end.wait(WAIT_SECS)

    with pool(2) as threads:
        asked = [threads.submit(1, hold, has_begun) for has_begun in have_begun]
        try:
            assert all(has_begun.wait(WAIT_SECS) for has_begun in have_begun)
        finally:
            may_end.set()
        results(asked)


def test_what_nobody_wants_any_more_is_not_begun() -> None:
    offered, order = list[int](), list[str]()

    def choose(keys: Sequence[int]) -> int:
        offered.extend(keys)
        return min(keys)

    with closing_pool(CallThreads(1, "tried", choose)) as threads:
        with busy(threads):
            cancelled = threads.submit(1, order.append, "cancelled")
            dropped = threads.submit(2, order.append, "dropped")
            wanted = threads.submit(8, order.append, "wanted")
            assert cancelled.cancel()
            assert len(threads._waiting) == 2, "nothing is kept of a cancelled call"
            del dropped
            asked = [wanted, threads.submit(9, order.append, "next")]
            assert len(threads._waiting) == 2, "nor of a dropped one, once another comes"
            dropped = threads.submit(3, order.append, "dropped")
            del dropped
        results(asked)
        with pytest.raises(CancelledError):
            cancelled.result()
    assert order == ["wanted", "next"]
    assert set(offered) == {0, 8, 9}, "the order is not asked about others"


def test_what_is_raised_is_raised_to_who_asked() -> None:
    with pool() as threads:
        with pytest.raises(ZeroDivisionError):
            threads.submit(1, lambda: 1 / 0).result(WAIT_SECS)
        assert threads.submit(1, str, 7).result(WAIT_SECS) == "7"


def test_a_future_with_an_error_is_gone_as_soon_as_nobody_has_it() -> None:
    """The error's traceback does not keep the future, which has the error."""
    gc.disable()
    try:
        with pool() as threads:
            failed = threads.submit(1, lambda: 1 / 0)
            assert isinstance(failed.exception(WAIT_SECS), ZeroDivisionError)
            left = ref(failed)
            del failed
            wait_until(lambda: left() is None)
    finally:
        gc.enable()


def test_a_call_for_which_no_thread_starts_is_not_made() -> None:
    order = list[str]()
    with pool(2) as threads:
        with no_thread_starts(), pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(1, order.append, "refused")
        assert not threads._waiting
        threads.submit(1, order.append, "next").result(WAIT_SECS)
    assert order == ["next"]


def test_a_call_for_which_no_thread_starts_is_made_with_the_next_one_if_it_is_kept() -> None:
    with pool(2, keeps_unstarted=True) as threads:
        with no_thread_starts():
            first = threads.submit(1, lambda: "first")
        assert threads.submit(2, lambda: "second").result(WAIT_SECS) == "second"
        assert first.result(WAIT_SECS) == "first"


def test_calls_that_have_not_begun_are_cancelled_when_the_pool_closes() -> None:
    order = list[str]()
    with pool() as threads, busy(threads):
        waiting = threads.submit(1, order.append, "waiting")
        threads.close(wait=False)
        assert waiting.cancelled()
    assert not order
