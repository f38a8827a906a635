"""The HTTP application of a node of either kind: information about the node, and its operators' endpoints.

The applications of decode nodes (``app.py``) and prefill nodes (``prefill_node/server.py``) are made by
``create_node_app``, each with further endpoints of its own.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.protocol.channels import ControlKeys
from hisparse_pd.serving.api.keys import ApiKeys, RequireKey
from hisparse_pd.serving.api.models import MODEL_PATH, MODELS_PATH, json_response, show_models, show_version
from hisparse_pd.serving.api.pages import GuardFromPages
from hisparse_pd.serving.api.quarantine_routes import quarantine_routes
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, cut
from hisparse_pd.serving.http.metrics import CONTENT_TYPE, FrontMetrics
from hisparse_pd.serving.http.node_load import NodeLoad

_PRIVATE_SETTINGS = {
    *("model_path", "control_key_file", "api_key_file", "allowed_peers"),
    *("ssl_certfile", "ssl_keyfile", "otlp_traces_endpoint"),
}
"""Settings that /server_info leaves out: they say how this machine is set up, and SGLang's router would load
the tokenizer of a model_path that is reported."""

_RANK_FIELDS = (
    *("max_total_tokens_hisparse", "max_total_tokens_dense"),
    *("transfer_protocol", "transfer_devices"),
)
"""Fields that /server_info has for the node and for each of its ranks."""
_EACH_RANK_FIELDS = (*_RANK_FIELDS, "numa_node", "numa_placement")

_OPEN_PATHS = frozenset(("/health", "/health_generate", "/liveness", "/metrics", "/status"))
"""Paths that need no API key: probes and monitoring have none."""

_OPERATORS_PATHS = frozenset(("/flush_cache", "/release_quarantine", "/drain"))
"""Paths that change the node's state; pages in a browser may not call them."""


@dataclass(frozen=True)
class NodeContext:
    """The parts that the handlers of a node of either kind use."""

    role: str
    settings: NodeSettings
    link: EngineLink
    metrics: FrontMetrics
    api_keys: ApiKeys | None = None
    """None if requests need no key."""
    control_keys: ControlKeys | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))
    metrics_of_fronts: Callable[[], Sequence[bytes]] = tuple
    """Returns the packed metrics of all fronts if there are several; the default returns none, and this
    front's own are rendered."""


GetHandler = Callable[[Request], Awaitable[Response]]
PostHandler = GetHandler | ASGIApp


def create_node_app(
    context: NodeContext, post_handlers: Mapping[str, PostHandler], get_handlers: Mapping[str, GetHandler]
) -> Starlette:
    """Return the application with the endpoints that every node has, and with further ones by path."""
    own: dict[str, Callable[[NodeContext, Request], Awaitable[Response]]] = {
        "/health": _health,
        "/health_generate": _health,
        "/liveness": _liveness,
        "/server_info": _server_info,
        "/get_server_info": _server_info,
        "/get_load": _load,
        "/status": _status,
        MODELS_PATH: _models,
        MODEL_PATH: _models,
        "/metrics": _metrics,
    }
    all_get_handlers: dict[str, GetHandler] = {path: partial(answer, context) for path, answer in own.items()}
    all_get_handlers |= {"/version": show_version, **get_handlers}
    routes: list[BaseRoute] = [
        Route(path, handler, methods=["POST"]) for path, handler in post_handlers.items()
    ]
    routes += [Route(path, answer, methods=["GET"]) for path, answer in all_get_handlers.items()]
    routes.append(Route("/flush_cache", partial(_flush_cache, context), methods=["POST"]))
    routes += quarantine_routes(context.link)
    keys, count_refused = context.api_keys, context.metrics.unauthorized.inc
    middleware = [] if keys is None else [Middleware(RequireKey, keys, _OPEN_PATHS, count_refused)]
    return Starlette(
        routes=routes,
        middleware=[*middleware, Middleware(GuardFromPages, _OPERATORS_PATHS)],
        exception_handlers={ApiError: _answer_api_error, HTTPException: _answer_http_error},
    )


def model_info(context: NodeContext) -> dict[str, object]:
    """Return the part of /model_info that all nodes answer. The handler of each kind of node adds to it."""
    info: dict[str, object] = {"served_model_name": context.settings.model_name, "is_generation": True}
    if context.link.ready is not None:
        info["context_length"] = context.link.ready.context_length
    return info


# --- information -------------------------------------------------------------------------------------


async def _health(context: NodeContext, request: Request) -> Response:
    trouble = context.link.trouble()
    if trouble is None:
        return json_response({"status": "ok", "role": context.role})
    is_leaving = context.link.is_leaving
    body: dict[str, object] = {"status": "leaving" if is_leaving else "unavailable", "reason": trouble}
    loading = context.link.loading
    if context.link.is_loading and context.link.stall() is None:
        progress = msgspec.structs.asdict(loading) if loading is not None else None
        body = {"status": "loading", "reason": trouble, "loading": progress}
    return json_response(body, 503)


async def _liveness(context: NodeContext, request: Request) -> Response:
    """Answer 503 where a restart is the remedy: the engine, loading or serving, makes no progress."""
    stall = context.link.stall()
    if stall is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": stall}, 503)


async def _server_info(context: NodeContext, request: Request) -> Response:
    ready = context.link.ready
    info: dict[str, object] = {
        "version": VERSION,
        "disaggregation_mode": context.role,
        "dp_size": context.settings.dp_size,
        "nnodes": context.settings.nnodes,
        "served_model_name": context.settings.model_name,
        "max_running_requests": context.settings.max_running_requests,
        "status": str(context.link.state),
        "settings": context.settings.model_dump(mode="json", exclude=_PRIVATE_SETTINGS),
    }
    if ready is not None:
        info |= {name: getattr(ready, name) for name in ("context_length", *_RANK_FIELDS, "transfer_reason")}
        info["ranks"] = [
            {"dp_rank": rank.rank, **{name: getattr(rank.reports.ready, name) for name in _EACH_RANK_FIELDS}}
            for rank in context.link.ranks
        ]
    info["lanes"] = [
        {"dp_rank": rank.rank, **msgspec.to_builtins(lane)}
        for rank in context.link.ranks
        if rank.reports.stats is not None
        for lane in rank.reports.stats.lanes
    ]
    return json_response(info)


async def _load(context: NodeContext, request: Request) -> Response:
    """Answer one entry a rank; routers add up ``num_tokens``."""
    loads = [
        {
            "dp_rank": rank.rank,
            "num_reqs": stats.num_running + stats.num_waiting if (stats := rank.reports.stats) else 0,
            "num_waiting_reqs": stats.num_waiting if stats else 0,
            "num_tokens": stats.num_used_tokens if stats else 0,
        }
        for rank in context.link.ranks
    ]
    return json_response(loads)


async def _status(context: NodeContext, request: Request) -> Response:
    stats = {rank.rank: rank.reports.stats for rank in context.link.ranks if rank.reports.stats is not None}
    return json_response(NodeLoad.of(context.role, stats))


async def _models(context: NodeContext, request: Request) -> Response:
    model: dict[str, object] = {
        "id": context.settings.model_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "hisparse-pd",
    }
    if context.link.ready is not None:
        model["max_model_len"] = context.link.ready.context_length
    return show_models(request, [model])


async def _metrics(context: NodeContext, request: Request) -> Response:
    text = context.metrics.render(context.metrics_of_fronts())
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def _flush_cache(context: NodeContext, request: Request) -> Response:
    await context.link.flush_cache()
    return json_response({"status": "the prefix cache has dropped what no request uses"})


def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(shape=ErrorShape.of_path(request.url.path))


def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods, and HTTP/2 with prior knowledge, which routers probe for."""
    assert isinstance(error, HTTPException)
    asked = cut(f"{request.method} {request.url.path}")
    shown = ApiError(error.status_code, f"{asked}: {error.detail}")
    if request.scope["http_version"] not in ("1.0", "1.1"):
        shown = ApiError(400, f"HTTP/{request.scope['http_version']} is not spoken here; use HTTP/1.1")
    return shown.response(shape=ErrorShape.of_path(request.url.path))
