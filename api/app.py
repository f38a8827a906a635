"""The HTTP application of a node: the endpoints that both kinds share, and the frame round the working ones.

A node gives ``create_app`` one handler, which turns a checked request into an ``Answer``. The frame reads the
body within its limits, maps errors to OpenAI's shape, ends the work when the client leaves, and counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from api.keys import ApiKeys, RequireKey
from api.requests import Limits, SampleRequest, plan_samples
from api.sampling_defaults import SamplingDefaults
from api.schemas import ApiRequest, Endpoint, parse_request
from api.text_codec import TextCodec
from protocol.channels import ControlKeys
from service.engine_link import EngineLink
from service.http_errors import ApiError
from service.metrics import CONTENT_TYPE, FrontMetrics
from service.off_loop import off_loop
from service.rank_link import RankLink
from service.settings import NodeSettings
from vocabulary import VERSION

log = logging.getLogger(__name__)

T = TypeVar("T")

BODY_TIMEOUT_SECS = 30.0
"""A client that has not sent its whole body by then is answered 408."""

_PIECES_BETWEEN_YIELDS = 16
"""Of an answer; a piece takes some 20 us."""

_INLINE_BODY_BYTES = 1 << 16
"""Up to this size, a body is parsed at once: in a millisecond."""

_JSON = "application/json"
_EVENT_STREAM = "text/event-stream; charset=utf-8"
"""With its charset: some clients take text without one for ISO-8859-1."""
_CLIENT_LEFT = 499
_PRIVATE_SETTINGS = {"model_path", "control_key_file", "api_key_file", "allowed_peers"}
"""Not in /server_info: a router loads the tokenizer of a model_path that is reported to it."""

_OPEN_PATHS = frozenset(("/health", "/health_generate", "/liveness", "/metrics"))
"""Answered without an API key: probes and monitoring have none."""


@dataclass(frozen=True)
class Front:
    """What the handlers of one node work with."""

    role: str
    settings: NodeSettings
    codec: TextCodec
    link: EngineLink
    metrics: FrontMetrics
    holds_output: bool
    api_keys: ApiKeys | None = None
    """What a request must have one of; None: nothing."""
    control_keys: ControlKeys | None = None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    started_at: int = field(default_factory=lambda: int(time.time()))
    of_all_fronts: Callable[[], Awaitable[bytes]] | None = None
    """Renders the metrics of the node; None: this is its only front."""


@dataclass(frozen=True)
class Work:
    """One checked request, about to be handed to the engine."""

    request: ApiRequest
    samples: tuple[SampleRequest, ...]
    arrived_at: float
    """On the monotonic clock, in seconds."""


@dataclass(frozen=True)
class Answer:
    """A body that is complete or, with ``rest``, the beginning of a stream and the generator of its rest."""

    body: bytes
    content_type: str = _JSON
    rest: AsyncGenerator[bytes, None] | None = None

    @classmethod
    def json(cls, value: object) -> Answer:
        return cls(msgspec.json.encode(value))

    @classmethod
    def events(cls, body: bytes) -> Answer:
        """A stream of server-sent events that is complete."""
        return cls(body, _EVENT_STREAM)

    @classmethod
    async def stream(cls, pieces: AsyncGenerator[bytes, None]) -> Answer:
        """Events as they come. What fails before the first one is raised: it can still have a status."""
        return cls(await anext(pieces), _EVENT_STREAM, pieces)


Handler = Callable[[Work], Awaitable[Answer]]
"""Called once a request is checked. It raises ApiError for a failure before the answer has begun; an answer's
stream reports later ones itself."""


def create_app(front: Front, handler: Handler) -> Starlette:
    """The application with all endpoints of a node."""
    routes: list[BaseRoute] = [
        Route(endpoint, _WorkEndpoint(front, endpoint, handler), methods=["POST"]) for endpoint in Endpoint
    ]
    information: dict[str, Callable[[Front], Response]] = {
        "/health": _health,
        "/health_generate": _health,
        "/liveness": _liveness,
        "/version": _version,
        "/server_info": _server_info,
        "/get_server_info": _server_info,
        "/model_info": _model_info,
        "/get_model_info": _model_info,
        "/get_load": _load,
        "/v1/models": _models,
    }
    routes += [Route(path, _bound(answer, front), methods=["GET"]) for path, answer in information.items()]
    routes.append(Route("/metrics", partial(_metrics, front), methods=["GET"]))
    routes.append(Route("/flush_cache", _bound(_flush_cache, front), methods=["GET", "POST"]))
    return Starlette(
        routes=routes,
        middleware=_middleware(front),
        exception_handlers={ApiError: _answer_api_error, HTTPException: _answer_http_error},
    )


def _middleware(front: Front) -> list[Middleware]:
    if front.api_keys is None:
        return []
    return [Middleware(RequireKey, front.api_keys, _OPEN_PATHS, front.metrics.unauthorized.inc)]


def sse(value: object) -> bytes:
    """One server-sent event with ``value`` as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


# --- the frame round the working endpoints -----------------------------------------------------------


class _WorkEndpoint:
    """The ASGI application of one path that takes work."""

    def __init__(self, front: Front, endpoint: Endpoint, handler: Handler) -> None:
        self._front = front
        self._endpoint = endpoint
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(send)
        try:
            work = await self._check(Request(scope, receive))
            await _unless_client_leaves(receive, self._work(work, reply))
        except ClientDisconnect:
            reply.status = _CLIENT_LEFT
        except ApiError as error:
            await reply.fail(error)
        except Exception:
            log.exception("%s failed", self._endpoint)
            await reply.fail(ApiError(500, "internal error; the node's log has the details"))
        finally:
            self._front.metrics.count_request(self._endpoint, reply.status)

    async def _check(self, request: Request) -> Work:
        arrived_at = time.monotonic()
        front = self._front
        body = await _read_body(request, front.settings.max_body_bytes)
        parsed = await self._parse(body)
        front.link.require_place(sum(options.n for options in parsed.options))
        limits = Limits.of(
            front.link.require_serving(),
            holds_output=front.holds_output,
            default_max_tokens=front.settings.default_max_tokens,
            max_request_tokens=front.settings.max_request_tokens,
        )
        samples = await plan_samples(parsed, front.codec, limits, front.link.front)
        return Work(parsed, samples, arrived_at)

    async def _parse(self, body: bytes) -> ApiRequest:
        arguments = (self._endpoint, body, self._front.settings.model_name, self._front.sampling_defaults)
        if len(body) <= _INLINE_BODY_BYTES:
            return parse_request(*arguments)
        return await off_loop(parse_request, *arguments)

    async def _work(self, work: Work, reply: _Reply) -> None:
        await reply.send_answer(await self._handler(work))
        self._front.metrics.e2e_request_latency.observe(time.monotonic() - work.arrived_at)


class _Reply:
    """The one answer to one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False
        self.status = _CLIENT_LEFT
        """Of the answer; what it is when the handler is cancelled before there is one."""

    async def send_answer(self, answer: Answer) -> None:
        if answer.rest is None:
            await self._begin(200, answer.content_type, len(answer.body))
            await self._piece(answer.body, last=True)
            return
        async with aclosing(answer.rest) as pieces:
            await self._begin(200, answer.content_type)
            await self._piece(answer.body)
            num_sent = 0
            async for piece in pieces:
                await self._piece(piece)
                num_sent += 1
                # Neither a backlog nor a connection that is gone ever waits: without this, a long one would
                # let nothing else run, not even the watch for the client's leaving.
                if num_sent % _PIECES_BETWEEN_YIELDS == 0:
                    await asyncio.sleep(0)
        await self._piece(b"", last=True)

    async def fail(self, error: ApiError) -> None:
        """Answer with ``error``; as an event and the end of the stream when one has begun."""
        if self._begun:
            await self._piece(sse(error.to_dict()), last=True)
            return
        body = error.body()
        await self._begin(error.status, _JSON, len(body))
        await self._piece(body, last=True)

    async def _begin(self, status: int, content_type: str, num_bytes: int | None = None) -> None:
        headers = [(b"content-type", content_type.encode())]
        if num_bytes is None:
            headers.append((b"cache-control", b"no-cache"))
        else:
            headers.append((b"content-length", b"%d" % num_bytes))
        self.status = status
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _piece(self, piece: bytes, *, last: bool = False) -> None:
        message: Message = {"type": "http.response.body", "body": piece, "more_body": not last}
        await self._send(message)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError 413 or 408, or ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECS):
            async for chunk in request.stream():
                chunks.append(chunk)
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_SECS:g} s") from error
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes, the most that this node takes")


async def _unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves. Raises ClientDisconnect."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_client_leaves(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


# --- information -------------------------------------------------------------------------------------


def _bound(answer: Callable[[Front], Response], front: Front) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return answer(front)

    return endpoint


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _health(front: Front) -> Response:
    trouble = front.link.trouble()
    if trouble is None:
        return json_response({"status": "ok"})
    body: dict[str, object] = {"status": "unavailable", "reason": trouble}
    loading = front.link.loading
    if front.link.is_loading and front.link.stall() is None:
        progress = msgspec.structs.asdict(loading) if loading is not None else None
        body = {"status": "loading", "reason": trouble, "loading": progress}
    return json_response(body, 503)


def _liveness(front: Front) -> Response:
    """Whether a restart is the remedy: 503 once the engine, loading or serving, makes no progress."""
    stall = front.link.stall()
    if stall is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": stall}, 503)


def _version(front: Front) -> Response:
    return json_response({"version": VERSION})


def _server_info(front: Front) -> Response:
    ready = front.link.ready
    info: dict[str, object] = {
        "version": VERSION,
        "disaggregation_mode": front.role,
        "dp_size": front.settings.dp_size,
        "nnodes": front.settings.nnodes,
        "served_model_name": front.settings.model_name,
        "max_running_requests": front.settings.max_running_requests,
        "status": str(front.link.state),
        "settings": front.settings.model_dump(mode="json", exclude=_PRIVATE_SETTINGS),
    }
    if ready is not None:
        info["context_length"] = ready.context_length
        info["max_total_tokens_hisparse"] = ready.max_total_tokens_hisparse
        info["max_total_tokens_dense"] = ready.max_total_tokens_dense
        info["transfer_protocol"] = ready.transfer_protocol
        info["transfer_devices"] = ready.transfer_devices
        info["transfer_reason"] = ready.transfer_reason
        info["ranks"] = [_rank_info(rank) for rank in front.link.ranks]
    ranks = [(rank.rank, rank.stats) for rank in front.link.ranks]
    info["lanes"] = [
        {"dp_rank": rank, **msgspec.to_builtins(lane)}
        for rank, stats in ranks
        if stats is not None
        for lane in stats.lanes
    ]
    return json_response(info)


def _rank_info(rank: RankLink) -> dict[str, object]:
    assert rank.ready is not None
    return {
        "dp_rank": rank.rank,
        "max_total_tokens_hisparse": rank.ready.max_total_tokens_hisparse,
        "max_total_tokens_dense": rank.ready.max_total_tokens_dense,
        "transfer_protocol": rank.ready.transfer_protocol,
        "transfer_devices": rank.ready.transfer_devices,
    }


def _model_info(front: Front) -> Response:
    info: dict[str, object] = {
        "served_model_name": front.settings.model_name,
        "is_generation": True,
        "vocab_size": front.codec.vocab_size,
        "default_sampling_params": asdict(front.sampling_defaults),
    }
    if front.link.ready is not None:
        info["context_length"] = front.link.ready.context_length
    return json_response(info)


def _load(front: Front) -> Response:
    """One entry a rank; routers add up ``num_tokens``."""
    loads = [
        {
            "dp_rank": rank.rank,
            "num_reqs": stats.num_running + stats.num_waiting if (stats := rank.stats) else 0,
            "num_waiting_reqs": stats.num_waiting if stats else 0,
            "num_tokens": stats.num_used_tokens if stats else 0,
        }
        for rank in front.link.ranks
    ]
    return json_response(loads)


def _models(front: Front) -> Response:
    model: dict[str, object] = {
        "id": front.settings.model_name,
        "object": "model",
        "created": front.started_at,
        "owned_by": "hisparse-pd",
    }
    if front.link.ready is not None:
        model["max_model_len"] = front.link.ready.context_length
    return json_response({"object": "list", "data": [model]})


async def _metrics(front: Front, request: Request) -> Response:
    text = front.metrics.render() if front.of_all_fronts is None else await front.of_all_fronts()
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _flush_cache(front: Front) -> Response:
    front.link.flush_cache()
    return json_response({"status": "the prefix cache drops what no request uses"})


def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods; HTTP/2 with prior knowledge, which routers probe for."""
    assert isinstance(error, HTTPException)
    shown = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    if request.scope["http_version"] not in ("1.0", "1.1"):
        shown = ApiError(400, f"HTTP/{request.scope['http_version']} is not spoken here; use HTTP/1.1")
    return shown.response()
