"""The frame of every endpoint that takes a body: reading it, keep-alive pings, the answer, errors, counts.

``app.py`` makes a ``FramedEndpoint`` of each POST path with a function that answers one body. The endpoint
makes a ``Reply`` for each request, cancels the function when the client leaves, and ends the request with an
error if the function raises one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from hisparse_pd.serving.http.http_connection import INTERIM_EXTENSION, INTERIM_HEADER
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape
from hisparse_pd.serving.http.receiving import CLIENT_LEFT, read_body, unless_client_leaves
from hisparse_pd.serving.http.wait_timer import WaitTimer

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import RequestSpan, Tracer

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]
Respond: TypeAlias = "Callable[[bytes, float, Reply], Coroutine[Any, Any, None]]"

BODY_TIMEOUT_SECS = 30.0
"""Time for a client to send its whole body; after that the answer is 408."""

_PIECES_BETWEEN_YIELDS = 16
"""Pieces of an answer sent before other tasks get a turn; a piece takes some 20 us."""

_JSON = b"application/json"
_EVENT_STREAM = b"text/event-stream; charset=utf-8"
"""The charset is given because some clients take text without one for ISO-8859-1."""


@dataclass(frozen=True)
class HttpAnswer:
    """A complete JSON body or, with ``rest``, the first piece of a stream of events and the generator of the
    others."""

    body: bytes
    rest: AsyncGenerator[bytes, None] | None = None

    @classmethod
    def json(cls, value: object) -> HttpAnswer:
        return cls(msgspec.json.encode(value))

    @classmethod
    async def stream(cls, pieces: AsyncGenerator[bytes, None]) -> HttpAnswer:
        """Return a stream of events, once the first one is there. An error before it is raised here, while
        the answer can still have the error's status."""
        return cls(await anext(pieces), pieces)


PING_SECS = 15.0
"""Silence after which a client gets a ping."""
_COMMENT = b": ping\n\n"
PINGS = {
    ErrorShape.OPENAI: _COMMENT,
    ErrorShape.RESPONSES: _COMMENT,
    ErrorShape.ANTHROPIC: b'event: ping\ndata: {"type": "ping"}\n\n',
}


class KeepAlive:
    """Pings the client of a silent answer, since proxies cut silent connections, by default after a minute.

    In a stream that has begun, the ping is a comment, or the API's own event for this. Before that, it is an
    interim response, which leaves the status open, and only for clients that ask for one, as the router does.
    ``SampleGroup`` ends requests of an engine that stands still, so pings keep no dead request alive.
    """

    def __init__(
        self,
        scope: Scope,
        shape: ErrorShape,
        send_piece: Callable[[bytes], Coroutine[Any, Any, None]],
    ) -> None:
        """``send_piece`` sends a piece of the answer's body."""
        self._send_piece = send_piece
        self._ping = PINGS[shape]
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        takes_interim = (INTERIM_HEADER, b"1") in headers
        self._interim: Callable[[], None] | None = (
            scope.get("extensions", {}).get(INTERIM_EXTENSION) if takes_interim else None
        )
        self._has_begun = False
        self._sending: asyncio.Task[None] | None = None
        self._ping_timer = WaitTimer(PING_SECS, self._send_ping)
        self._ping_timer.begin()

    def note_piece(self) -> None:
        """Note that a piece of a stream is being sent."""
        self._has_begun = True
        self._ping_timer.begin()

    def close(self) -> None:
        """Stop pinging: the end of the answer is being sent, or nothing more is."""
        self._ping_timer.close()
        if self._sending is not None:
            self._sending.cancel()

    def _send_ping(self) -> None:
        if not self._has_begun:
            if self._interim is not None:
                self._interim()
        # While a ping is still being sent, the client does not read: one is enough.
        elif self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_piece(self._ping))
        self._ping_timer.begin()


class FramedEndpoint:
    """The ASGI application of one path.

    ``respond`` gets the body, the time its request arrived (monotonic clock, seconds) and the reply to send.
    It may raise ApiError, and is cancelled when the client leaves. ``count`` gets the path and the answer's
    status.
    """

    def __init__(
        self,
        path: str,
        respond: Respond,
        count: Callable[[str, int], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._path = path
        self._respond = respond
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        span = None if self._tracer is None else self._tracer.request(self._path, headers)
        reply = Reply(send, ErrorShape.of_path(self._path), headers, span)
        try:
            arrived_at = time.monotonic()
            body = await read_body(Request(scope, receive), BODY_TIMEOUT_SECS)
            reply.keep_alive(scope)
            await unless_client_leaves(receive, self._respond(body, arrived_at, reply))
        except ClientDisconnect:
            reply.status = CLIENT_LEFT
        except ApiError as error:
            await reply.fail(error)
        except Exception:
            log.exception("%s failed", self._path)
            await reply.fail(ApiError(500, "internal error; the node's log has the details"))
        finally:
            reply.close()
            self._count(self._path, reply.status)
            if span is not None:
                span.end(reply.status)


class Reply:
    """Sends the one answer to a request. ``span`` is None if the request is not traced."""

    def __init__(
        self, send: Send, error_shape: ErrorShape, request_headers: Headers, span: RequestSpan | None
    ) -> None:
        self._send = send
        self._error_shape = error_shape
        self.request_headers = request_headers
        self.span = span
        self._has_begun = False
        self.status = CLIENT_LEFT
        """Status of the answer; CLIENT_LEFT where the handler is cancelled before it has answered."""
        self._keep_alive: KeepAlive | None = None

    def keep_alive(self, scope: Scope) -> None:
        """Ping the client from now on whenever the answer is silent, until it ends."""
        self._keep_alive = KeepAlive(scope, self._error_shape, self._piece)

    def close(self) -> None:
        """Stop pinging."""
        if self._keep_alive is not None:
            self._keep_alive.close()
            self._keep_alive = None

    async def send_answer(self, answer: HttpAnswer, headers: Headers = ()) -> None:
        """Send ``answer`` with ``headers`` besides those that describe its body."""
        if answer.rest is None:
            await self._begin(200, len(answer.body), headers)
            await self._piece(answer.body, last=True)
            return
        async with aclosing(answer.rest) as pieces:
            await self._begin(200, None, headers)
            await self._piece(answer.body)
            num_sent = 0
            async for piece in pieces:
                await self._piece(piece)
                num_sent += 1
                # Sending pieces that are ready, or to a connection that is gone, never waits. Without this a
                # long answer would let nothing else run, not even the watch for a client that leaves.
                if num_sent % _PIECES_BETWEEN_YIELDS == 0:
                    await asyncio.sleep(0)
        await self._piece(b"", last=True)

    async def fail(self, error: ApiError) -> None:
        """Answer with ``error``, or end a stream that has begun with it."""
        if self.span is not None:
            self.span.error = str(error)
        if self._has_begun:
            await self._piece(error.event(self._error_shape), last=True)
            return
        body = error.body(self._error_shape)
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self._begin(error.status, len(body), headers)
        await self._piece(body, last=True)

    async def _begin(self, status: int, num_bytes: int | None, further: Headers) -> None:
        """Send the head of an answer; ``num_bytes`` is its length, None for a stream."""
        if num_bytes is None:
            headers = [(b"content-type", _EVENT_STREAM), *further, (b"cache-control", b"no-cache")]
        else:
            self.close()
            headers = [(b"content-type", _JSON), *further, (b"content-length", b"%d" % num_bytes)]
        self.status = status
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _piece(self, piece: bytes, *, last: bool = False) -> None:
        if last:
            self.close()
        elif self._keep_alive is not None:
            self._keep_alive.note_piece()
        message: Message = {"type": "http.response.body", "body": piece, "more_body": not last}
        await self._send(message)
