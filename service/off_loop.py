"""Work of requests that takes long, in threads beside the event loop.

Few threads, so that requests cannot fill the machine, and work in pieces, so that they get their turns.
Python runs one thread at a time: a piece is either short, or a call that lets the others run meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 2

_INLINE_BODY_BYTES = 1 << 16
"""Up to this size, a body is parsed at once: in a millisecond."""

_executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="off-loop")


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``function``, which waits for its turn behind the pieces of other requests.

    A piece whose request was cancelled in the meantime is not begun.
    """
    future = _executor.submit(function, *args, **kwargs)
    return await asyncio.wrap_future(future)


async def parsed(body: bytes, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``parse`` makes of ``body``, which is among its arguments: in a thread when it is large."""
    if len(body) <= _INLINE_BODY_BYTES:
        return parse(*args, **kwargs)
    return await off_loop(parse, *args, **kwargs)
