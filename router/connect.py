"""How the router connects to nodes: a connection of its own for each request, closed by whatever ends it.

The library's pool is made for requests that end by themselves. One that is cancelled, as when its client
leaves, can lose its connection there: between the connection's making and its being handed over, and again
before its first byte. Such a socket belongs to nobody, and stays open until the process ends.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

import httpcore
import httpx

_OPTIONS = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Never used: httpx would read all certificates of the system, for a tenth of a second, to ask for http."""
_LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=0)


class OwnConnections(httpx.AsyncBaseTransport):
    """For URLs without TLS. Connections end with their request, also with one that is cancelled."""

    def __init__(self) -> None:
        self._endings: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(verify=_NO_TLS, trust_env=False, limits=_LIMITS)
        transport._pool._network_backend = _Backend(self)  # for which httpx has no argument
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            await self.end(transport.aclose())
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, transport, self)
        return response

    def end(self, ending: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Start what must not be left in the middle, whoever waits for it and is cancelled meanwhile."""
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return asyncio.shield(task)


class _Stream(httpx.AsyncByteStream):
    """The body of an answer, whose end is its connection's."""

    def __init__(
        self, stream: httpx.AsyncByteStream, transport: httpx.AsyncHTTPTransport, owner: OwnConnections
    ) -> None:
        self._stream = stream
        self._transport = transport
        self._owner = owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        await self._owner.end(self._close())

    async def _close(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._transport.aclose()


class _Backend(httpcore.AnyIOBackend):
    """Connects to the end, within the timeout, and closes what nobody waits for any more."""

    def __init__(self, owner: OwnConnections) -> None:
        self._owner = owner

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
            self._owner.end(_close(connecting))
            raise


async def _close(connecting: asyncio.Future[httpcore.AsyncNetworkStream]) -> None:
    try:
        stream = await connecting
    except (httpcore.NetworkError, httpcore.TimeoutException):
        return
    await stream.aclose()
