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

from hisparse_pd.http.patience import Patience
from hisparse_pd.settings import RouterSettings

_OPTIONS = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody. For http, or httpx would read all certificates of the system, for a tenth of a second."""
_NEXT_ADDRESS_SECS = 0.25
"""Of a name with several addresses (RFC 8305)."""
_MAX_UNREAD_BYTES = 1 << 18
_LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=0)


class CaFileError(Exception):
    """The file that says whose nodes to trust cannot be used."""


def tls_context(settings: RouterSettings) -> ssl.SSLContext:
    """For connections to the nodes. Raises CaFileError."""
    if not any(url.startswith("https:") for url in (*dict(settings.prefill), *settings.decode)):
        return _NO_TLS
    try:
        return ssl.create_default_context(cafile=settings.node_ca_file)
    except OSError as error:  # ssl's errors too
        raise CaFileError(f"node_ca_file {settings.node_ca_file}: {error.strerror or error}") from error


class OwnConnections(httpx.AsyncBaseTransport):
    """Connections end with their request, also with one that is cancelled. ``tls``: for https."""

    def __init__(self, tls: ssl.SSLContext = _NO_TLS) -> None:
        self._tls = tls
        self._endings: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=_LIMITS)
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


class _Backend(httpcore.AsyncNetworkBackend):
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
        connecting = asyncio.ensure_future(connect(host, port, timeout))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            self._owner.end(_close(connecting))
            raise

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def connect(host: str, port: int, timeout_secs: float | None) -> NodeStream:
    """Raises httpcore.ConnectTimeout and ConnectError."""
    try:
        async with asyncio.timeout(timeout_secs):
            _, stream = await asyncio.get_running_loop().create_connection(
                NodeStream, host, port, happy_eyeballs_delay=_NEXT_ADDRESS_SECS
            )
    except TimeoutError as error:
        raise httpcore.ConnectTimeout(str(error)) from error
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error
    return stream


class NodeStream(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """A connection as httpcore uses it: without the library's tasks and timers for each piece of a stream."""

    def __init__(self) -> None:
        self._received = b""
        self._waiter: asyncio.Future[None] | None = None
        """Of the one call that waits: to read, or to write on."""
        self._patience: Patience | None = None
        self._is_ended = self._is_full = self._is_tls = False
        self._lost: Exception | None = None

    # --- what the loop says -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) >= _MAX_UNREAD_BYTES:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._is_ended = True
        self._wake()
        return not self._is_tls  # what is still to be sent may be, but for TLS, which has no such half

    def connection_lost(self, error: Exception | None) -> None:
        self._is_ended, self._lost = True, error
        self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    # --- what httpcore does -----------------------------------------------------------------------

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """b"" at the end. Raises ReadTimeout and ReadError."""
        while not self._received and not self._is_ended:
            await self._wait(timeout, httpcore.ReadTimeout)
        if not self._received and self._lost is not None:
            raise httpcore.ReadError(str(self._lost)) from self._lost
        data, self._received = self._received[:max_bytes], self._received[max_bytes:]
        if len(self._received) < _MAX_UNREAD_BYTES <= len(self._received) + len(data):
            self._transport.resume_reading()
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Raises WriteTimeout and WriteError."""
        if self._transport.is_closing():
            raise httpcore.WriteError(str(self._lost or "closed")) from self._lost
        self._transport.write(buffer)
        while self._is_full and not self._transport.is_closing():
            await self._wait(timeout, httpcore.WriteTimeout)

    async def aclose(self) -> None:
        if self._patience is not None:
            self._patience.close()
        self._transport.abort()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Raises ConnectTimeout and ConnectError. The connection is closed then, or if this is cancelled."""
        loop = asyncio.get_running_loop()
        plain = self._transport
        try:
            async with asyncio.timeout(timeout):
                transport = await loop.start_tls(plain, self, ssl_context, server_hostname=server_hostname)
        except BaseException as error:
            plain.abort()
            if isinstance(error, TimeoutError):
                raise httpcore.ConnectTimeout("TLS was not agreed on in time") from error
            if isinstance(error, OSError):  # ssl's errors too
                raise httpcore.ConnectError(f"TLS: {error}") from error
            raise
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._is_tls = transport, True
        return self

    def get_extra_info(self, info: str) -> None:
        return None

    async def _wait(self, timeout_secs: float | None, error: type[Exception]) -> None:
        if self._patience is None and timeout_secs is not None:
            self._patience = Patience(timeout_secs, self._give_up)
        self._waiter, self._error = asyncio.get_running_loop().create_future(), error
        if self._patience is not None:
            self._patience.begin()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._patience is not None:
                self._patience.end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_up(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error())


async def _close(connecting: asyncio.Future[NodeStream]) -> None:
    try:
        stream = await connecting
    except (httpcore.NetworkError, httpcore.TimeoutException):
        return
    await stream.aclose()
