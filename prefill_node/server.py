"""The prefill node's front: HTTP on one port, the bootstrap endpoint on another.

A request is answered once all its rooms have been delivered to the decode node, which is what a router waits
for, and the client's answer comes from the decode node. A request that needs none has its answer from here:
one for no token, or for logprobs of the prompt's own, which this node alone knows.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import assert_never

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.seldom import Seldom
from hisparse_pd.base.settings import PrefillSettings
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.engine.messages import EngineReady, PrefillFinished, PromptScores, RequestFailed, Tokens
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
from hisparse_pd.serving.api.answering import streamed, whole_body
from hisparse_pd.serving.api.answers import shown_lists
from hisparse_pd.serving.api.app import Front, Work, create_app
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.frame import SSE_DONE, Answer, sse
from hisparse_pd.serving.api.models import json_response
from hisparse_pd.serving.api.node import run_front
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.api.prompt_scores import PromptLists, Scores, with_lists, write_lists
from hisparse_pd.serving.api.quarantine_routes import quarantine_routes
from hisparse_pd.serving.api.requests import grouped
from hisparse_pd.serving.api.schemas import ApiRequest
from hisparse_pd.serving.http.engine_link import by_room
from hisparse_pd.serving.http.http_errors import ApiError, NodeUnavailable, RequestFailedError
from hisparse_pd.serving.http.off_loop import off_loop

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
    from hisparse_pd.prefill_node.engine import run_engine

    run_engine(settings, endpoints, place)


def create_prefill_app(front: Front) -> Starlette:
    async def prefill(work: Work) -> Answer:
        if work.request.is_prefill_only:
            return await _answer_alone(front, work)
        return await _prefill(front, work)

    app = create_app(front, prefill)
    app.router.routes += quarantine_routes(front.link)
    return app


def create_bootstrap_app(settings: PrefillSettings, front: Front) -> Starlette:
    """The read-only discovery endpoint, for whom ``BootstrapGate`` lets in; 503 unless the engine is alive.

    Decode nodes take its answer for a sign of life while the engine is too busy to answer heartbeats.
    """
    gate = BootstrapGate(front.control_keys, PeerList.parse(settings.allowed_peers))
    logged = Seldom()
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
            if logged.permits(address):
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


async def _answer_alone(front: Front, work: Work) -> Answer:
    """The answer to a request that is this node's alone. Raises RequestFailedError."""
    scores = _noted_scores(work)

    def tokens(outputs: Sequence[SampleOutput]) -> AsyncGenerator[Delta, None]:
        return _tokens(front, work, outputs, scores)

    if work.request.stream:
        return await Answer.stream(streamed(front, work, tokens))
    body = await whole_body(front, work, tokens)
    if scores:
        written = await write_lists(work, scores, front.codec.token_bytes)
        body = await off_loop(with_lists, work, body, written)
    return Answer(body)


async def _tokens(
    front: Front, work: Work, outputs: Sequence[SampleOutput], scores: dict[int, Scores]
) -> AsyncGenerator[Delta, None]:
    """Each sample's output, which comes at once. ``scores`` are filled on the way."""
    by_request_id = {output.sample.generate.request_id: output for output in outputs}
    async with aclosing(_events(front, work, scores)) as events:
        async for event in events:
            if not isinstance(event, Tokens):
                raise RequestFailedError(500, "the prefill engine sent a room away that is its own")
            output = by_request_id[event.request_id]
            delta = output.feed(event)
            if delta.finish is not None:
                work.timeline.finished(output.index, len(output.token_ids), delta.finish.reason)
            yield delta
    front.metrics.time_to_first_token.observe(work.timeline.first_token())


async def _prefill(front: Front, work: Work) -> Answer:
    """Wait until every room is delivered. Raises RequestFailedError for the first that is not."""
    scores = _noted_scores(work)
    finished: dict[str, PrefillFinished] = {}
    async with aclosing(_events(front, work, scores)) as events:
        async for event in events:
            if isinstance(event, PrefillFinished):
                finished[event.request_id] = event
    front.metrics.time_to_first_token.observe(work.timeline.first_token())
    written = await write_lists(work, scores, front.codec.token_bytes)
    report = _report(front, work, finished, written)
    if work.request.stream:
        return Answer.events(sse(report) + SSE_DONE)
    return Answer.json(report)


async def _events(
    front: Front, work: Work, scores: dict[int, Scores]
) -> AsyncGenerator[PrefillFinished | Tokens, None]:
    """The last event of each sample. Raises RequestFailedError for the first that fails."""
    index_of = {sample.generate.request_id: index for index, sample in enumerate(work.samples)}
    num_live = sum(not sample.resumed.is_over for sample in work.samples)
    with front.link.open(grouped(work.samples, with_prompts=True)) as group:
        work.timeline.sent(group.ranks)
        while num_live:
            event = await group.next_event()
            match event:
                case PromptScores():
                    of_prompt = scores[work.samples[index_of[event.request_id]].prompt_index]
                    of_prompt.num_top = event.num_top
                    of_prompt.rows.append(event.rows)
                case PrefillFinished() | Tokens():
                    told = event if isinstance(event, PrefillFinished) else event.stats
                    work.timeline.note(index_of[event.request_id], event.phases, told)
                    num_live -= 1
                    yield event
                case RequestFailed():
                    work.timeline.failed(index_of[event.request_id], event.phases, event.error)
                    raise RequestFailedError(event.status, event.error, code=event.code or None)
                case _:
                    assert_never(event)


def _noted_scores(work: Work) -> dict[int, Scores]:
    """A place for those of each prompt; none where nobody asks for them."""
    return {sample.prompt_index: Scores() for sample in work.samples if sample.wanted_scores is not None}


def _report(
    front: Front, work: Work, finished: Mapping[str, PrefillFinished], written: dict[int, PromptLists]
) -> object:
    """What happened here: for the operator, the client never sees it.

    Public routers merge ``meta_info.input_token_logprobs`` of both nodes and look for it in this shape.
    """
    entries = [
        {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": _request_id(work.request, sample.prompt_index, event.request_id),
                "prompt_tokens": sample.generate.num_prompt_tokens,
                "completion_tokens": 0,
                "cached_tokens": event.num_cached_tokens,
                "transfer_bytes": event.transfer_bytes,
                "transfer_secs": event.transfer_secs,
                "input_token_logprobs": [],
                **(shown_lists(written[sample.prompt_index].meta_info) if written else {}),
            },
        }
        for sample in work.samples
        if (event := finished.get(sample.generate.request_id)) is not None
    ]
    if work.request.endpoint is Endpoint.GENERATE and len(entries) == 1 and not work.request.is_batch:
        return entries[0]
    if work.request.endpoint is Endpoint.GENERATE and not work.request.stream:
        return entries
    return {"object": "prefill", "model": front.settings.model_name, "choices": [], "prefill": entries}


def _request_id(request: ApiRequest, prompt_index: int, request_id: str) -> str:
    return request.request_ids[prompt_index] if request.request_ids else request_id
