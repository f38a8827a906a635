"""Writes an HTTP answer from the output of its samples, whole or streamed, in the dialect of its endpoint.

``decode_node/server.py`` calls ``whole_body`` or ``streamed`` with a function that feeds the samples' outputs
from the engines' messages. A stream for a router that keeps its journal has records between its events.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Raw

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.serving.api.anthropic_answers import MessagesDialect
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.dialect import Dialect, Json
from hisparse_pd.serving.api.frame import sse
from hisparse_pd.serving.api.generate_answers import GenerateDialect
from hisparse_pd.serving.api.openai_answers import ChatDialect, CompletionsDialect
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.api.request_journal import JournalRecord, RequestJournal
from hisparse_pd.serving.api.responses_answers import ResponsesDialect
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, RequestFailedError
from hisparse_pd.serving.http.journal_lines import LEAVING, OVER, journal_line
from hisparse_pd.serving.http.off_loop import off_loop

T = TypeVar("T")

FeedOutputs = Callable[[Sequence[SampleOutput]], AsyncGenerator[Delta, None]]
"""A function that feeds outputs with the engine's messages and yields what each message added, until all
outputs have finished. Raises RequestFailedError."""

_RECORDS_BETWEEN_YIELDS = 16
"""Journal records that are replayed before other tasks of the event loop get a turn."""

_INLINE_LOGPROBS = 256
"""Most logprobs of a prompt that are written on the event loop."""


async def whole_body(context: DecodeContext, work: Work, feed_outputs: FeedOutputs) -> bytes:
    """Return the body of a whole answer."""
    outputs, dialect = _outputs(context, work), _dialect(context, work)
    choices: dict[int, Raw] = {}
    async with aclosing(feed_outputs(outputs)) as deltas:
        async for delta in deltas:
            await _beside_loop(dialect.keep, outputs[delta.index], delta)
            if delta.finish is not None:
                choices[delta.index] = dialect.choice(outputs[delta.index])
    return msgspec.json.encode(dialect.whole(outputs, [choices[output.index] for output in outputs]))


def streamed(context: DecodeContext, work: Work, feed_outputs: FeedOutputs) -> AsyncGenerator[bytes, None]:
    """Return the server-sent events of a stream, with journal lines if a router keeps a journal."""
    outputs, dialect = _outputs(context, work), _dialect(context, work)
    if (journal := work.request.journal) is not None:
        return _journaled_stream(context, work, journal, dialect, outputs, feed_outputs)
    return _event_stream(dialect, outputs, feed_outputs)


async def _event_stream(
    dialect: Dialect, outputs: Sequence[SampleOutput], feed_outputs: FeedOutputs
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream without a journal."""
    try:
        async with aclosing(feed_outputs(outputs)) as deltas:
            async for delta in deltas:
                if events := await _beside_loop(partial(_events, dialect), outputs[delta.index], delta):
                    yield events
    except RequestFailedError as error:
        if (last := dialect.failed(error)) is None:
            raise
        yield _encode_event(last)
        return
    for event in dialect.last_events(outputs):
        yield _encode_event(event)
    if dialect.end:
        yield dialect.end


async def _journaled_stream(
    context: DecodeContext,
    work: Work,
    journal: RequestJournal,
    dialect: Dialect,
    outputs: Sequence[SampleOutput],
    feed_outputs: FeedOutputs,
) -> AsyncGenerator[bytes, None]:
    """Yield the events that the journal does not have yet, in units that each end with a record.

    The stream ends with the line OVER, unless it fails with an error after which another node may go on with
    it. The first unit written after this node has begun to leave is followed by the line LEAVING.
    """
    for number, record in enumerate(journal.records, 1):
        output = outputs[record.sample]
        scored = output.replay_scored(record.num_scored) if record.num_scored else None
        dialect.replay(output, scored or output.feed(record.message))
        if scored or number % _RECORDS_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)
    units = _UnitWriter(outputs)
    has_begun = has_said_leaving = False
    try:
        async with aclosing(feed_outputs(outputs)) as deltas:
            async for delta in deltas:
                output = outputs[delta.index]
                events = await _beside_loop(partial(_events, dialect), output, delta)
                if unit := units.write(output, delta, events):
                    has_begun = True
                    if context.link.is_leaving and not has_said_leaving:
                        has_said_leaving = True
                        unit += journal_line(LEAVING)
                    yield unit
    except ApiError as error:
        if not has_begun:
            raise
        line = journal_line(OVER) if error.status < 500 else b""
        last = dialect.failed(error)
        yield (_encode_event(last) if last else error.event(ErrorShape.of_path(work.request.endpoint))) + line
        return
    yield b"".join(map(_encode_event, dialect.last_events(outputs))) + dialect.end + journal_line(OVER)


async def _beside_loop(write: Callable[[SampleOutput, Delta], T], output: SampleOutput, delta: Delta) -> T:
    """Return what ``write`` makes of ``delta``, in a thread where that takes a millisecond or two."""
    num_logprobs = len(delta.scored) * (1 + len(delta.scored[-1].top)) if delta.scored else 0
    if num_logprobs > _INLINE_LOGPROBS:
        return await off_loop(write, output, delta)
    return write(output, delta)


def _events(dialect: Dialect, output: SampleOutput, delta: Delta) -> bytes:
    return b"".join(map(_encode_event, dialect.events(output, delta)))


def _encode_event(event: Json) -> bytes:
    return sse(event, event.get("type", ""))


class _UnitWriter:
    """Writes units of a journaled stream: a delta's events, then a record of all tokens not recorded yet."""

    def __init__(self, outputs: Sequence[SampleOutput]) -> None:
        """``outputs`` have been fed with the journal's records."""
        self._num_recorded = Counter({output.index: len(output.token_ids) for output in outputs})
        self._logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        """Logprobs of tokens that are not recorded yet, by sample."""

    def write(self, output: SampleOutput, delta: Delta, events: bytes) -> bytes:
        """Return the unit of ``delta``. It is b"" without ``events``; the next record has its tokens, too."""
        index = output.index
        if delta.logprobs:
            self._logprobs[index] += delta.logprobs
        if not events:
            return b""
        if delta.scored:
            scored = JournalRecord(index, (), num_scored=len(delta.scored))
            return events + journal_line(msgspec.json.encode(scored))
        record: list[object] = [index, output.token_ids[self._num_recorded[index] : delta.last_token]]
        self._num_recorded[index] = delta.last_token
        if delta.finish is not None or delta.logprobs:
            record.append(self._logprobs.pop(index, ()))
        if (finish := delta.finish) is not None:
            matched = finish.matched if isinstance(finish.matched, int) else None
            record += [finish.reason, matched, output.stats]
        return events + journal_line(msgspec.json.encode(record))


_DIALECTS: Mapping[Endpoint, type[Dialect]] = {
    Endpoint.COMPLETIONS: CompletionsDialect,
    Endpoint.CHAT: ChatDialect,
    Endpoint.GENERATE: GenerateDialect,
    Endpoint.MESSAGES: MessagesDialect,
    Endpoint.RESPONSES: ResponsesDialect,
}


def _dialect(context: DecodeContext, work: Work) -> Dialect:
    return _DIALECTS[work.request.endpoint](context, work)


def _outputs(context: DecodeContext, work: Work) -> list[SampleOutput]:
    token_bytes = context.codec.token_bytes
    return [SampleOutput(index, sample, token_bytes) for index, sample in enumerate(work.samples)]
