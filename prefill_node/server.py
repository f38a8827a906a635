"""The prefill node's front: HTTP on one port, the bootstrap endpoint on another.

A request is answered once all its rooms have been delivered to the decode node, which is what a router waits
for. The client's answer comes from the decode node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import assert_never

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.app import Front, Work, create_app, json_response
from api.frame import SSE_DONE, Answer, sse
from api.node import run_front
from api.requests import grouped
from api.schemas import ApiRequest, Endpoint
from protocol.access import PeerList
from protocol.bootstrap import (
    BOOTSTRAP_PATH,
    CODE_HEADER,
    NONCE_HEADER,
    BootstrapGate,
    BootstrapInfo,
    BootstrapRefused,
    RankInfo,
)
from protocol.messages import PROTOCOL_VERSION, Geometry
from service.engine_link import by_room
from service.engine_messages import EngineReady, PrefillFinished, RequestFailed, Tokens
from service.http_errors import ApiError, NodeUnavailable, RequestFailedError
from service.settings import PrefillSettings
from vocabulary import RankPlace

log = logging.getLogger(__name__)

_geometry_decoder = msgspec.msgpack.Decoder(Geometry)


def run(settings: PrefillSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status of the process."""
    return run_front(
        settings,
        role="prefill",
        engine=_run_engine,
        choose_rank=by_room,
        holds_output=False,
        ports=(settings.port, settings.bootstrap_port),
        apps=_apps,
    )


def _apps(front: Front) -> tuple[Starlette, ...]:
    assert isinstance(front.settings, PrefillSettings)
    return create_prefill_app(front), create_bootstrap_app(front.settings, front)


def _run_engine(settings: PrefillSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    # Imported in the engine's process alone: the front needs no torch, and starts in half the time without.
    from prefill_node.engine import run_engine

    run_engine(settings, endpoints, place)


def create_prefill_app(front: Front) -> Starlette:
    async def prefill(work: Work) -> Answer:
        return await _prefill(front, work)

    return create_app(front, prefill)


def create_bootstrap_app(settings: PrefillSettings, front: Front) -> Starlette:
    """The read-only discovery endpoint, for whom ``BootstrapGate`` lets in; 503 unless the engine is alive.

    Decode nodes take its answer for a sign of life while the engine is too busy to answer heartbeats.
    """
    gate = BootstrapGate(front.control_keys, PeerList.parse(settings.allowed_peers))
    for reason in BootstrapGate.REASONS:  # from 0: an alert must see the first one too
        front.metrics.bootstrap_refusals.labels(reason)

    async def bootstrap(request: Request) -> Response:
        address = request.client.host if request.client is not None else ""
        nonce = request.headers.get(NONCE_HEADER, "")
        try:
            gate.check(address, nonce, request.headers.get(CODE_HEADER, ""))
            front.link.require_engine()
            if (stall := front.link.stall()) is not None:
                raise NodeUnavailable(stall)
            ready = [rank.ready for rank in front.link.ranks if rank.ready is not None]
            response = json_response(bootstrap_info(settings, ready))
            response.headers.update(gate.proof(nonce, bytes(response.body)))
            return response
        except NodeUnavailable as error:
            return json_response(error.to_dict(), error.status)
        except BootstrapRefused as error:
            front.metrics.bootstrap_refusals.labels(error.code).inc()
            log.warning("refused a bootstrap request from %s: %s", address, error)
            return json_response(ApiError(error.status, str(error), code=error.code).to_dict(), error.status)

    return Starlette(routes=[Route(BOOTSTRAP_PATH, bootstrap, methods=["GET"])])


def bootstrap_info(settings: PrefillSettings, ready: Sequence[EngineReady]) -> BootstrapInfo:
    """``ready``: what the engine of each rank said."""
    endpoints = [of_rank.control_endpoint.rpartition(":") for of_rank in ready]
    hosts = [host.strip("[]") for host, _, _ in endpoints]
    ranks = [
        RankInfo(of_rank.instance_id, int(port), host if host != hosts[0] else "")
        for of_rank, host, (_, _, port) in zip(ready, hosts, endpoints, strict=True)
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


async def _prefill(front: Front, work: Work) -> Answer:
    """Wait until every room is delivered. Raises RequestFailedError for the first that is not."""
    finished: dict[str, PrefillFinished] = {}
    index_of = {sample.generate.request_id: index for index, sample in enumerate(work.samples)}
    with front.link.open(grouped(work.samples, with_prompts=True)) as group:
        work.timeline.sent(group.ranks)
        while len(finished) < len(work.samples):
            event = await group.next_event()
            match event:
                case PrefillFinished():
                    work.timeline.note(index_of[event.request_id], event.phases, event)
                    finished[event.request_id] = event
                case RequestFailed():
                    work.timeline.failed(index_of[event.request_id], event.phases, event.error)
                    raise RequestFailedError(event.status, event.error, code=event.code or None)
                case Tokens():  # only decode engines send them
                    raise RequestFailedError(500, "the prefill engine sent tokens")
                case _:
                    assert_never(event)
    front.metrics.time_to_first_token.observe(work.timeline.first_token())
    report = _report(front, work, [finished[sample.generate.request_id] for sample in work.samples])
    if work.request.stream:
        return Answer.events(sse(report) + SSE_DONE)
    return Answer.json(report)


def _report(front: Front, work: Work, finished: list[PrefillFinished]) -> object:
    """What happened here: for the operator, the client never sees it.

    Public routers merge ``meta_info.input_token_logprobs`` of both nodes and look for it in this shape.
    """
    entries = [
        {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": _request_id(work.request, sample.prompt_index, event),
                "prompt_tokens": event.num_prompt_tokens,
                "completion_tokens": 0,
                "cached_tokens": event.num_cached_tokens,
                "transfer_bytes": event.transfer_bytes,
                "transfer_secs": event.transfer_secs,
                "input_token_logprobs": [],
            },
        }
        for sample, event in zip(work.samples, finished, strict=True)
    ]
    if work.request.endpoint is Endpoint.GENERATE and len(entries) == 1 and not work.request.is_batch:
        return entries[0]
    if work.request.endpoint is Endpoint.GENERATE and not work.request.stream:
        return entries
    return {"object": "prefill", "model": front.settings.model_name, "choices": [], "prefill": entries}


def _request_id(request: ApiRequest, prompt_index: int, event: PrefillFinished) -> str:
    return request.request_ids[prompt_index] if request.request_ids else event.request_id
