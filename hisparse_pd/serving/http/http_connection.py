"""One HTTP connection: how long its client may make the server wait, and how it ends.

``HttpConnection`` is the protocol that uvicorn makes for each connection (``listening.py``); the application
runs behind it. A client that says nothing would keep descriptors for as long as it likes. A request's head
therefore has a time limit, its body a minimum speed, and an unread answer a time limit, too.
``Connections.sweep`` calls ``expire`` once a second. All times here are those of ``Connections.now``.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import h11_impl

from hisparse_pd.serving.http.connections import Connections, address_of
from hisparse_pd.serving.http.framing import MAX_HEAD_BYTES, Framing
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, cut

HEAD_SECS = 10.0
"""Time limit for the head of a request. It begins with the connection or, behind an earlier request, with the
head's first byte."""
BODY_WINDOW_SECS = 10.0
BODY_WINDOW_BYTES = 16 << 10
"""Bytes of a body that must come in each BODY_WINDOW_SECS until it is complete: 1.6 kB/s."""
UNREAD_SECS = 300.0
"""Time limit for a client that reads nothing of what was sent to it."""

_MAX_REASON_CHARS = 200
"""Limit for h11's error text in a message: it quotes the line that could not be read."""

INTERIM_HEADER = b"x-hisparse-pd-interim"
"""Header by which a client says, with the value 1, that it skips interim responses. Not every client does."""
INTERIM_EXTENSION = "hisparse_pd.interim"
"""Key in the ``extensions`` of a request's scope. Its value is a function without arguments that sends "102
Processing" if no answer has begun."""


class _BodyWindow:
    """Watches whether a request's body comes fast enough."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._num_bytes = 0

    def begin(self, now: float) -> None:
        self._began_at, self._num_bytes = now, 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def is_too_slow(self, now: float) -> bool:
        """Whether a window has ended with too few bytes. The next one begins with the end of this."""
        if now - self._began_at < BODY_WINDOW_SECS:
            return False
        is_too_slow = self._num_bytes < BODY_WINDOW_BYTES
        self.begin(now)
        return is_too_slow


class _UnreadClock:
    """Measures for how long a client has read nothing of what waits for it."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._num_unread = 0

    def is_over(self, now: float, num_unread: int) -> bool:
        """Whether nothing of ``num_unread`` bytes has been read for ``UNREAD_SECS``."""
        has_read = num_unread < self._num_unread
        self._num_unread = num_unread
        if not num_unread:
            self._since = None
        elif self._since is None or has_read:
            self._since = now
        return self._since is not None and now - self._since >= UNREAD_SECS


class HttpConnection(h11_impl.H11Protocol):
    """uvicorn's connection, with limits for whatever it waits for."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        """``given``: uvicorn's own arguments."""
        super().__init__(**given)
        self.conn = Framing()
        self.app = self._serve_request  # called by uvicorn for each request, in place of the application
        self.address = ""
        self._connections = connections
        self._head_since: float | None = None
        """When the wait for the present head began; None between requests, where uvicorn's keep-alive limit
        holds."""
        self._body_cycle: object = None
        """uvicorn's state (``cycle``) of the request whose body the window measures."""
        self._body_window = _BodyWindow()
        self._unread = _UnreadClock()

    # --- events -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client)
        self._head_since = self._connections.now
        if not self._connections.admit(self):
            self.app = self._refuse_request  # there is no room: its requests are answered with 503

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests and self._head_since is None:
            self._head_since = self._connections.now
        super().data_received(data)
        self._body_window.add(len(data))
        self._update_wait()

    def on_response_complete(self) -> None:
        self._head_since = None
        super().on_response_complete()
        self._update_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_wait()

    # --- waiting for the client ---------------------------------------------------------------------

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _update_wait(self) -> None:
        """Report whether the connection waits for its client now, after whatever has happened."""
        if self.cycle is not self._body_cycle:  # a request has begun
            self._body_cycle = self.cycle
            self._body_window.begin(self._connections.now)
        is_waiting = self._is_between_requests or self.cycle.more_body or self.flow.write_paused
        self._connections.set_waiting(self, is_waiting)

    def expire(self, now: float) -> str | None:
        """Close the connection if its time is up at ``now``, a time of the clock ``Connections.now``. Returns
        the reason, which the log counts, or None if it stays."""
        if self._unread.is_over(now, self.transport.get_write_buffer_size()):
            self.drop()
            return "closed: their answer was not read"
        if self._is_between_requests:
            return self._expire_head(now)
        is_body_due = self.cycle.more_body and not self.flow.read_paused
        if not (is_body_due and self._body_window.is_too_slow(now)):
            return None
        self._refuse_slow(
            f"at least {BODY_WINDOW_BYTES} bytes of a request's body must come in each {BODY_WINDOW_SECS:g} s"
        )
        return "closed: half a body"

    def _expire_head(self, now: float) -> str | None:
        if self._head_since is None or now - self._head_since < HEAD_SECS:
            return None
        if not self.conn.trailing_data[0]:  # nothing of a head has come
            self.drop()
            return "closed: silent"
        self._refuse_slow(f"the head of a request must be here within {HEAD_SECS:g} s")
        return "closed: half a head"

    # --- refusals and the end -----------------------------------------------------------------------

    def drop(self) -> None:
        """Close the connection without waiting for what its client has not read."""
        self._connections.forget(self)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot read. uvicorn calls this where it handles h11's error."""
        self._connections.closed["closed: no HTTP that can be read"] += 1
        error, status = sys.exception(), HTTPStatus.BAD_REQUEST
        if isinstance(error, h11.RemoteProtocolError):
            status = HTTPStatus(error.error_status_hint)
        why = f"this is no HTTP/1.1 that can be read: {cut(str(error), _MAX_REASON_CHARS)}"
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            why = f"the head of a request must have at most {MAX_HEAD_BYTES} bytes: send fewer headers"
        self._refuse(ApiError(status, why))

    def _refuse_slow(self, why: str) -> None:
        self._refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, f"{why}; send it again"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with ``error``, unless an answer has begun, and close the connection."""
        self._connections.forget(self)
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            head += f"content-length: {len(body)}\r\n"
            head += "content-type: application/json\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        # What the kernel has not taken at once is dropped, since the client may never read it.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    # --- requests -----------------------------------------------------------------------------------

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {INTERIM_EXTENSION: self._send_processing}
        await self.config.loaded_app(scope, receive, send)

    def _send_processing(self) -> None:
        """Send "102 Processing" to a client that reads, if no answer has begun."""
        is_read = not (self.transport.is_closing() or self.flow.write_paused)
        if is_read and not self.cycle.response_started:
            status = HTTPStatus.PROCESSING
            interim = h11.InformationalResponse(status_code=status, headers=[], reason=status.phrase.encode())
            self.transport.write(self.conn.send(interim) or b"")

    async def _refuse_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503 in place of the application, unless there is room by now."""
        if len(self._connections.live) <= self._connections.limit:
            await self._serve_request(scope, receive, send)
            return
        self._connections.closed["refused"] += 1
        error = ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"this server has its limit of {self._connections.limit} connections, each with a request in "
            "flight: send the request again later, raise the server's limit of descriptors (ulimit -n), or "
            "add servers",
        )
        await error.response({"connection": "close"}, ErrorShape.of_path(scope["path"]))(scope, receive, send)
