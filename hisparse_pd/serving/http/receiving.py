"""Receiving from a client: its body, within limits of size and time, and the notice that it has left.

The handlers of nodes (``serving/api/frame.py``) and of the router call both functions for each request with a
body: first ``read_body``, then ``unless_client_leaves`` with the work on the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.serving.http.http_errors import ApiError, shown

T = TypeVar("T")

CLIENT_LEFT = 499
"""Status that is counted for a request whose client left before its answer was complete."""


async def read_body(request: Request, timeout_secs: float) -> bytes:
    """Return the whole body. Raises ApiError 415, 413 or 408, or ClientDisconnect."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding: {shown(encoding)} is not taken; send the body without it")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_secs):
            async for chunk in request.stream():
                chunks.append(chunk)
                num_bytes += len(chunk)
                if num_bytes > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {timeout_secs:g} s") from error
    return b"".join(chunks)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes, the most that is taken")


async def unless_client_leaves(
    receive: Receive, work: Coroutine[Any, Any, T], is_answered: Callable[[], bool] = lambda: False
) -> T:
    """Return the result of ``work``, which is cancelled if the client leaves before it ``is_answered``.

    Raises ClientDisconnect in that case.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_until_client_leaves(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not is_answered():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
