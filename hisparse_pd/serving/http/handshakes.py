"""TLS handshakes of new connections: how many are under way, and how many begin in a turn of the event loop.

A server with TLS (``listening.py``) makes a ``Handshake`` for each new TCP connection, which hands over to an
``HttpConnection`` once TLS stands. A handshake costs memory and a signature. It begins once the client's
hello is here, so that a silent connection is as cheap as one without TLS. When many hellos come at once,
their handshakes begin over several turns of the loop. A handshake beyond the limit takes the place of another
one, as a connection does.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from hisparse_pd.serving.http.connections import Connections, ConnectionsByAddress, address_of

log = logging.getLogger(__name__)

HANDSHAKE_SECS = 10.0
"""Limit for the time from accepting a connection to the end of its handshake."""

MAX_HANDSHAKES = 512
"""Limit of handshakes under way in a server; each takes 64 kB."""

_MAX_BEGUN_A_TURN = 4
"""Limit of handshakes that begin in one turn; a signature with an RSA key of 2048 bits takes 0.6 ms."""

_RECORD_HEAD_BYTES = 5
"""Bytes before the content of a TLS record: its type, two of the version, and two of the length."""
_HANDSHAKE_RECORD = 22
"""The type of records of handshakes."""
_MAX_RECORD_BYTES = 1 << 14


class _Tls(SSLProtocol):
    """asyncio's TLS with a buffer for two records; by default it has 256 KiB for each connection."""

    max_size = 2 * _MAX_RECORD_BYTES


class Handshakes:
    """The handshakes of one server. ``context`` has its certificate, which may be replaced while it
    serves."""

    def __init__(self, context: ssl.SSLContext, connections: Connections) -> None:
        self.context = context
        self.connections = connections
        self.under_way: ConnectionsByAddress[Handshake] = ConnectionsByAddress()
        self._waiting: list[Handshake] = []
        """Handshakes whose hello is here and that have not begun. The latest begins first: its client is the
        likeliest to still wait."""

    def schedule(self, handshake: Handshake) -> None:
        """Let a handshake begin in one of the next turns."""
        self._waiting.append(handshake)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def drop_all(self) -> None:
        """Drop connections that have no TLS yet. A server that shuts down would wait for them."""
        for connection in tuple(self.connections.live):
            if isinstance(connection, Handshake):
                connection.drop()

    def _begin_some(self) -> None:
        if len(self._waiting) > _MAX_BEGUN_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin_some)
        for _ in range(min(_MAX_BEGUN_A_TURN, len(self._waiting))):
            self._waiting.pop().begin()


class Handshake(asyncio.Protocol):
    """A connection until it has TLS."""

    def __init__(self, handshakes: Handshakes, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """``make_protocol`` returns the protocol that takes over the connection once it has TLS."""
        self.client: tuple[str, int] | None = None
        self.address = ""
        self._handshakes = handshakes
        self._connections = handshakes.connections
        self._make_protocol = make_protocol
        self._hello = b""
        self._since = 0.0
        self._transport: Any = None
        self._has_begun = False

    # --- before TLS -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called after TCP connects and again after the handshake."""
        if self._has_begun:
            self._hand_over(transport)
            return
        self._transport = transport
        self.client = get_remote_addr(self._transport)
        self.address = address_of(self.client)
        self._since = self._connections.now
        self._connections.admit(self)

    def data_received(self, data: bytes) -> None:
        self._hello += data
        if not _may_be_hello(self._hello):
            self._connections.closed["closed: they spoke no TLS"] += 1
            self.drop()
        elif _is_complete_hello(self._hello):
            self._transport.pause_reading()
            self._handshakes.schedule(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()

    # --- the handshake ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the handshake, unless the connection has closed."""
        if self._transport.is_closing():
            return
        self._has_begun = True
        # Beyond the limit, it takes the place of another one.
        under_way = self._handshakes.under_way
        under_way.add(self)
        if len(under_way) > MAX_HANDSHAKES:
            self._connections.closed["closed in their handshake for a new one"] += 1
            under_way.oldest_of_most().drop()  # of the address that has most under way
        # TLS takes over the connection, and is given the hello that has come.
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(self._note_end)
        tls = _Tls(loop, self, self._handshakes.context, done, server_side=True)
        self._transport.set_protocol(tls)
        tls.connection_made(self._transport)
        hello, self._hello = self._hello, b""
        while hello and not self._transport.is_closing():
            buffer = tls.get_buffer(len(hello))
            num_bytes = min(len(buffer), len(hello))
            buffer[:num_bytes], hello = hello[:num_bytes], hello[num_bytes:]
            tls.buffer_updated(num_bytes)
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _note_end(self, done: asyncio.Future[None]) -> None:
        """Note the end of the handshake. A client that does not trust the certificate is no server error."""
        if not done.cancelled() and (error := done.exception()) is not None:
            log.debug("TLS with %s: %s", self.address, error)
        self._forget()

    def _hand_over(self, transport: Any) -> None:
        self._forget()
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    # --- the end ----------------------------------------------------------------------------------

    def expire(self, now: float) -> str | None:
        """Close the connection if its time is up. Returns the reason, None if it stays."""
        if now - self._since < HANDSHAKE_SECS:
            return None
        self.drop()
        return f"closed: no TLS after {HANDSHAKE_SECS:g} s"

    def drop(self) -> None:
        """Close the connection."""
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._handshakes.under_way.discard(self)
        self._connections.forget(self)


def _may_be_hello(data: bytes) -> bool:
    """Whether a client's first record may begin with ``data``."""
    is_handshake = data[0] == _HANDSHAKE_RECORD and data[1:2] in (b"", b"\x03")
    return is_handshake and (len(data) < _RECORD_HEAD_BYTES or 0 < _num_bytes(data) <= _MAX_RECORD_BYTES)


def _is_complete_hello(data: bytes) -> bool:
    return len(data) >= _RECORD_HEAD_BYTES and len(data) >= _RECORD_HEAD_BYTES + _num_bytes(data)


def _num_bytes(data: bytes) -> int:
    """Return the length of the record without its head."""
    return int.from_bytes(data[3:_RECORD_HEAD_BYTES], "big")
