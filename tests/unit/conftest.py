"""Fixtures that the tests of several packages share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def servers_end_soon() -> Iterator[None]:
    """Shorten uvicorn's sleeps: it looks for its end every 0.1 s, and waits as long again for connections."""
    import uvicorn.server

    async def sleep(secs: float) -> None:
        await asyncio.sleep(secs / 10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        yield
