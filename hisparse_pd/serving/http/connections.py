"""Which connections an HTTP server keeps: owns their number and how long each may make it wait.

A client that says nothing keeps descriptors for as long as it likes. So whoever makes the server wait has a
time limit: for the head of a request, for a body that does not come on, for an answer that is not read. One
connection more than the descriptors allow for takes the place of one that makes the server wait: of the
address that has most of these, the one that began first. When all of them have a request that is being
answered, the new one's is answered with a 503.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import h11_impl

from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, cut

log = logging.getLogger(__name__)

HEAD_SECS = 10.0
"""For the head of a request: from the connection on, or from its first byte where requests came before."""
BODY_WINDOW_SECS = 10.0
BODY_WINDOW_BYTES = 16 << 10
"""What must have come of a body in each window, unless it is complete: 1.6 kB/s."""
UNREAD_SECS = 300.0
"""For a client that reads nothing of what was sent to it."""

MAX_SMALL_CHUNKS = 1024
SMALL_CHUNK_BYTES = 256
"""Of a request's body in chunks: each may have one chunk for so many bytes, and so many chunks more."""

_MAX_HEAD_BYTES = 1 << 16
_MAX_REASON_CHARS = 200
"""Of what h11 says, which has the line that it could not read."""

TAKES_INTERIM = b"x-hisparse-pd-interim"
"""A request's header with the value 1: its client reads over interim responses, which not every one does."""
INTERIM = "hisparse_pd.interim"
"""Among the ``extensions`` of a request's scope: a function without arguments that answers "102 Processing",
while no answer has begun."""

_MAX_STEP_SECS = 2.0
"""What the time between two sweeps counts at most: after a long turn much has come that was not read."""


class KeptConnection(Protocol):
    """A connection that a server keeps, with TLS or before it."""

    address: str

    def expire(self, now: float) -> str | None:
        """Close it when it has had its time; the reason."""

    def drop(self) -> object:
        """Close it with whatever it has not read."""


K = TypeVar("K", bound=KeptConnection)


class ConnectionsByAddress(Generic[K]):
    """Connections in the order in which they came, by the address that they came from."""

    def __init__(self) -> None:
        self._of: dict[str, dict[K, None]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, connection: K) -> None:
        """One that is there already keeps its place."""
        of_address = self._of.setdefault(connection.address, {})
        self._num += connection not in of_address
        of_address.setdefault(connection)

    def discard(self, connection: K) -> None:
        of_address = self._of.get(connection.address, {})
        if connection not in of_address:
            return
        del of_address[connection]
        self._num -= 1
        if not of_address:
            del self._of[connection.address]

    def oldest_of_most(self) -> K:
        """Of the address that has most, the one that came first; there is one."""
        most = max(self._of.values(), key=len)
        return next(iter(most))


@dataclass(eq=False)
class Connections:
    """The connections of one server, at most ``limit``."""

    limit: int
    now: float = 0.0
    """Seconds that this server has served. What it stood still for is nobody's silence and counts little."""
    live: set[KeptConnection] = field(default_factory=set)
    waits: ConnectionsByAddress[KeptConnection] = field(default_factory=ConnectionsByAddress)
    """Connections that make the server wait, who waits longest first."""
    closed: Counter[str] = field(default_factory=Counter)
    """Connections that were closed or refused and not yet reported, by the reason."""
    on_change: Callable[[], None] = lambda: None
    """Called when their number has changed."""
    _swept_at: float = float("inf")

    def admit(self, connection: KeptConnection) -> bool:
        """Take a new connection. False: there is no room for it, all others are being served."""
        self.live.add(connection)
        self.on_change()
        if len(self.live) > self.limit and self.waits:
            self.closed["closed for a new one"] += 1
            self.waits.oldest_of_most().drop()
        return len(self.live) <= self.limit

    def forget(self, connection: KeptConnection) -> None:
        self.live.discard(connection)
        self.on_change()
        self.note(connection, waits=False)

    def note(self, connection: KeptConnection, *, waits: bool) -> None:
        """Whether the connection makes the server wait, from now on."""
        if waits:
            self.waits.add(connection)
        else:
            self.waits.discard(connection)

    def sweep(self, now: float) -> None:
        """Close whoever has had its time, and say so. About once a second; ``now``: of ``time.monotonic``."""
        self.now += min(max(now - self._swept_at, 0.0), _MAX_STEP_SECS)
        self._swept_at = now
        for connection in tuple(self.live):
            if (why := connection.expire(self.now)) is not None:
                self.closed[why] += 1
        if self.closed:
            counts = ", ".join(f"{count} {why}" for why, count in self.closed.items())
            log.warning("connections: %s; %d of at most %d are left", counts, len(self.live), self.limit)
            self.closed.clear()


_CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n"
"""As h11 writes it of itself, to clients that know it."""


class _Framing(h11.Connection):
    """h11, except that the pieces of an answer in chunks need no rules: a stream has one a token. Those of a
    request are bounded in number, since h11 takes as long for a byte as for a kilobyte."""

    _is_chunked = False
    _num_chunks = 0
    _num_chunk_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Request:
            self._num_chunks = self._num_chunk_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding: send one of them")
            # h11 bounds only heads that have not come whole: of one read, they may be longer.
            num_bytes = len(event.target) + sum(len(name) + len(value) for name, value in event.headers)
            if num_bytes > _MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif type(event) is h11.Data:
            self._num_chunks += event.chunk_start
            self._num_chunk_bytes += len(event.data)
            if self._num_chunks > MAX_SMALL_CHUNKS + self._num_chunk_bytes // SMALL_CHUNK_BYTES:
                raise h11.RemoteProtocolError(
                    f"{self._num_chunks} chunks for {self._num_chunk_bytes} bytes of the body: after "
                    f"{MAX_SMALL_CHUNKS} chunks, {SMALL_CHUNK_BYTES} bytes each are the least, on average"
                )
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._is_chunked and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        output = super().send(event)
        self._is_chunked = type(event) is h11.Response and _CHUNKED in (output or b"")
        return output


class Connection(h11_impl.H11Protocol):
    """uvicorn's connection, which knows how long it has made the server wait."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.conn = _Framing(h11.SERVER, _MAX_HEAD_BYTES)
        self.app = self._serve_request
        self._all = connections
        self.address = ""
        self._head_since: float | None = None
        """When the head that is awaited began; None between requests, where uvicorn's own limit holds."""
        self._body_since = 0.0
        """When the present window of a body began."""
        self._body_bytes = 0
        self._unread_since: float | None = None
        self._num_unread = 0

    # --- what happens to it -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client)
        self._head_since = self._all.now
        if not self._all.admit(self):
            self.app = self._refuse_request
        self._note(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.forget(self)

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        if self._is_between_requests and self._head_since is None:
            self._head_since = self._all.now
        super().data_received(data)
        self._body_bytes += len(data)
        self._note(cycle)

    def on_response_complete(self) -> None:
        cycle = self.cycle
        self._head_since = None
        super().on_response_complete()
        self._note(cycle)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note(self.cycle)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note(self.cycle)

    # --- what it makes the server wait for --------------------------------------------------------

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _note(self, cycle_before: object) -> None:
        if self.cycle is not cycle_before:  # a request has begun
            self._body_since, self._body_bytes = self._all.now, 0
        if self in self._all.live:
            waits = self._is_between_requests or self.cycle.more_body or self.flow.write_paused
            self._all.note(self, waits=waits)

    def expire(self, now: float) -> str | None:
        """Close it when it has had its time; the reason."""
        if self._is_unread(now):
            return self.drop("closed: their answer was not read")
        if self._is_between_requests:
            if self._head_since is None or now - self._head_since < HEAD_SECS:
                return None
            if self.conn.trailing_data[0]:
                self._refuse_slow(f"the head of a request must be here within {HEAD_SECS:g} s")
                return "closed: half a head"
            return self.drop("closed: silent")
        if not self.cycle.more_body or self.flow.read_paused or now - self._body_since < BODY_WINDOW_SECS:
            return None
        is_enough, self._body_bytes = self._body_bytes >= BODY_WINDOW_BYTES, 0
        self._body_since = now
        if is_enough:
            return None
        self._refuse_slow(
            f"the body of a request must come on by {BODY_WINDOW_BYTES} bytes in {BODY_WINDOW_SECS:g} s"
        )
        return "closed: half a body"

    def _is_unread(self, now: float) -> bool:
        before, self._num_unread = self._num_unread, self.transport.get_write_buffer_size()
        if not self._num_unread:
            self._unread_since = None
        elif self._unread_since is None or self._num_unread < before:
            self._unread_since = now
        return self._unread_since is not None and now - self._unread_since >= UNREAD_SECS

    # --- the ways out -----------------------------------------------------------------------------

    def drop(self, why: str = "") -> str:
        """Close it with whatever it has not read; ``why``, for the log."""
        self._all.forget(self)
        self.transport.abort()
        return why

    def send_400_response(self, msg: str) -> None:
        """uvicorn's way out of what h11 cannot read; called where h11's error is handled."""
        self._all.closed["closed: no HTTP that can be read"] += 1
        error, status = sys.exception(), HTTPStatus.BAD_REQUEST
        if isinstance(error, h11.RemoteProtocolError):
            status = HTTPStatus(error.error_status_hint)
        why = f"this is no HTTP/1.1 that can be read: {cut(str(error), _MAX_REASON_CHARS)}"
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            why = f"the head of a request must have at most {_MAX_HEAD_BYTES} bytes: send fewer headers"
        self._refuse(ApiError(status, why))

    def _refuse_slow(self, why: str) -> None:
        self._refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, f"{why}; send it again"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what has come of a request with ``error``, unless an answer has begun, and close."""
        self._all.forget(self)
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            head += f"content-length: {len(body)}\r\n"
            head += "content-type: application/json\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        # What the kernel takes at once is sent; no client makes the rest wait.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    # --- requests ---------------------------------------------------------------------------------

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {INTERIM: self._say_processing}
        await self.config.loaded_app(scope, receive, send)

    def _say_processing(self) -> None:
        is_read = not (self.transport.is_closing() or self.flow.write_paused)
        if is_read and not self.cycle.response_started:
            status = HTTPStatus.PROCESSING
            interim = h11.InformationalResponse(status_code=status, headers=[], reason=status.phrase.encode())
            self.transport.write(self.conn.send(interim) or b"")

    async def _refuse_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In place of the application, unless there is room by now."""
        if len(self._all.live) <= self._all.limit:
            await self._serve_request(scope, receive, send)
            return
        self._all.closed["refused"] += 1
        error = ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"this server has its {self._all.limit} connections, all with a request in flight: send the "
            "request again later, raise the server's limit of descriptors (ulimit -n), or add servers",
        )
        await error.response({"connection": "close"}, ErrorShape.of_path(scope["path"]))(scope, receive, send)


def address_of(client: tuple[str, int] | None) -> str:
    """As ``Connections`` counts them."""
    return _network_of(client[0]) if client else ""


def _network_of(address: str) -> str:
    """Whose connections count together: an IPv6 client has a whole /64."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 6 and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)
