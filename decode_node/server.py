"""The decode node's front: the client's answer, as text, whole or streamed."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import assert_never

from msgspec import Raw
from starlette.applications import Starlette

from api.app import Front, Work, create_app
from api.dialects import dialect_of
from api.frame import Answer
from api.node import run_front
from api.output import Delta, SampleOutput
from api.requests import grouped
from api.timing import Timeline
from decode_node.quarantine_routes import quarantine_routes
from service.engine_link import ByPrefix, SampleGroup
from service.engine_messages import PrefillFinished, RequestFailed, Tokens
from service.http_errors import RequestFailedError
from service.settings import DecodeSettings
from vocabulary import RankPlace

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
        if work.request.stream:
            return await Answer.stream(_stream(front, work))
        return await _whole(front, work)

    app = create_app(front, decode)
    app.router.routes += quarantine_routes(front.link)
    return app


async def _whole(front: Front, work: Work) -> Answer:
    outputs = _outputs(front, work)
    dialect = dialect_of(work, front.settings.model_name, front.codec)
    choices: dict[int, Raw] = {}
    async with aclosing(_deltas(front, work, outputs)) as deltas:
        async for delta in deltas:
            dialect.keep(outputs[delta.index], delta)
            if delta.finish is not None:
                choices[delta.index] = dialect.choice(outputs[delta.index])
    return Answer.json(dialect.whole(outputs, [choices[output.index] for output in outputs]))


async def _stream(front: Front, work: Work) -> AsyncGenerator[bytes, None]:
    outputs = _outputs(front, work)
    dialect = dialect_of(work, front.settings.model_name, front.codec)
    try:
        async with aclosing(_deltas(front, work, outputs)) as deltas:
            async for delta in deltas:
                for piece in dialect.pieces(outputs[delta.index], delta):
                    yield piece
    except RequestFailedError as error:
        if (last := dialect.failed(error)) is None:
            raise
        yield last
        return
    for piece in dialect.last_pieces(outputs):
        yield piece


def _outputs(front: Front, work: Work) -> list[SampleOutput]:
    token_bytes = front.codec.token_bytes
    return [SampleOutput(index, sample, token_bytes) for index, sample in enumerate(work.samples)]


async def _deltas(front: Front, work: Work, outputs: Sequence[SampleOutput]) -> AsyncGenerator[Delta, None]:
    """Run the samples; yield what comes, until all have finished.

    Raises RequestFailedError as soon as one fails; the others are then aborted.
    """
    clock = _TokenClock(front, work)
    by_request_id = {output.sample.generate.request_id: output for output in outputs}
    num_live = len(outputs)
    holds_prefixes = isinstance(front.settings, DecodeSettings) and not front.settings.disable_held_prefixes
    with front.link.open(grouped(work.samples, with_prompts=holds_prefixes)) as group:
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
            case PrefillFinished():
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
