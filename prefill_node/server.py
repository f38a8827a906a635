"""The prefill node's front: status and administration on one port, the bootstrap endpoint on another.

``hisparse-pd prefill`` calls ``run``. Decode nodes find this node's control sockets through the bootstrap
endpoint. Only decode nodes serve clients' requests. A router that sends each request to both nodes, as
SGLang's does, gets an empty answer here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.engine.messages import EngineReady
from hisparse_pd.protocol.bootstrap import (
    BOOTSTRAP_PATH,
    CODE_HEADER,
    NONCE_HEADER,
    BootstrapGate,
    BootstrapInfo,
    BootstrapRefused,
    RankInfo,
)
from hisparse_pd.protocol.messages import PROTOCOL_VERSION, Geometry
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.models import json_response
from hisparse_pd.serving.api.node import run_front
from hisparse_pd.serving.api.node_app import NodeContext, create_node_app, model_info
from hisparse_pd.serving.http.engine_link import rooms_at_work
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, NodeUnavailable

log = logging.getLogger(__name__)

_BODY_SECS = 10.0
"""Time limit for receiving a body, which nobody reads."""

_EMPTY_ANSWER: Final[dict[str, Any]] = {"meta_info": {"input_token_logprobs": []}}
"""The answer to every request. SGLang's ``mini_lb`` puts this list before the decode node's, which has all
logprobs of the prompt."""

_geometry_decoder = msgspec.msgpack.Decoder(Geometry)


def run(settings: PrefillSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status of the process."""
    return run_front(
        settings,
        role="prefill",
        engine=_run_engine,
        num_at_work=rooms_at_work,
        ports=(settings.port, settings.bootstrap_port),
        apps=apps,
    )


@contextmanager
def apps(context: NodeContext) -> Iterator[tuple[Starlette, ...]]:
    """Yield the application of each of the node's ports."""
    assert isinstance(context.settings, PrefillSettings)
    yield create_prefill_app(context), create_bootstrap_app(context.settings, context)


def _run_engine(settings: PrefillSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    # Only the engine's process imports these: without torch the front starts in half the time.
    from hisparse_pd.engine.start import run_engine_process
    from hisparse_pd.prefill_node.engine import PrefillEngine

    run_engine_process(PrefillEngine, settings, endpoints, place)


def create_prefill_app(context: NodeContext) -> Starlette:
    async def describe_model(request: Request) -> Response:
        return json_response(model_info(context))

    return create_node_app(
        context,
        {endpoint: partial(_leave_to_decode_node, context, endpoint) for endpoint in Endpoint},
        {"/model_info": describe_model, "/get_model_info": describe_model},
    )


async def _leave_to_decode_node(context: NodeContext, endpoint: Endpoint, request: Request) -> Response:
    """Return the empty answer, or 503 unless the node serves, so that the router takes another node.

    The body is dropped as it comes, so that the connection can be used again. A body that is too large or too
    slow ends the connection.
    """
    try:
        async with asyncio.timeout(_BODY_SECS):
            is_whole = await _drop_body(request)
    except TimeoutError:
        is_whole = False
    except ClientDisconnect:
        is_whole = False  # the client, which left, does not read the answer
    try:
        context.link.require_serving()
        response = json_response(_EMPTY_ANSWER)
    except NodeUnavailable as error:
        response = error.response(shape=ErrorShape.of_path(endpoint))
    if not is_whole:
        response.headers["connection"] = "close"
    context.metrics.count_request(endpoint, response.status_code)
    return response


async def _drop_body(request: Request) -> bool:
    """Read and drop the body. Return whether all of it came and it was no larger than bodies may be."""
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > MAX_BODY_BYTES:
            return False
    return True


def create_bootstrap_app(settings: PrefillSettings, context: NodeContext) -> Starlette:
    """Return the read-only discovery endpoint. It answers callers that ``BootstrapGate`` admits, and says 503
    if the engine has ended or has made no progress for ``health_timeout_secs`` (``stall``).

    An engine in a long step answers no ``messages.Heartbeat``. Decode nodes then learn from this endpoint
    that the engine's run has not ended.
    """
    gate = BootstrapGate(context.control_keys, PeerList.parse(settings.allowed_peers))
    logged = LogLimiter()
    for reason in BootstrapGate.REASONS:  # counters start at 0, so that an alert sees the first refusal, too
        context.metrics.bootstrap_refusals.labels(reason)

    async def bootstrap(request: Request) -> Response:
        address = request.client.host if request.client is not None else ""
        nonce = request.headers.get(NONCE_HEADER, "")
        try:
            gate.check(address, nonce, request.headers.get(CODE_HEADER, ""))
            context.link.require_engine()
            if (stall := context.link.stall()) is not None:
                raise NodeUnavailable(stall)
            ready = [rank.reports.ready for rank in context.link.ranks if rank.reports.ready is not None]
            response = json_response(bootstrap_info(settings, ready))
            response.headers.update(gate.proof(nonce, bytes(response.body)))
            return response
        except NodeUnavailable as error:
            return json_response(error.to_dict(), error.status)
        except BootstrapRefused as error:
            context.metrics.bootstrap_refusals.labels(error.code).inc()
            if logged.permits(address):
                log.warning("refused a bootstrap request from %s: %s", address, error)
            return json_response(ApiError(error.status, str(error), code=error.code).to_dict(), error.status)

    return Starlette(routes=[Route(BOOTSTRAP_PATH, bootstrap, methods=["GET"])])


def bootstrap_info(settings: PrefillSettings, ready: Sequence[EngineReady]) -> BootstrapInfo:
    """Return the bootstrap information of a node. ``ready``: the message of each rank's engine."""
    endpoints = [rank.control_endpoint.rpartition(":") for rank in ready]
    hosts = [host.strip("[]") for host, _, _ in endpoints]
    ranks = [
        RankInfo(rank.instance_id, int(port), host if host != hosts[0] else "")  # "": the control_host
        for rank, host, (_, _, port) in zip(ready, hosts, endpoints, strict=True)
    ]
    return BootstrapInfo(
        protocol_version=PROTOCOL_VERSION,
        instance_id=ranks[0].instance_id,
        control_host=hosts[0],
        control_port=ranks[0].control_port,
        geometry=_geometry_decoder.decode(ready[0].geometry),
        curve=settings.control_key_file is not None,
        ranks=tuple(ranks) if len(ranks) > 1 else (),
    )
