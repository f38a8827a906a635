"""Threads that make look-ups, in which slow endpoints do not keep others waiting.

``LookUpThreads`` owns the threads and the look-ups that wait for one. A host that drops packets blocks a
thread for seconds, again and again, and clients choose the hosts. A free thread therefore takes the look-up
whose endpoint took least time when it was looked up last: first those that answered or refused, then those
that were never tried, and last those of which nothing was heard.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_THREADS = 64
"""Most look-ups at a time."""
UNTRIED_SECS = 1.0
"""The time that counts for an endpoint that was never looked up: longer than an answer takes, and less than
the limit of a look-up."""
MAX_REMEMBERED = 4096
"""Most endpoints whose time is remembered; those looked up longest ago are forgotten."""

Endpoint = tuple[str, int]
"""Host and port."""


class LookUpThreads(Generic[T]):
    """Makes look-ups in threads, the fastest first."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="bootstrap-lookup")
        self._lock = threading.Lock()
        self._waiting: dict[Future[T], tuple[Endpoint, Callable[[], T]]] = {}
        """Look-ups that no thread has begun, in order of arrival."""
        self._took_secs: OrderedDict[Endpoint, float] = OrderedDict()
        """How long the last look-up of an endpoint took; those looked up longest ago come first."""

    def submit(self, endpoint: Endpoint, look_up: Callable[[], T]) -> Future[T]:
        """Make a look-up as soon as a thread is free. One that is cancelled before is not made. Raises
        RuntimeError if no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting[future] = endpoint, look_up
        try:
            self._threads.submit(self._make_next)
        except RuntimeError:
            self._forget(future)
            raise
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """End the threads, without waiting for look-ups that are under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, future: Future[T]) -> None:
        with self._lock:
            self._waiting.pop(future, None)

    def _make_next(self) -> None:
        """Make the fastest look-up that waits, if any: the work of a thread, once for each ``submit``."""
        while (taken := self._take()) is not None:
            future, endpoint, look_up = taken
            if not future.set_running_or_notify_cancel():
                continue
            started_at = time.monotonic()
            try:
                found = look_up()
            except BaseException as error:
                self._note(endpoint, time.monotonic() - started_at)
                future.set_exception(error)
            else:
                self._note(endpoint, time.monotonic() - started_at)
                future.set_result(found)
            return

    def _take(self) -> tuple[Future[T], Endpoint, Callable[[], T]] | None:
        with self._lock:
            if not self._waiting:
                return None
            future = min(self._waiting, key=self._expected_secs)  # of equal ones the first that came
            return future, *self._waiting.pop(future)

    def _expected_secs(self, future: Future[T]) -> float:
        endpoint, _ = self._waiting[future]
        return self._took_secs.get(endpoint, UNTRIED_SECS)

    def _note(self, endpoint: Endpoint, secs: float) -> None:
        with self._lock:
            self._took_secs[endpoint] = secs
            self._took_secs.move_to_end(endpoint)
            while len(self._took_secs) > MAX_REMEMBERED:
                self._took_secs.popitem(last=False)
