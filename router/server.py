"""The router's HTTP server: endpoints, body limit, client disconnects; ``run`` is the process."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from api.keys import ApiKeys, RequireKey, load_api_keys
from protocol.access import KeyFileError
from protocol.decoding import TypedDecoder
from router.body import Endpoint, RequestBody
from router.connect import OwnConnections
from router.drain import Drain, ShuttingDown
from router.errors import NodeFailed, RouterError
from router.health import LOADING, HealthWatch
from router.live_page import PAGE_PATHS, page_routes
from router.metrics import CLIENT_GONE, RouterMetrics
from router.nodes import NodeKind, NodePool, NodeUrlError
from router.relay import Answer, Relay
from router.status import StatusBoard
from service import descriptors
from service.http_errors import ApiError
from service.listening import HttpServer, Listener
from service.process import setup_logging
from service.settings import RouterSettings

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECS = 5.0
_JSON = "application/json"
_MODELS_DECODER: TypedDecoder[dict[str, object]] = TypedDecoder.json(dict[str, object])

_OPEN_PATHS = frozenset(("/health", "/readiness", "/metrics")) | PAGE_PATHS
"""Answered without an API key: probes and monitoring have none, and the page is where a key is entered."""


def create_app(settings: RouterSettings, drain: Drain | None = None) -> Starlette:
    """The ASGI application; ``drain`` ends its requests. Raises NodeUrlError, KeyFileError."""
    router = _Router(settings, drain or Drain())
    keys, count = load_api_keys(settings.api_key_file), router.metrics.unauthorized.inc
    middleware = [] if keys is None else [Middleware(RequireKey, keys, _OPEN_PATHS, count)]
    if settings.cors_allow_origins:
        # In front of the key, which a browser does not send when it asks whether it may call.
        middleware.insert(0, _cors(settings.cors_allow_origins))
    return Starlette(
        routes=[
            *(Route(endpoint, _RelayEndpoint(router, endpoint), methods=["POST"]) for endpoint in Endpoint),
            Route("/v1/models", router.models, methods=["GET"]),
            Route("/v1/models/{model:path}", router.models, methods=["GET"]),
            Route("/health", router.health, methods=["GET"]),
            Route("/readiness", router.health, methods=["GET"]),
            Route("/metrics", router.expose_metrics, methods=["GET"]),
            Route("/status", router.status.endpoint, methods=["GET"]),
            *page_routes(),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error},
        lifespan=router.lifespan,
    )


def _cors(origins: Sequence[str]) -> Middleware:
    """Lets pages of ``origins`` read answers. Keys come in a header that the page sets, so no credentials."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[kind.header for kind in NodeKind],
    )


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT; the process exit status."""
    setup_logging(settings.log_level, "router")
    descriptors.raise_limit()
    drain = Drain()
    try:
        app = create_app(settings, drain)
    except (NodeUrlError, KeyFileError) as error:
        log.error("%s", error)
        return 2
    try:
        listener = Listener(settings.host, settings.port)
    except OSError as error:
        log.error("%s", error)
        return 1
    if settings.exposure is not None:
        log.warning("%s", settings.exposure)
    server = listener.server(app, lifespan="on", num_descriptors_each=descriptors.OF_ROUTER)
    try:
        asyncio.run(_serve(server, listener, drain, settings.drain_timeout_secs))
    except SystemExit:  # uvicorn's way to say that it could not start; it has logged why
        return 1
    return 0 if server.started else 1


async def _serve(server: HttpServer, listener: Listener, drain: Drain, drain_timeout_secs: float) -> None:
    """Until a signal; then requests in flight may finish. A second signal ends the wait."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number.name)
    log.info("serving on http://%s:%d", *listener.socket.getsockname()[:2])
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    stop = asyncio.create_task(signals.get())
    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        log.info("%s: shutting down with %d requests in flight", stop.result(), drain.num_in_flight)
        await drain.finish(drain_timeout_secs, is_hurried=lambda: not signals.empty())
        server.should_exit = True
    stop.cancel()
    await serving


class _Router:
    """What lives as long as the application: the pool, the client and the health watch."""

    def __init__(self, settings: RouterSettings, drain: Drain) -> None:
        self.settings = settings
        self.drain = drain
        self.pool = NodePool.from_settings(settings)
        self.metrics = RouterMetrics(self.pool)
        # A connection a leg: its close is the node's abort signal, and none goes stale when a node restarts.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.request_timeout_secs, connect=settings.connect_timeout_secs),
            transport=OwnConnections(),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            auth=_NodeKey.of(settings),
            trust_env=False,
        )
        self.relay = Relay(
            self.pool,
            self._client,
            on_retry=self.metrics.count_retry,
            max_retries=settings.max_retries,
            passes_authorization=settings.api_key_file is None,
        )
        self.status = StatusBoard(self.pool, drain, self._client, self.metrics, settings.policy)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watch = HealthWatch(
            self.pool,
            self._client,
            interval_secs=self.settings.health_interval_secs,
            timeout_secs=HEALTH_TIMEOUT_SECS,
            with_load=self.settings.policy != "round_robin",
        )
        async with self._client:
            await watch.start()
            try:
                yield
            finally:
                await watch.stop()

    async def health(self, request: Request) -> Response:
        """200 while a request could be served: one healthy node of each kind, and no shutdown."""
        is_ready = self.pool.ready and not self.drain.is_draining
        nodes = [
            {"url": node.url, "kind": node.kind, "healthy": node.healthy, "in_flight": node.num_in_flight}
            | ({"trouble": node.trouble} if node.trouble else {})
            for node in self.pool.nodes
        ]
        is_loading = any(node.trouble == LOADING for node in self.pool.nodes)
        trouble = "draining" if self.drain.is_draining else "loading" if is_loading else "unavailable"
        status = "ok" if is_ready else trouble
        body = msgspec.json.encode({"status": status, "nodes": nodes})
        return Response(body, 200 if is_ready else 503, media_type=_JSON)

    async def expose_metrics(self, request: Request) -> Response:
        return Response(self.metrics.expose(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The models of all healthy decode nodes, each once; or the one that the path names."""
        nodes = self.pool.healthy(NodeKind.DECODE)
        lists = await asyncio.gather(*(self._models_of(node.url) for node in nodes))
        if not any(models is not None for models in lists):
            states = "; ".join(f"{node.url}: {node.trouble}" for node in self.pool.of_kind(NodeKind.DECODE))
            return ApiError(503, f"no decode node told its models ({states})").response()
        by_id = {model["id"]: model for models in lists for model in models or ()}
        name = request.path_params.get("model")
        if name is None:
            body = msgspec.json.encode({"object": "list", "data": list(by_id.values())})
        elif name in by_id:
            body = msgspec.json.encode(by_id[name])
        else:
            served = ", ".join(repr(model) for model in by_id)
            return ApiError(404, f"model: {name!r} does not exist here; served are {served}").response()
        return Response(body, media_type=_JSON)

    async def _models_of(self, url: str) -> list[dict[str, object]] | None:
        try:
            answer = await self._client.get(f"{url}/v1/models", timeout=HEALTH_TIMEOUT_SECS)
            listing = _MODELS_DECODER.decode(answer.content)
        except (httpx.HTTPError, OSError, msgspec.MsgspecError) as error:
            log.warning("%s/v1/models: %s", url, error or type(error).__name__)
            return None
        models = listing.get("data")
        if not isinstance(models, list):
            return None
        return [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]


class _NodeKey(httpx.Auth):
    """Adds the router's own key to every request to a node, whatever the client sent."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    @classmethod
    def of(cls, settings: RouterSettings) -> _NodeKey | None:
        keys = load_api_keys(settings.node_api_key_file)
        return None if keys is None else cls(keys)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._keys.first}"
        yield request


class _RelayEndpoint:
    """ASGI application of one relayed path."""

    def __init__(self, router: _Router, endpoint: Endpoint) -> None:
        self._router = router
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        started = time.perf_counter()
        status = 500
        try:
            with self._router.drain.in_flight():
                status = await self._serve(request, send)
        except ShuttingDown as error:  # it came too late
            status = await self._send_error(request, send, error)
        finally:
            secs = time.perf_counter() - started
            self._router.metrics.requests.labels(self._endpoint, status).inc()
            self._router.metrics.duration.labels(self._endpoint).observe(secs)
            log.info("%s %d in %.3f s", self._endpoint, status, secs)

    async def _serve(self, request: Request, send: Send) -> int:
        """Answers the request; the status under which it is counted."""
        try:
            body = RequestBody.parse(await self._read_body(request), self._endpoint)
        except ClientDisconnect:
            return CLIENT_GONE
        except RouterError as error:
            return await self._send_error(request, send, error)
        answering = asyncio.create_task(self._relay(request, body, send))
        leaving = asyncio.create_task(_client_left(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            return await answering if answering.done() else CLIENT_GONE
        except TimeoutError:
            log.warning("%s: the client stopped reading its answer", self._endpoint)
            return CLIENT_GONE
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _read_body(self, request: Request) -> bytes:
        limit = self._router.settings.max_body_bytes
        declared = request.headers.get("content-length", "0")
        body = bytearray()
        if declared.isdecimal() and int(declared) <= limit:
            try:
                async with asyncio.timeout(self._router.settings.request_timeout_secs):
                    async for chunk in request.stream():
                        body += chunk
                        if len(body) > limit:
                            break
            except TimeoutError as error:
                raise RouterError(408, "the request body did not arrive in time") from error
        if len(body) > limit or not declared.isdecimal() or int(declared) > limit:
            raise RouterError(413, f"the request body is larger than max_body_bytes = {limit}")
        return bytes(body)

    async def _relay(self, request: Request, body: RequestBody, send: Send) -> int:
        started = time.perf_counter()
        async with AsyncExitStack() as stack:
            try:
                headers = httpx.Headers(request.headers.raw)
                async with self._router.drain.time_left():
                    answer = await self._router.relay.open(self._endpoint, body, headers, stack)
            except RouterError as error:
                return await self._send_error(request, send, error)
            self._router.metrics.ttft.labels(self._endpoint).observe(time.perf_counter() - started)
            await self._stream(answer, send)
            return answer.status

    async def _stream(self, answer: Answer, send: Send) -> None:
        """Pass the answer on.

        When the node breaks it off, or the router's time is up, an event stream ends in an error event; any
        other body is left short, and uvicorn closes the connection, which every client sees.
        """
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        tail = b"\n\n"
        try:
            async with self._router.drain.time_left():
                async for chunk in answer.chunks:
                    tail = (tail + chunk)[-2:]
                    await self._send_chunk(send, chunk, more=True)
        except (NodeFailed, ShuttingDown) as error:
            self._router.metrics.truncated.inc()
            log.warning("%s: %s", self._endpoint, error)
            if not answer.is_event_stream:
                return
            event = (b"" if tail == b"\n\n" else b"\n\n") + b"data: " + error.body() + b"\n\n"
            await self._send_chunk(send, event, more=True)
        await self._send_chunk(send, b"", more=False)

    async def _send_chunk(self, send: Send, chunk: bytes, *, more: bool) -> None:
        # A client that stops reading must not hold two nodes for ever.
        async with asyncio.timeout(self._router.settings.request_timeout_secs):
            await send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def _send_error(self, request: Request, send: Send, error: RouterError) -> int:
        if error.status >= 500:
            log.warning("%s: %s", self._endpoint, error)
        await error.response(error.node_headers)(request.scope, request.receive, send)
        return error.status


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 in the same shape as every other error."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message).response(error.headers)
