"""Runs long work of requests in a few threads beside the event loop, and bounds what runs on the loop.

Request handlers call it: ``off_loop`` for work such as tokenizing a prompt, ``parse_body`` for bodies.
Threads are few, so that requests cannot fill the machine, and callers hand in pieces, so that each request
gets its turn. Python runs one thread at a time: a piece is either short, or a call that releases the
interpreter. Calls that keep it are wrapped in ``taking_interpreter``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from hisparse_pd.base.process import share_interpreter

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 2

_INLINE_BODY_BYTES = 1 << 16
"""Size up to which a body is parsed on the loop, which takes a millisecond."""

_MAX_PARSING_SECS = 0.02
"""Time that one turn of the loop may spend on parsing bodies."""

_MAX_PAUSE_SECS = 0.25
"""Longest time in which no further large call begins, after one that kept the interpreter."""


class _Thread(threading.local):
    is_beside_loop = False
    """Whether this is one of the executor's threads."""


_thread = _Thread()


class _LargeCalls:
    """Large calls of threads that keep the interpreter."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the thread that makes one."""
        self.next_at = 0.0
        """Time of ``time.monotonic`` before which no further one begins."""


_large_calls = _LargeCalls()


def _begin_thread() -> None:
    _thread.is_beside_loop = True
    share_interpreter()


_executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="off-loop", initializer=_begin_thread)


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``function`` in a thread, after the pieces that others have handed in. Returns its result.

    If the caller is cancelled before ``function`` has begun, ``function`` does not run.
    """
    future = _executor.submit(function, *args, **kwargs)
    return await asyncio.wrap_future(future)


async def parse_body(body: bytes, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``parse(*args, **kwargs)``. ``body`` is given for its size alone; the arguments have it, too.

    A large body is parsed in a thread, a small one here, in a later turn of the loop if this
    one has spent its time on others.
    """
    if len(body) > _INLINE_BODY_BYTES:
        return await off_loop(parse, *args, **kwargs)
    turn = _turns.setdefault(asyncio.get_running_loop(), _Turn())
    while turn.parsing_secs >= _MAX_PARSING_SECS:
        await asyncio.sleep(0)
    with turn.parsing():
        return parse(*args, **kwargs)


class _Turn:
    """Time that the present turn of an event loop has spent on parsing bodies, of which hundreds may come at
    once."""

    def __init__(self) -> None:
        self.parsing_secs = 0.0

    @contextmanager
    def parsing(self) -> Iterator[None]:
        if not self.parsing_secs:
            # Queued before anything that waits for the next turn, so the count is 0 when that turn begins.
            asyncio.get_running_loop().call_soon(self._end)
        began = time.monotonic()
        try:
            yield
        finally:
            self.parsing_secs += time.monotonic() - began

    def _end(self) -> None:
        self.parsing_secs = 0.0


_turns = WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn]()


@contextmanager
def taking_interpreter(num_bytes: int) -> Iterator[None]:
    """Wrap a call over ``num_bytes`` that keeps the interpreter, so that no other thread runs meanwhile.

    Large calls in threads are made one at a time, and after each none begins for as long as it took, so that
    the loop gets the interpreter, which it needs some ten times to answer a request. What a request's last
    call found does not wait for that.
    """
    if num_bytes <= _INLINE_BODY_BYTES or not _thread.is_beside_loop:
        yield
        return
    with _large_calls.lock:
        if (pause_secs := _large_calls.next_at - time.monotonic()) > 0:
            time.sleep(pause_secs)
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            _large_calls.next_at = ended + min(ended - began, _MAX_PAUSE_SECS)
