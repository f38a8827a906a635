"""Work of requests that takes long, in threads beside the event loop.

Few threads, so that requests cannot fill the machine, and work in pieces, so that they get their turns.
Python runs one thread at a time: a piece is either short, or a call that lets the others run meanwhile.
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

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 2

_INLINE_BODY_BYTES = 1 << 16
"""Up to this size, a body is parsed at once: in a millisecond."""

_MAX_PARSING_SECS = 0.02
"""For the bodies that are parsed at once in one turn of the loop."""

_MAX_REST_SECS = 0.25


class _Thread(threading.local):
    is_beside_loop = False


_thread = _Thread()
_interpreter = threading.Lock()


def _begin_thread() -> None:
    _thread.is_beside_loop = True


_executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="off-loop", initializer=_begin_thread)


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``function``, which waits for its turn behind the pieces of other requests.

    A piece whose request was cancelled in the meantime is not begun.
    """
    future = _executor.submit(function, *args, **kwargs)
    return await asyncio.wrap_future(future)


async def parsed(body: bytes, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``parse`` makes of ``body``, which is among its arguments.

    A large body is parsed in a thread, a small one at once, or in a later turn of the loop when others have
    had this one.
    """
    if len(body) > _INLINE_BODY_BYTES:
        return await off_loop(parse, *args, **kwargs)
    turn = _turns.setdefault(asyncio.get_running_loop(), _Turn())
    while turn.parsing_secs >= _MAX_PARSING_SECS:
        await asyncio.sleep(0)
    with turn.parsing():
        return parse(*args, **kwargs)


class _Turn:
    """What the present turn of an event loop has spent on bodies, of which hundreds may come at once."""

    def __init__(self) -> None:
        self.parsing_secs = 0.0

    @contextmanager
    def parsing(self) -> Iterator[None]:
        if not self.parsing_secs:
            # The next turn begins with it: whoever waits for that turn began to wait later.
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
    """Round a call over so many bytes, large or small, in which no other thread runs. Large ones are made one
    at a time, and their thread rests for as long as each took: the loop needs the interpreter some ten times
    to answer a request."""
    if num_bytes <= _INLINE_BODY_BYTES or not _thread.is_beside_loop:
        yield
        return
    with _interpreter:
        began = time.monotonic()
        try:
            yield
        finally:
            time.sleep(min(time.monotonic() - began, _MAX_REST_SECS))
