"""The decode node's front: the client's answer, as text, whole or streamed."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import assert_never

from starlette.applications import Starlette

from api.answering import streamed, whole_body
from api.app import Front, Work, create_app
from api.frame import Answer
from api.node import run_front
from api.output import Delta, SampleOutput
from api.requests import grouped
from api.schemas import Endpoint
from decode_node.quarantine_routes import quarantine_routes
from service.engine_link import ByPrefix, SampleGroup
from service.engine_messages import PrefillFinished, PromptScores, RequestFailed, Tokens
from service.http_errors import ApiError, RequestFailedError
from service.settings import DecodeSettings
from vocabulary import FinishReason, RankPlace

log = logging.getLogger(__name__)


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
    return (create_decode_app(front),)


def _run_engine(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    # Imported in the engine's process alone: the front needs no torch, and starts in half the time without.
    from decode_node.engine import run_engine

    run_engine(settings, endpoints, place)


def create_decode_app(front: Front) -> Starlette:
    async def decode(work: Work) -> Answer:
        _check_answerable(work)

        def deltas(outputs: Sequence[SampleOutput]) -> AsyncGenerator[Delta, None]:
            return _deltas(front, work, outputs)

        if work.request.stream:
            return await Answer.stream(streamed(front, work, deltas))
        return Answer(await whole_body(front, work, deltas))

    app = create_app(front, decode)
    app.router.routes += quarantine_routes(front.link)
    return app


def _check_answerable(work: Work) -> None:
    """Raises ApiError for what the client would get an answer without."""
    request = work.request
    if any(options.max_new_tokens != 0 for options in request.options) and request.is_prefill_only:
        raise ApiError(400, "prefill_only: this is a decode node", param="prefill_only")
    # SGLang's routers join /generate themselves.
    if request.wants_scores and not request.joins_answers and request.endpoint is not Endpoint.GENERATE:
        raise ApiError(
            400,
            "echo with logprobs, prompt_logprobs: the prefill node has the prompt's logprobs, and this "
            "router does not join them to the answer; send the request through hisparse-pd's own",
        )


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
    num_live = len(outputs)
    holds_prefixes = isinstance(front.settings, DecodeSettings) and not front.settings.disable_held_prefixes
    with front.link.open(grouped(work.samples, with_prompts=holds_prefixes)) as group:
        while num_live:
            output, tokens = await _next_tokens(group, by_request_id)
            delta = output.feed(tokens)
            output.is_behind = group.has_more_tokens(tokens.request_id)
            clock.note(output.index, delta.last_token - delta.first_token)
            if delta.finish is not None:
                num_live -= 1
                group.finish(tokens.request_id)  # a stop string is news to the engine
            yield delta


async def _next_tokens(
    group: SampleGroup, by_request_id: dict[str, SampleOutput]
) -> tuple[SampleOutput, Tokens]:
    """The next message of a sample that has not finished."""
    while True:
        event = await group.next_event()
        output = by_request_id[event.request_id]
        if output.finish is not None:
            continue  # sent before the engine knew of the stop string
        match event:
            case Tokens():
                return output, event
            case RequestFailed():
                raise RequestFailedError(event.status, event.error, code=event.code or None)
            case PrefillFinished() | PromptScores():
                raise RequestFailedError(500, "the decode engine reported a prefill")
            case _:
                assert_never(event)


class _TokenClock:
    """Observes time to first token and inter-token latency of one request's samples."""

    def __init__(self, front: Front, work: Work) -> None:
        self._metrics = front.metrics
        self._arrived_at = work.arrived_at
        self._last_at: dict[int, float] = {}

    def note(self, index: int, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = time.monotonic()
        last = self._last_at.get(index)
        self._last_at[index] = now
        if last is None:
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
            return
        for _ in range(num_tokens):
            self._metrics.inter_token_latency.observe((now - last) / num_tokens)
