"""The decode node's front: the client's answer, as text, whole or streamed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import assert_never

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse_pd.base.settings import DecodeSettings
from hisparse_pd.base.vocabulary import FinishReason, RankPlace
from hisparse_pd.engine.messages import PrefillFinished, PromptScores, RequestFailed, Tokens
from hisparse_pd.serving.api.answering import streamed, whole_body
from hisparse_pd.serving.api.app import Front, Work, create_app
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.frame import Answer
from hisparse_pd.serving.api.models import json_response
from hisparse_pd.serving.api.node import run_front
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.api.quarantine_routes import quarantine_routes
from hisparse_pd.serving.api.requests import grouped
from hisparse_pd.serving.api.schemas import ApiRequest
from hisparse_pd.serving.api.timing import Timeline
from hisparse_pd.serving.http.engine_link import ByPrefix, SampleGroup
from hisparse_pd.serving.http.http_errors import ApiError, RequestFailedError


def run(settings: DecodeSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status of the process."""
    return run_front(
        settings,
        role="decode",
        engine=_run_engine,
        choose_rank=ByPrefix(),
        holds_output=True,
        ports=(settings.port,),
        apps=_apps,
    )


def _apps(front: Front) -> tuple[Starlette, ...]:
    """By its name further fronts, processes of their own, get it."""
    return (create_decode_app(front),)


def _run_engine(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    # Imported in the engine's process alone: the front needs no torch, and starts in half the time without.
    from hisparse_pd.decode_node.engine import run_engine

    run_engine(settings, endpoints, place)


def create_decode_app(front: Front) -> Starlette:
    async def decode(work: Work) -> Answer:
        _check_answerable(work.request)

        def deltas(outputs: Sequence[SampleOutput]) -> AsyncGenerator[Delta, None]:
            return _deltas(front, work, outputs)

        if work.request.stream:
            return await Answer.stream(streamed(front, work, deltas))
        return Answer(await whole_body(front, work, deltas))

    app = create_app(front, decode)
    app.router.routes += quarantine_routes(front.link)
    app.router.routes.append(Route("/drain", partial(_drain, front), methods=["POST"]))
    return app


async def _drain(front: Front, request: Request) -> Response:
    """As SIGTERM to the node: its first front, of which the others are children, gets one. Asked for again it
    is no second one, which would end the wait for requests in flight."""
    if not front.link.is_leaving:
        os.kill(os.getpid() if front.link.front == 0 else os.getppid(), signal.SIGTERM)
    return json_response({"status": "the node takes nothing new, and ends"})


def _check_answerable(request: ApiRequest) -> None:
    """Raises ApiError for a request that is a prefill node's alone; one for no token is anybody's."""
    has_tokens = any(options.max_new_tokens != 0 for options in request.options)
    lacks_scores = request.wants_scores and request.endpoint is not Endpoint.GENERATE
    if request.is_prefill_only and (has_tokens or lacks_scores):
        raise ApiError(400, "prefill_only: this is a decode node", param="prefill_only")


async def _deltas(front: Front, work: Work, outputs: Sequence[SampleOutput]) -> AsyncGenerator[Delta, None]:
    """Run the samples; yield what comes, until all have finished.

    Raises RequestFailedError as soon as one fails; the others are then aborted.
    """
    if work.request.is_prefill_only:  # nothing is generated: the engine need not know
        for output in outputs:
            request_id = output.sample.generate.request_id
            yield output.feed(Tokens(request_id, (), finish_reason=FinishReason.LENGTH))
        return
    clock = _TokenClock(front, work)
    by_request_id = {output.sample.generate.request_id: output for output in outputs}
    num_live = sum(output.finish is None for output in outputs)
    holds_prefixes = isinstance(front.settings, DecodeSettings) and not front.settings.disable_prefix_cache
    journal = work.request.journal
    may_move = journal is not None and journal.may_move
    with front.link.open(grouped(work.samples, with_prompts=holds_prefixes), may_move=may_move) as group:
        work.timeline.sent(group.ranks)
        while num_live:
            output, tokens = await _next_tokens(group, by_request_id, work.timeline)
            delta = output.feed(tokens)
            output.is_behind = group.has_more_tokens(tokens.request_id)
            clock.note(output.index, delta.last_token - delta.first_token)
            if delta.finish is not None:
                work.timeline.finished(output.index, len(output.token_ids), delta.finish.reason)
                num_live -= 1
                group.finish(tokens.request_id)  # a stop string is news to the engine
            yield delta


async def _next_tokens(
    group: SampleGroup, by_request_id: dict[str, SampleOutput], timeline: Timeline
) -> tuple[SampleOutput, Tokens]:
    """The next message of a sample that has not finished."""
    while True:
        event = await group.next_event()
        output = by_request_id[event.request_id]
        if output.finish is not None:
            continue  # sent before the engine knew of the stop string
        match event:
            case Tokens():
                timeline.note(output.index, event.phases, event.stats)
                if event.prefill is not None:
                    timeline.note_prefill(event.prefill)
                return output, event
            case RequestFailed():
                timeline.failed(output.index, event.phases, event.error)
                raise RequestFailedError(event.status, event.error, code=event.code or None)
            case PrefillFinished() | PromptScores():
                raise RequestFailedError(500, "the decode engine reported a prefill")
            case _:
                assert_never(event)


class _TokenClock:
    """Observes time to first token and inter-token latency of one request's samples."""

    def __init__(self, front: Front, work: Work) -> None:
        self._metrics = front.metrics
        self._timeline = work.timeline
        self._last_at: dict[int, float] = {}

    def note(self, index: int, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = time.monotonic()
        last = self._last_at.get(index)
        self._last_at[index] = now
        if last is None:
            self._metrics.time_to_first_token.observe(self._timeline.first_token())
            return
        for _ in range(num_tokens):
            self._metrics.inter_token_latency.observe((now - last) / num_tokens)
