"""Threads that take what waits for them in turn: what came first, and what is shortest, alternately.

So what is short waits for one long thing a thread, and what is long for no more than came before it and as
many short ones. What nobody wants any more is not begun.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import ref

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    size: int
    future: ref[Future[T]]
    call: Callable[[], T]

    @property
    def is_wanted(self) -> bool:
        future = self.future()
        return future is not None and not future.cancelled()


class Turns:
    """May be called by any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = Lock()
        self._waiting: list[_Waiting[Any]] = []
        """In order of arrival."""
        self._num_calls = 0
        """Of ``_take_one`` that the threads have yet to make: as many as wait, or more."""
        self._is_shortest_next = False

    def submit(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """``function`` is called unless its future is cancelled before, or nobody has it any more."""
        future: Future[T] = Future()
        waiting = _Waiting(size, ref(future), lambda: function(*args, **kwargs))
        with self._lock:
            self._forget_unwanted()
            self._waiting.append(waiting)
            if self._num_calls < len(self._waiting):
                self._num_calls += 1
                self._threads.submit(self._take_one)
        return future

    def close(self, *, wait: bool) -> None:
        """What is not begun is cancelled. ``wait``: for what is."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            if (future := each.future()) is not None:
                future.cancel()

    def _forget_unwanted(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting.is_wanted]

    def _take_one(self) -> None:
        with self._lock:
            self._num_calls -= 1
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
        except BaseException as error:  # as an executor of the library does
            future.set_exception(error)
            del future  # of which the error's traceback knows
        else:
            future.set_result(result)
