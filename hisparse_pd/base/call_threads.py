"""A pool of threads that chooses among the calls that wait for a thread.

Look-ups of prefill nodes, compilations of grammars and the fronts' checks of grammars have such pools. Each
pool is given its order, so that slow calls do not keep quick ones waiting. A call whose future is cancelled,
or that nobody has any more, is not begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import ref

log = logging.getLogger(__name__)

K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")


class CallThreads(Generic[K]):
    """Makes calls in threads. Its methods may be called by any thread."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        choose: Callable[[Sequence[K]], K],
        *,
        keeps_unstarted: bool = False,
    ) -> None:
        """``choose``: returns the key of the next call, given the keys of those that wait, in order of
        arrival; threads call it one at a time. Of calls with equal keys the first is made.
        ``keeps_unstarted``: whether a call for which no thread can be started is made with a later one;
        ``submit`` raises RuntimeError otherwise."""
        self._name = name
        self._choose = choose
        self._keeps_unstarted = keeps_unstarted
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = Lock()
        self._waiting: dict[ref[Future[Any]], tuple[K, Callable[[], Any]]] = {}
        """Keys and calls that have not begun, in order of arrival, by their futures. The references are weak:
        once the caller has dropped the future, nobody wants the call."""

    def submit(self, key: K, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``function`` as soon as it is chosen, unless its future is cancelled or dropped before."""
        future: Future[T] = Future()
        future.add_done_callback(self._forget)
        with self._lock:
            self._forget_dropped()
            self._waiting[ref(future)] = key, partial(function, *args, **kwargs)
        try:
            self._threads.submit(self._make_calls)
        except RuntimeError:  # this process, or its container, has as many threads as it may
            if not self._keeps_unstarted:
                self._forget(future)
                raise
            log.exception("no thread can be started for %s now", self._name)
        return future

    def close(self, *, wait: bool) -> None:
        """Cancel calls that have not begun. ``wait``: return when the others are over."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if (future := each()) is not None:
                future.cancel()
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.pop(ref(future), None)

    def _forget_dropped(self) -> None:
        self._waiting = {each: call for each, call in self._waiting.items() if each() is not None}

    def _make_calls(self) -> None:
        """Make calls until none waits. Each ``submit`` queues this once, so as many threads work as there are
        calls, and a call for which no thread was started is made by another one."""
        while (taken := self._take()) is not None:
            _make(*taken)

    def _take(self) -> tuple[Future[Any] | None, Callable[[], Any]] | None:
        with self._lock:
            self._forget_dropped()
            if not self._waiting:
                return None
            keys = [key for key, _ in self._waiting.values()]
            chosen = list(self._waiting)[keys.index(self._choose(keys))]
            _, call = self._waiting.pop(chosen)
            return chosen(), call


def _make(future: Future[Any] | None, call: Callable[[], Any]) -> None:
    if future is None or not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # concurrent.futures' own executors keep all errors, too
        future.set_exception(error)
        # The error refers through its traceback to this frame's variables. With the future among them, which
        # now has the error, the two would keep each other.
        del future
    else:
        future.set_result(result)
