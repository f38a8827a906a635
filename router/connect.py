"""Calls to nodes over HTTP: each has a connection of its own, which is closed when the call ends.

``NodeCalls`` (``node_calls.py``) makes the calls of the whole router. Connections are not pooled:
closing one is how a call is cancelled, which may happen at any moment, for instance because a client leaves.
The node then aborts the request. Besides, a pooled connection could be stale after its node has restarted.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from urllib.parse import urlsplit

import h11

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.serving.http.wait_timer import WaitTimer

RawHeaders = list[tuple[bytes, bytes]]

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A context that trusts nobody, for http nodes: reading the system's certificates takes 0.1 s."""
_NEXT_ADDRESS_SECS = 0.25
"""Delay before the next address of a name is tried (RFC 8305)."""
_MAX_UNREAD_BYTES = 1 << 18
"""Bytes that may wait for ``read`` before the call stops reading from its socket."""
_MAX_HEAD_BYTES = 100 << 10
_CHUNK_HEAD = re.compile(rb"(?:\r\n)?([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r\n")
"""A chunk's head, with the end of the chunk before it, and the blanks that some servers write after the
length."""
_MAX_CHUNK_HEAD_BYTES = 4096


def tls_context(settings: RouterSettings) -> ssl.SSLContext:
    """Return the context for connections to the nodes. Raises StartError."""
    if not any(url.startswith("https:") for url in (*dict(settings.prefill), *settings.decode)):
        return NO_TLS
    try:
        return ssl.create_default_context(cafile=settings.node_ca_file)
    except OSError as error:  # ssl's errors too
        raise StartError(f"--node-ca-file {settings.node_ca_file}: {error.strerror or error}") from error


class Call(asyncio.Protocol):
    """A connection to one node, with one request and its answer: ``connect``, ``ask``, ``read``, ``close``.

    Every failure is an OSError; a node's silence is a TimeoutError.
    """

    def __init__(self, url: str, silence_secs: float) -> None:
        """``url``: the node's URL, without a path. ``silence_secs``: how long the node may be silent."""
        self.silence_secs = silence_secs
        self._url = urlsplit(url)
        self._http = h11.Connection(h11.CLIENT, _MAX_HEAD_BYTES)
        self._wait_timer = WaitTimer(silence_secs, self._end_wait)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_unread = 0
        """Bytes that came since the last wait for data began. The next wait counts them as read, because
        ``read`` and ``_event`` wait only after they have used up what came."""
        self._lost: Exception | None = None
        """Why the connection has ended; None while it is open."""
        self._is_closed = False
        self._body: _PlainBody | _ChunkedBody | None = None
        """The answer's body, once its head is here."""
        self._first: bytes | None = None
        """First bytes of the body, which ``begin`` keeps for ``read``."""
        self.status = 0
        self.headers: RawHeaders = []
        """Headers of the answer, with names in lower case."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_connected(self) -> bool:
        """Whether a connection was made, even if it is closed by now."""
        return self._transport is not None

    async def connect(self, tls: ssl.SSLContext, timeout_secs: float) -> None:
        """Connect. Raises OSError. If this is cancelled, the connection is closed as soon as it is made."""
        # A connect that is cancelled may leave a socket that is connected, but belongs to nobody. So this one
        # runs to its end, within its timeout, and ``connection_made`` aborts a connection that comes late.
        connecting = asyncio.create_task(self._connect(tls, timeout_secs))
        connecting.add_done_callback(_note_failure)
        try:
            await asyncio.shield(connecting)
        except BaseException:
            self.close()
            raise

    async def _connect(self, tls: ssl.SSLContext, timeout_secs: float) -> None:
        is_tls = self._url.scheme == "https"
        async with asyncio.timeout(timeout_secs):
            await asyncio.get_running_loop().create_connection(
                lambda: self,
                self._url.hostname or "",
                self._url.port or (443 if is_tls else 80),
                ssl=tls if is_tls else None,
                happy_eyeballs_delay=_NEXT_ADDRESS_SECS,
            )

    async def ask(self, method: str, path: str, headers: RawHeaders, content: bytes = b"") -> None:
        """Send the request, and wait for the head of its answer. Raises OSError."""
        assert self._transport is not None
        host = self._url.netloc.rpartition("@")[2].encode()
        given = [(b"host", host), *headers, (b"content-length", b"%d" % len(content))]
        head = self._http.send(h11.Request(method=method, target=path, headers=given)) or b""
        body = self._http.send(h11.Data(data=content)) or b""
        self._http.send(h11.EndOfMessage())
        self._transport.write(head + body)
        while not isinstance(event := await self._event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionError("it closed the connection without an answer")
        self.status, self.headers = event.status_code, list(event.headers)
        self._body = _body_of(self.headers, self._http.trailing_data[0])

    async def begin(self) -> None:
        """Wait for the first bytes of the body, or its end, and keep them for ``read``. Raises OSError."""
        self._first = await self.read()

    async def read(self) -> bytes:
        """Return what has come of the body, as soon as there is something; nothing at its end. Raises
        OSError."""
        if (first := self._first) is not None:
            self._first = None
            return first
        body = self._body
        assert body is not None
        while not (data := body.take()) and not body.is_over:
            if self._lost is not None:
                # EOFError: the connection was closed without an error.
                if body.ends_with_connection and isinstance(self._lost, EOFError):
                    break
                raise ConnectionError(str(self._lost)) from self._lost
            await self._wait()
        return data

    def close(self) -> None:
        """Close the connection at once, whatever is under way. May be called twice."""
        self._is_closed = True
        self._wait_timer.close()
        if self._transport is not None:
            self._transport.abort()

    # --- events of the connection -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_closed:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._body is None:
            self._http.receive_data(data)
        else:
            self._body.feed(data)
        self._num_unread += len(data)
        if self._num_unread >= _MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = error or EOFError("the connection is closed")
        self._wake()

    # --- waiting ----------------------------------------------------------------------------------

    async def _event(self) -> object:
        """Return the next event of the answer's head."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                if self._lost is not None:
                    raise ConnectionError(str(self._lost)) from self._lost
                await self._wait()
        except h11.RemoteProtocolError as error:
            raise ConnectionError(str(error)) from error
        return event

    async def _wait(self) -> None:
        """Wait for data or the connection's end. Raises TimeoutError if the node is silent for too long."""
        if self._num_unread >= _MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._num_unread = 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._wait_timer.begin()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._wait_timer.end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())


def _note_failure(connecting: asyncio.Task[None]) -> None:
    """Look at the error of a connection that nobody waits for any more; asyncio reports errors that nobody
    looked at."""
    if not connecting.cancelled():
        connecting.exception()


class _PlainBody:
    """A body in one piece, which ends after its length, or with the connection."""

    def __init__(self, num_bytes: int | None, data: bytes) -> None:
        """``num_bytes``: the length; None where the body ends with the connection."""
        self._num_left = num_bytes
        self._data = data

    @property
    def ends_with_connection(self) -> bool:
        return self._num_left is None

    @property
    def is_over(self) -> bool:
        return self._num_left == 0

    def feed(self, data: bytes) -> None:
        self._data += data

    def take(self) -> bytes:
        """Return all content that has come."""
        data, self._data = self._data, b""
        if self._num_left is not None:
            data = data[: self._num_left]
            self._num_left -= len(data)
        return data


class _ChunkedBody:
    """A body in chunks, each behind a head with its length: ``5\\r\\nhello\\r\\n0\\r\\n\\r\\n`` is "hello".

    h11, with its rules for each chunk, would take half of the router's time for a token.
    """

    ends_with_connection = False

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_left = 0
        """Bytes that are to come of the present chunk."""
        self.is_over = False

    def feed(self, data: bytes) -> None:
        self._data += data

    def take(self) -> bytes:
        """Return all content that has come. Raises ConnectionError."""
        data, at = self._data, 0
        parts = []
        while at < len(data) and not self.is_over:
            if not self._num_left:
                if (head := _CHUNK_HEAD.match(data, at)) is None:
                    _check_partial_head(data[at:])
                    break
                at = head.end()
                self._num_left = int(head[1], 16)
                self.is_over = self._num_left == 0  # trailers after the last chunk are ignored
            part = data[at : at + self._num_left]
            parts.append(part)
            at += len(part)
            self._num_left -= len(part)
        self._data = data[at:]
        return b"".join(parts)


def _check_partial_head(data: bytes) -> None:
    """Raise ConnectionError if ``data``, which is no whole head of a chunk, cannot become one: a line is
    complete already, or too long. The first two bytes may be the line break that ends the chunk before."""
    if len(data) > _MAX_CHUNK_HEAD_BYTES or b"\n" in data[2:]:
        raise ConnectionError(f"it sent {data[:20]!r}, which begins no chunk")


def _body_of(headers: RawHeaders, data: bytes) -> _PlainBody | _ChunkedBody:
    """Return the body behind ``headers``, which h11 has checked. ``data``: the part that came with them."""
    named = dict(headers)
    if b"transfer-encoding" in named:
        return _ChunkedBody(data)
    length = named.get(b"content-length")
    return _PlainBody(None if length is None else int(length), data)
