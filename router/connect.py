"""How the router connects to nodes: a connect that nobody waits for any more leaves no connection behind.

The library's backend can be cancelled between a connection's making and its being handed over. Its socket
then belongs to nobody and stays open until the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httpcore
import httpx

_OPTIONS = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]


class ClosingBackend(httpcore.AnyIOBackend):
    """Connects to the end, within the timeout, whoever is cancelled, and then closes what nobody takes."""

    def __init__(self) -> None:
        self._abandoned: set[asyncio.Task[None]] = set()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[_OPTIONS] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        connecting = asyncio.ensure_future(
            super().connect_tcp(host, port, timeout, local_address, socket_options)
        )
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            closing = asyncio.create_task(_close(connecting))
            self._abandoned.add(closing)
            closing.add_done_callback(self._abandoned.discard)
            raise


async def _close(connecting: asyncio.Future[httpcore.AsyncNetworkStream]) -> None:
    try:
        stream = await connecting
    except (httpcore.NetworkError, httpcore.TimeoutException):
        return
    await stream.aclose()


def transport(limits: httpx.Limits) -> httpx.AsyncHTTPTransport:
    """httpx's own, for URLs without TLS, with that backend, for which httpx has no argument."""
    made = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
    made._pool._network_backend = ClosingBackend()
    return made
