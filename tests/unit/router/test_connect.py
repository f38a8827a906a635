"""A connect whose caller is cancelled: the connection is closed as soon as it is made."""

from __future__ import annotations

import asyncio
from typing import Any

import httpcore
import httpx
import pytest

from router.connect import ClosingBackend, transport


class Stream(httpcore.AsyncNetworkStream):
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def aclose(self) -> None:
        self.closed.set()


def test_a_connection_that_nobody_waits_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        begun, is_made = asyncio.Event(), asyncio.Event()
        stream = Stream()

        async def connect(*args: Any) -> Stream:
            begun.set()
            await is_made.wait()
            return stream

        monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
        caller = asyncio.create_task(ClosingBackend().connect_tcp("127.0.0.1", 1))
        await begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        is_made.set()
        await asyncio.wait_for(stream.closed.wait(), 5)

    asyncio.run(main())


def test_the_routers_client_connects_by_it() -> None:
    assert isinstance(transport(httpx.Limits())._pool._network_backend, ClosingBackend)
