"""Runs long work of requests in a few threads beside the event loop, and bounds what runs on the loop.

Request handlers call it: ``off_loop`` for work such as tokenizing a prompt, ``parse_body`` for bodies.
Threads are few, so that requests cannot fill the machine, and callers hand in pieces, so that each request
gets its turn. Python runs one thread at a time: a piece is either short, or a call that releases the
interpreter. Calls that keep it are wrapped in ``taking_interpreter``.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from hisparse_pd.base.process import SWITCH_SECS, share_interpreter

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 2

_INLINE_BODY_BYTES = 1 << 16
"""Size up to which a body is parsed on the loop, which takes a millisecond."""

_MAX_PARSING_SECS = 0.02
"""Time that one turn of the loop may spend on parsing bodies."""

_MAX_PAUSE_SECS = 0.25
"""Longest time in which no further large call begins, after one that kept the interpreter."""

_PAUSE_TURNS = 10
"""Turns of the loop after which the next large call begins even earlier. The loop needs the interpreter some
ten times to answer a request."""


class _Thread(threading.local):
    loop: asyncio.AbstractEventLoop | None = None
    """The loop beside which one of the executor's threads works now; None in every other thread."""


_thread = _Thread()


class _LargeCalls:
    """Large calls of threads that keep the interpreter."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the thread that makes one."""
        self.next_at = 0.0
        """Time of ``time.monotonic`` before which no further one begins."""


_large_calls = _LargeCalls()


_executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="off-loop", initializer=share_interpreter)


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``function`` in a thread, after the pieces that others have handed in. Returns its result.

    If the caller is cancelled before ``function`` has begun, ``function`` does not run.
    """
    work = partial(function, *args, **kwargs)
    return await asyncio.wrap_future(_executor.submit(_work_beside, asyncio.get_running_loop(), work))


def _work_beside(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> T:
    _thread.loop = loop
    return work()


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

    Large calls in threads are made one at a time. After each none begins until the loop has made
    ``_PAUSE_TURNS`` turns, in each of which it takes in what has come for it, or for as long as the call
    took, if that is shorter. What a request's last call found does not wait for that. A call that is no
    longer than a thread's turn of the interpreter is like any other code, and nothing waits after it.
    """
    loop = _thread.loop
    if num_bytes <= _INLINE_BODY_BYTES or loop is None:
        yield
        return
    with _large_calls.lock:
        if (pause_secs := _large_calls.next_at - time.monotonic()) > 0:
            _await_turns(loop, pause_secs)
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            took = ended - began
            _large_calls.next_at = ended + (min(took, _MAX_PAUSE_SECS) if took > SWITCH_SECS else 0.0)


def _await_turns(loop: asyncio.AbstractEventLoop, max_secs: float) -> None:
    """Wait in a thread until ``loop`` has made ``_PAUSE_TURNS`` turns, ``max_secs`` at most."""
    is_over = threading.Event()
    num_begun = itertools.count()

    def turn() -> None:
        if is_over.is_set():
            return
        if next(num_begun) == _PAUSE_TURNS:  # one more than have been made from beginning to end
            is_over.set()
        else:
            loop.call_soon(turn)

    try:
        loop.call_soon_threadsafe(turn)
    except RuntimeError:
        return  # the loop is closed, and needs nothing
    is_over.wait(max_secs)
    is_over.set()
