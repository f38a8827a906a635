"""Threads that make waiting calls: by turns the one that came first, and the shortest one.

The engine's compiler and the front's grammar checks use them, so that a large grammar does not hold up small
ones. A short call waits for at most one long call in each thread. A long call waits for those that came
before it and for as many short ones. A call whose future nobody has any more is not begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import ref

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    """A call that has not begun. It refers to its future weakly: once the caller has dropped the future,
    nobody wants the call."""

    size: int
    future: ref[Future[T]]
    call: Callable[[], T]

    @property
    def is_wanted(self) -> bool:
        future = self.future()
        return future is not None and not future.cancelled()


class CompileThreads:
    """A pool of threads. Its methods may be called by any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = Lock()
        self._waiting: list[_Waiting[Any]] = []
        """Calls that have not begun, in order of arrival."""
        self._num_runs_queued = 0
        """Runs of ``_run_one`` that the executor has not begun; there is one for each waiting call, or
        more."""
        self._is_shortest_next = False

    def submit(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``function`` in a thread, unless its future is cancelled or dropped before. ``size``: decides
        which call is the shortest. If no thread can be started for it, it is made with a later call."""
        future: Future[T] = Future()
        waiting = _Waiting(size, ref(future), lambda: function(*args, **kwargs))
        with self._lock:
            self._forget_unwanted()
            self._waiting.append(waiting)
            try:
                while self._num_runs_queued < len(self._waiting):
                    self._threads.submit(self._run_one)
                    self._num_runs_queued += 1
            except RuntimeError:  # this process, or its container, has as many threads as it may
                log.exception("no thread can be started for a grammar now")
        return future

    def close(self, *, wait: bool) -> None:
        """Cancel calls that have not begun. ``wait``: return when the others are over."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            if (future := each.future()) is not None:
                future.cancel()

    def _forget_unwanted(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting.is_wanted]

    def _run_one(self) -> None:
        """Choose one of the waiting calls, if there is one, and make it."""
        with self._lock:
            self._num_runs_queued -= 1
            self._forget_unwanted()
            if not self._waiting:
                return
            shortest = min(self._waiting, key=lambda waiting: waiting.size)
            taken = shortest if self._is_shortest_next else self._waiting[0]
            self._is_shortest_next = not self._is_shortest_next
            self._waiting.remove(taken)
            future = taken.future()
        if future is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = taken.call()
        except BaseException as error:  # concurrent.futures' own executors keep all errors, too
            future.set_exception(error)
            # The error refers through its traceback to this frame's variables. With the future among them,
            # which now has the error, the two would keep each other.
            del future
        else:
            future.set_result(result)
