"""The router's HTTP application: relays requests that generate, and answers those about the fleet itself.

``process.py`` makes it with ``create_app`` and serves it. One ``_RouterParts`` holds what its endpoints
share: the pool of nodes, the health checks, the relay, the metrics. ``RelayEndpoint`` is the life of one
relayed request: body, relay, answer or error, and what is counted and traced of it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.traces import open_tracer
from hisparse_pd.router.body import RequestBody
from hisparse_pd.router.connect import RawHeaders
from hisparse_pd.router.drain import Drain, ShuttingDown
from hisparse_pd.router.errors import RouterError, StreamEnded
from hisparse_pd.router.fleet import Fleet
from hisparse_pd.router.health import LOADING, HealthWatch
from hisparse_pd.router.live_page import PAGE_PATHS, page_routes
from hisparse_pd.router.metrics import RouterMetrics
from hisparse_pd.router.node_calls import NodeAnswer, NodeCalls
from hisparse_pd.router.nodes import NodeKind, NodePool
from hisparse_pd.router.relay import Relay
from hisparse_pd.router.request_ids import ANSWERED_HEADERS, RequestIds, request_id
from hisparse_pd.router.status import StatusBoard
from hisparse_pd.router.stream_journal import JournalBudget
from hisparse_pd.serving.api.bodies import Endpoint, TokenPath
from hisparse_pd.serving.api.keys import RequireKey, load_api_keys
from hisparse_pd.serving.api.models import MODEL_PATH, MODELS_PATH, json_response, show_version
from hisparse_pd.serving.api.openapi import OPENAPI_PATH, show_openapi
from hisparse_pd.serving.api.pages import GuardFromPages
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, cut
from hisparse_pd.serving.http.off_loop import parse_body
from hisparse_pd.serving.http.receiving import CLIENT_LEFT, read_body, unless_client_leaves

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import RequestSpan

log = logging.getLogger(__name__)

RELAYED = (*Endpoint, *TokenPath)
"""Paths whose requests are relayed. An Endpoint generates, at a pair of nodes; a TokenPath, such as
/tokenize, is about tokens and needs one decode node only."""

_OPEN_PATHS = frozenset(("/health", "/readiness", "/liveness", "/metrics")) | PAGE_PATHS
"""Paths that need no API key: probes and monitoring have none, and on the page a key is entered."""


def create_app(settings: RouterSettings, drain: Drain | None = None) -> Starlette:
    """Make the ASGI application; ``drain`` ends its requests. Raises StartError."""
    router = _RouterParts(settings, drain or Drain())
    keys, count = load_api_keys(settings.api_key_file), router.metrics.unauthorized.inc
    middleware = [] if keys is None else [Middleware(RequireKey, keys, _OPEN_PATHS, count)]
    middleware = [Middleware(RequestIds), *middleware, Middleware(GuardFromPages)]
    if settings.cors_allow_origins:
        # Before the check of keys: a browser's preflight request has none.
        middleware.insert(0, _cors(settings.cors_allow_origins))
    return Starlette(
        routes=[
            *(Route(path, RelayEndpoint(router, path), methods=["POST"]) for path in RELAYED),
            *(Route(path, answer, methods=["GET"]) for path, answer in router.information.items()),
            *page_routes(),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error},
        lifespan=router.lifespan,
    )


def _cors(origins: Sequence[str]) -> Middleware:
    """Let pages of ``origins`` read answers. A page sends its key in a header, so no credentials are
    allowed."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[*(kind.header for kind in NodeKind), *ANSWERED_HEADERS, "server-timing"],
    )


class _RouterParts:
    """The router's parts, which its endpoints share."""

    def __init__(self, settings: RouterSettings, drain: Drain) -> None:
        self.settings = settings
        self.drain = drain
        self.pool = NodePool.from_settings(settings)
        journals = JournalBudget(settings.journal_bytes)
        self.metrics = RouterMetrics(self.pool, journals)
        calls = NodeCalls.of(settings)
        self._watch = HealthWatch(
            self.pool,
            calls,
            settings.health_interval_secs,
            with_load=settings.policy != "round_robin",
            follows_events=settings.policy == "cache_aware",
        )
        self.relay = Relay(self.pool, calls, self._watch.check, self.metrics, journals, settings)
        self.tracer = open_tracer(
            settings.otlp_traces_endpoint,
            "hisparse-pd-router",
            f"{socket.gethostname()}:{settings.port}",
            self.metrics.count_spans,
            follows=False,  # callers are clients, whose decisions to record a trace do not count here
        )
        self._status = StatusBoard(self.pool, drain, calls, self.metrics, settings.policy)
        fleet = Fleet(self.pool, calls)
        # What answers GET, by path.
        self.information: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self._health,
            "/readiness": self._health,
            "/liveness": _liveness,
            "/metrics": self._show_metrics,
            "/status": self._status.answer,
            "/version": show_version,
            OPENAPI_PATH: show_openapi,
            MODELS_PATH: fleet.models,
            MODEL_PATH: fleet.models,
            "/server_info": fleet.server_info,
            "/get_server_info": fleet.server_info,
            "/model_info": fleet.model_info,
            "/get_model_info": fleet.model_info,
            "/tokenizer_info": fleet.tokenizer_info,
        }

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._watch.start()
        try:
            yield
        finally:
            await self._watch.stop()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    async def _health(self, request: Request) -> Response:
        """Answer 200 while requests can be served: one healthy node of each kind, and no shutdown."""
        is_draining = self.drain.is_draining
        is_ready = self.pool.has_pair() and not is_draining
        nodes = [
            {"url": node.url, "kind": node.kind, "healthy": node.healthy, "in_flight": node.num_in_flight}
            | ({"trouble": node.trouble} if node.trouble else {})
            for node in self.pool.nodes
        ]
        is_loading = any(node.trouble == LOADING for node in self.pool.nodes)
        trouble = "draining" if is_draining else "loading" if is_loading else "unavailable"
        body = {"status": "ok" if is_ready else trouble, "nodes": nodes}
        return json_response(body, 200 if is_ready else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _liveness(request: Request) -> Response:
    """Answer 200, which shows that the event loop turns, whatever the nodes do."""
    return json_response({"status": "ok"})


class RelayEndpoint:
    """ASGI application of one relayed path.

    ``drain.time_left()`` lets a wait go on until the drain's time is over, and then ends it with
    ShuttingDown, an ApiError.
    """

    def __init__(self, router: _RouterParts, path: str) -> None:
        self._router = router
        self._path = path
        self._endpoint = Endpoint(path) if path in set(Endpoint) else None
        """None for a TokenPath."""
        self._error_shape = ErrorShape.of_path(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        started = time.perf_counter()
        status = 500
        tracer = self._router.tracer
        span = None if tracer is None else tracer.request(self._path, scope["headers"])
        if span is not None:
            span.set({"hisparse_pd.request_id": request_id(scope)})
        try:
            with self._router.drain.in_flight():
                status = await self._serve(request, send, span)
        except ShuttingDown as error:  # the drain had begun before the request came
            status = await self._send_error(request, send, error, span)
        finally:
            if span is not None:
                span.end(status)
            secs = time.perf_counter() - started
            self._router.metrics.requests.labels(self._path, status).inc()
            self._router.metrics.duration.labels(self._path).observe(secs)
            log.info("%s %d in %.3f s, %s", self._path, status, secs, request_id(scope))

    async def _serve(self, request: Request, send: Send, span: RequestSpan | None) -> int:
        """Answer the request. Returns the status under which it is counted."""
        reply = _Reply(send)
        try:
            body = await read_body(request, self._router.settings.request_timeout_secs)
            return await unless_client_leaves(
                request.receive, self._relay(request, body, reply, span), lambda: reply.is_complete
            )
        except ClientDisconnect:
            return CLIENT_LEFT
        except ApiError as error:
            return await self._send_error(request, send, error, span)

    async def _relay(self, request: Request, body: bytes, send: Send, span: RequestSpan | None) -> int:
        """Open the request at its nodes and stream the answer. Returns its status. Raises ApiError."""
        headers = request.headers.raw if span is None else span.passed_on(request.headers.raw)
        started = time.perf_counter()
        async with AsyncExitStack() as stack:
            async with self._router.drain.time_left():
                answer = await self._open(body, headers, stack, span)
            if self._endpoint is not None:
                self._router.metrics.ttft.labels(self._path).observe(time.perf_counter() - started)
            await self._stream(answer, send, span)
            return answer.status

    async def _open(
        self, body: bytes, headers: RawHeaders, stack: AsyncExitStack, span: RequestSpan | None
    ) -> NodeAnswer:
        """Return the decode node's answer once its first bytes are here. Raises ApiError."""
        relay = self._router.relay
        if self._endpoint is None:
            return await relay.ask_one(self._path, body, headers, stack)
        request = await parse_body(body, RequestBody.parse, body, self._endpoint)
        return await relay.open(self._endpoint, request, headers, stack, span=span)

    async def _stream(self, answer: NodeAnswer, send: Send, span: RequestSpan | None) -> None:
        """Pass the answer on to the client.

        If the node breaks it off, or the drain ends, an event stream ends in an error event. Any other body
        stays incomplete, and uvicorn closes the connection, which every client notices.
        """
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        tail = b"\n\n"  # the last two bytes, which say whether the last event is whole
        num_left = answer.num_bytes  # infinite for a body whose length is not known, such as a stream
        try:
            async with self._router.drain.time_left():
                while chunk := await answer.read():
                    tail = chunk[-2:] if len(chunk) > 1 else (tail + chunk)[-2:]
                    num_left -= len(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": num_left > 0})
                    if num_left <= 0:
                        return  # the client has everything, and may leave before the node closes
        except RouterError as error:
            self._router.metrics.truncated.inc()
            log.warning("%s: %s", self._path, error)
            if span is not None:
                span.error = str(error)
            if not answer.is_event_stream:
                return
            # A node that ended the stream by itself has sent its own error event.
            event = error.last_words if isinstance(error, StreamEnded) else b""
            if not event:
                end_of_cut_event = b"" if tail == b"\n\n" else b"\n\n"
                event = end_of_cut_event + error.event(self._error_shape)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(
        self, request: Request, send: Send, error: ApiError, span: RequestSpan | None
    ) -> int:
        if span is not None:
            span.error = str(error)
        if error.status >= 500:
            log.warning("%s: %s", self._path, error)
        await error.response(shape=self._error_shape)(request.scope, request.receive, send)
        return error.status


class _Reply:
    """The ASGI ``send`` of one request, which knows whether the whole answer was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        is_start = message["type"] == "http.response.start"
        self.is_complete = not (is_start or message.get("more_body", False))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer 404 and 405 in the same shape as every other error."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{cut(f'{request.method} {request.url.path}')}: {error.detail}"
    if error.status_code == 404:
        message += f"; requests go by POST to {', '.join(RELAYED)}"
    return ApiError(error.status_code, message).response(error.headers, ErrorShape.of_path(request.url.path))
