"""The HTTP application of a node: the endpoints that both kinds share.

A node gives ``create_app`` one handler, which turns a checked request into an ``Answer``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from hisparse_pd.base.settings import NodeSettings
from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.protocol.channels import ControlKeys
from hisparse_pd.serving.api.bodies import Endpoint, TokenPath
from hisparse_pd.serving.api.frame import Answer, FramedEndpoint, Reply, Respond
from hisparse_pd.serving.api.journal import Identity
from hisparse_pd.serving.api.keys import ApiKeys, RequireKey
from hisparse_pd.serving.api.models import MODEL_PATH, MODELS_PATH, json_response, show_models
from hisparse_pd.serving.api.openapi import OPENAPI_PATH, openapi_document
from hisparse_pd.serving.api.pages import GuardFromPages
from hisparse_pd.serving.api.requests import Limits, SampleRequest, plan_samples
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.api.schemas import ApiRequest, parse_request
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.api.timing import Timeline
from hisparse_pd.serving.api.tokens import answer_about_tokens
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, cut
from hisparse_pd.serving.http.journal_lines import JOURNAL_HEADER
from hisparse_pd.serving.http.metrics import CONTENT_TYPE, FrontMetrics
from hisparse_pd.serving.http.node_load import NodeLoad
from hisparse_pd.serving.http.off_loop import parsed

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import Tracer

_PRIVATE_SETTINGS = {
    *("model_path", "control_key_file", "api_key_file", "allowed_peers"),
    *("ssl_certfile", "ssl_keyfile", "otlp_traces_endpoint"),
}
"""Not in /server_info: a router loads the tokenizer of a model_path that is reported to it."""

_OF_RANKS = (
    *("max_total_tokens_hisparse", "max_total_tokens_dense"),
    *("transfer_protocol", "transfer_devices"),
)
"""What /server_info tells of the node's ready engine, and of each rank."""
_OF_EACH_RANK = (*_OF_RANKS, "numa_node", "numa_placement")

LEFT_OUT_HEADER = b"x-hisparse-pd-left-out"
_MAX_LEFT_OUT_SHOWN = 16
"""Headers have a bound in every client and proxy."""

_OPEN_PATHS = frozenset(("/health", "/health_generate", "/liveness", "/metrics", "/status"))
"""Answered without an API key: probes and monitoring have none."""

_OPERATORS_PATHS = frozenset(("/flush_cache", "/release_quarantine", "/drain"))
"""That do something to the node: for no page in a browser."""


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
    metrics_of_fronts: Callable[[], Sequence[bytes]] = tuple
    """Those of a node of several, packed."""
    tracer: Tracer | None = None
    """None: there are no traces."""

    def close(self) -> None:
        """Send the spans that wait, for a known time at most."""
        if self.tracer is not None:
            self.tracer.close()


@dataclass(frozen=True)
class Work:
    """One checked request, about to be handed to the engine."""

    request: ApiRequest
    samples: tuple[SampleRequest, ...]
    arrived_at: float
    """On the monotonic clock, in seconds."""
    timeline: Timeline

    @cached_property
    def identity(self) -> Identity:
        """Of the answer."""
        journal = self.request.journal
        return Identity() if journal is None else journal.identity

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of the answer, beside those of its body."""
        is_journaled = self.request.stream and self.request.journal is not None
        journal = [(JOURNAL_HEADER, b"1")] if is_journaled else []
        return [*self.timeline.headers, *_left_out(self.request), *journal]


Handler = Callable[[Work], Awaitable[Answer]]
"""Called once a request is checked. It raises ApiError for a failure before the answer has begun; an answer's
stream reports later ones itself."""


def create_app(front: Front, handler: Handler) -> Starlette:
    """The application with all endpoints of a node."""
    takers: dict[str, Respond] = {
        **{endpoint: partial(_work, front, endpoint, handler) for endpoint in Endpoint},
        **{path: partial(_about_tokens, front, path) for path in TokenPath},
    }
    count = front.metrics.count_request
    routes: list[BaseRoute] = [
        Route(path, FramedEndpoint(path, respond, count, front.tracer), methods=["POST"])
        for path, respond in takers.items()
    ]
    information: dict[str, Callable[[Front, Request], Awaitable[Response]]] = {
        "/health": _health,
        "/health_generate": _health,
        "/liveness": _liveness,
        "/version": _version,
        OPENAPI_PATH: _openapi,
        "/server_info": _server_info,
        "/get_server_info": _server_info,
        "/model_info": _model_info,
        "/get_model_info": _model_info,
        "/get_load": _load,
        "/status": _status,
        "/tokenizer_info": _tokenizer_info,
        MODELS_PATH: _models,
        MODEL_PATH: _models,
        "/metrics": _metrics,
    }
    routes += [Route(path, partial(answer, front), methods=["GET"]) for path, answer in information.items()]
    routes.append(Route("/flush_cache", partial(_flush_cache, front), methods=["POST"]))
    keys, count_refused = front.api_keys, front.metrics.unauthorized.inc
    middleware = [] if keys is None else [Middleware(RequireKey, keys, _OPEN_PATHS, count_refused)]
    return Starlette(
        routes=routes,
        middleware=[*middleware, Middleware(GuardFromPages, _OPERATORS_PATHS)],
        exception_handlers={ApiError: _answer_api_error, HTTPException: _answer_http_error},
    )


# --- work --------------------------------------------------------------------------------------------


async def _work(
    front: Front, endpoint: Endpoint, handler: Handler, body: bytes, arrived_at: float, reply: Reply
) -> None:
    """Check a request, have the handler do it, and say how long it took."""
    timeline = Timeline(front.metrics, arrived_at, reply.request_headers, reply.span)
    try:
        work = await _checked(front, endpoint, body, arrived_at, timeline)
        answer = await handler(work)
        await reply.send_answer(answer, work.headers)
    finally:
        timeline.close()
    front.metrics.e2e_request_latency.observe(time.monotonic() - arrived_at)


async def _checked(
    front: Front, endpoint: Endpoint, body: bytes, arrived_at: float, timeline: Timeline
) -> Work:
    settings, defaults = front.settings, front.sampling_defaults
    request = await parsed(body, parse_request, endpoint, body, settings.model_name, defaults)
    front.link.require_place(sum(options.n for options in request.options))
    ready = front.link.require_serving()
    pools = ready.max_total_tokens_hisparse, ready.max_total_tokens_dense
    limits = Limits(ready.context_length, *pools, front.holds_output, settings.default_max_tokens)
    samples = await plan_samples(request, front.codec, limits, front.link.front)
    timeline.checked(request, samples, settings.model_name)
    return Work(request, samples, arrived_at, timeline)


def _left_out(request: ApiRequest) -> list[tuple[bytes, bytes]]:
    """The header that names the tools of which the model was not told."""
    chat = request.chat
    if chat is None or not chat.left_out:
        return []
    named = (f"{tool.place} ({tool.kind})" for tool in chat.left_out[:_MAX_LEFT_OUT_SHOWN])
    return [(LEFT_OUT_HEADER, ", ".join(named).encode())]


async def _about_tokens(front: Front, path: TokenPath, body: bytes, arrived_at: float, reply: Reply) -> None:
    context_length = front.link.require_serving().context_length
    model_name = front.settings.model_name
    await reply.send_answer(await answer_about_tokens(path, body, model_name, front.codec, context_length))


# --- information -------------------------------------------------------------------------------------


async def _health(front: Front, request: Request) -> Response:
    trouble = front.link.trouble()
    if trouble is None:
        return json_response({"status": "ok", "role": front.role})
    is_leaving = front.link.is_leaving
    body: dict[str, object] = {"status": "leaving" if is_leaving else "unavailable", "reason": trouble}
    loading = front.link.loading
    if front.link.is_loading and front.link.stall() is None:
        progress = msgspec.structs.asdict(loading) if loading is not None else None
        body = {"status": "loading", "reason": trouble, "loading": progress}
    return json_response(body, 503)


async def _liveness(front: Front, request: Request) -> Response:
    """Whether a restart is the remedy: 503 once the engine, loading or serving, makes no progress."""
    stall = front.link.stall()
    if stall is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": stall}, 503)


async def _version(front: Front, request: Request) -> Response:
    return json_response({"version": VERSION})


async def _openapi(front: Front, request: Request) -> Response:
    return Response(openapi_document(), media_type="application/json")


async def _server_info(front: Front, request: Request) -> Response:
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
        info |= {name: getattr(ready, name) for name in ("context_length", *_OF_RANKS, "transfer_reason")}
        info["ranks"] = [
            {"dp_rank": rank.rank, **{name: getattr(rank.ready, name) for name in _OF_EACH_RANK}}
            for rank in front.link.ranks
        ]
    info["lanes"] = [
        {"dp_rank": rank.rank, **msgspec.to_builtins(lane)}
        for rank in front.link.ranks
        if rank.stats is not None
        for lane in rank.stats.lanes
    ]
    return json_response(info)


async def _model_info(front: Front, request: Request) -> Response:
    info: dict[str, object] = {
        "served_model_name": front.settings.model_name,
        "is_generation": True,
        "vocab_size": front.codec.vocab_size,
        "default_sampling_params": asdict(front.sampling_defaults),
    }
    if front.link.ready is not None:
        info["context_length"] = front.link.ready.context_length
    return json_response(info)


async def _tokenizer_info(front: Front, request: Request) -> Response:
    """vLLM's, for clients that have no tokenizer of their own, as lm-eval's ``tokenizer_backend=remote``."""
    return json_response(front.codec.description)


async def _load(front: Front, request: Request) -> Response:
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


async def _status(front: Front, request: Request) -> Response:
    stats = {rank.rank: rank.stats for rank in front.link.ranks if rank.stats is not None}
    return json_response(NodeLoad.of(front.role, stats))


async def _models(front: Front, request: Request) -> Response:
    model: dict[str, object] = {
        "id": front.settings.model_name,
        "object": "model",
        "created": front.started_at,
        "owned_by": "hisparse-pd",
    }
    if front.link.ready is not None:
        model["max_model_len"] = front.link.ready.context_length
    return show_models(request, [model])


async def _metrics(front: Front, request: Request) -> Response:
    text = front.metrics.render(front.metrics_of_fronts())
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def _flush_cache(front: Front, request: Request) -> Response:
    front.link.flush_cache()
    return json_response({"status": "the prefix cache drops what no request uses"})


def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(shape=ErrorShape.of_path(request.url.path))


def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods; HTTP/2 with prior knowledge, which routers probe for."""
    assert isinstance(error, HTTPException)
    asked = cut(f"{request.method} {request.url.path}")
    shown = ApiError(error.status_code, f"{asked}: {error.detail}")
    if request.scope["http_version"] not in ("1.0", "1.1"):
        shown = ApiError(400, f"HTTP/{request.scope['http_version']} is not spoken here; use HTTP/1.1")
    return shown.response(shape=ErrorShape.of_path(request.url.path))
