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
from typing import ParamSpec, TypeVar

import msgspec
from msgspec import Raw

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.serving.api.anthropic_answers import MessagesDialect
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.dialect import Dialect, Json
from hisparse_pd.serving.api.generate_answers import GenerateDialect
from hisparse_pd.serving.api.openai_answers import ChatDialect, CompletionsDialect
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.api.request_journal import JournalRecord, RequestJournal
from hisparse_pd.serving.api.responses_answers import ResponsesDialect
from hisparse_pd.serving.http.events import sse
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape
from hisparse_pd.serving.http.journal_lines import LEAVING, OVER, journal_line
from hisparse_pd.serving.http.off_loop import off_loop

P = ParamSpec("P")
T = TypeVar("T")

FeedOutputs = Callable[[Sequence[SampleOutput]], AsyncGenerator[Delta, None]]
"""A function that feeds outputs with the engine's messages and yields what each message added, until all
outputs have finished. Raises RequestFailedError."""

_RECORDS_BETWEEN_YIELDS = 16
"""Journal records that are replayed before other tasks of the event loop get a turn."""

_INLINE_LOGPROBS = 256
"""Most logprobs of a prompt that are written on the event loop; more take a millisecond or two."""

_INLINE_VALUES = 1 << 13
"""Most tokens and logprobs that are joined on the event loop, in a millisecond, for a whole answer or for an
event that repeats all output. The most that an answer has, 4 million logprobs, take half a second."""


async def whole_body(context: DecodeContext, work: Work, feed_outputs: FeedOutputs) -> bytes:
    """Return the body of a whole answer."""
    outputs, dialect = _prepare(context, work)
    choices: dict[int, Raw] = {}
    async with aclosing(_deltas(dialect, feed_outputs(outputs))) as deltas:
        async for delta in deltas:
            await _off_loop_if_long(dialect.keep, outputs[delta.index], delta)
            if delta.finish is not None:
                output = outputs[delta.index]
                choices[delta.index] = await _off_loop_if_much([output], dialect.choice, output)

    def whole() -> bytes:
        return msgspec.json.encode(dialect.whole(outputs, [choices[output.index] for output in outputs]))

    return await _off_loop_if_much(outputs, whole)


async def streamed(
    context: DecodeContext, work: Work, feed_outputs: FeedOutputs
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a stream.

    If a router keeps a journal, these are the events that it does not have yet, in units that each end with a
    record. The stream ends with the line OVER, unless it fails with an error after which another node may go
    on with it. An error before the first event is raised, so that the answer can have its status.
    """
    outputs, dialect = _prepare(context, work)
    journal = work.request.journal
    units, over = None, b""  # without a journal the stream has neither records nor the line OVER
    if journal is not None:
        await _replay(journal, outputs, dialect)
        units, over = _UnitWriter(context, outputs), journal_line(OVER)
    write = partial(_events, dialect)
    has_begun = False
    try:
        async with aclosing(_deltas(dialect, feed_outputs(outputs))) as deltas:
            async for delta in deltas:
                output = outputs[delta.index]
                if delta.scored:
                    events = await _off_loop_if_long(write, output, delta)
                elif dialect.repeats_output(output, delta):
                    events = await _off_loop_if_much([output], write, output, delta)
                else:
                    events = write(output, delta)
                if units is not None:
                    events = units.write(output, delta, events)
                if events:
                    has_begun = True
                    yield events
    except ApiError as error:
        last = dialect.failed(error)
        if not has_begun or (journal is None and last is None):
            raise  # the caller writes the API's own error
        event = _encode_event(last) if last else error.event(ErrorShape.of_path(work.request.endpoint))
        yield event + (over if error.status < 500 else b"")  # from 500 on, another node may go on with it
        return
    yield b"".join(map(_encode_event, dialect.last_events(outputs))) + dialect.end + over


async def _replay(journal: RequestJournal, outputs: Sequence[SampleOutput], dialect: Dialect) -> None:
    """Feed the outputs and the dialect with what the client has. Each record is an engine message, or counts
    tokens of the prompt that were shown with their logprobs (``num_scored``)."""
    for number, record in enumerate(journal.records, 1):
        output = outputs[record.sample]
        scored = output.replay_scored(record.num_scored) if record.num_scored else None
        dialect.replay(output, scored or output.feed(record.message))
        if scored or number % _RECORDS_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)


def _deltas(dialect: Dialect, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Return ``deltas``, behind ``write_prompts`` where that has something to write."""
    return _behind_prompts(dialect, deltas) if dialect.repeats_prompts else deltas


async def _behind_prompts(
    dialect: Dialect, deltas: AsyncGenerator[Delta, None]
) -> AsyncGenerator[Delta, None]:
    """Yield ``deltas``, each after ``write_prompts``, which goes on while the engines compute the first."""
    writing = asyncio.create_task(dialect.write_prompts())
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                await writing
                yield delta
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _off_loop_if_long(
    write: Callable[[SampleOutput, Delta], T], output: SampleOutput, delta: Delta
) -> T:
    """Return what ``write`` makes of ``delta``, in a thread if that has many logprobs of the prompt."""
    num_logprobs = len(delta.scored) * (1 + len(delta.scored[-1].top)) if delta.scored else 0
    if num_logprobs > _INLINE_LOGPROBS:
        return await off_loop(write, output, delta)
    return write(output, delta)


async def _off_loop_if_much(
    outputs: Sequence[SampleOutput], join: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what ``join`` makes of ``outputs``, in a thread if they have many tokens and logprobs."""
    if sum(map(_num_values, outputs)) > _INLINE_VALUES:
        return await off_loop(join, *args, **kwargs)
    return join(*args, **kwargs)


def _num_values(output: SampleOutput) -> int:
    """Return how many tokens and logprobs the output has so far, with those of its prompt that are shown."""
    num_top, wanted = output.sample.options.sampling.num_logprobs, output.sample.wanted_scores
    num_shown = len(output.token_ids) * (1 if num_top is None else 2 + num_top)
    return num_shown + output.num_scored * (0 if wanted is None else 2 + wanted.num_top)


def _events(dialect: Dialect, output: SampleOutput, delta: Delta) -> bytes:
    return b"".join(map(_encode_event, dialect.events(output, delta)))


def _encode_event(event: Json) -> bytes:
    return sse(event, event.get("type", ""))


class _UnitWriter:
    """Writes units of a journaled stream: a delta's events, then a record of all tokens not recorded yet.

    The first unit written after the node has begun to leave is followed by the line LEAVING,
    with which the router may move the stream to another node.
    """

    def __init__(self, context: DecodeContext, outputs: Sequence[SampleOutput]) -> None:
        """``outputs`` have been fed with the journal's records."""
        self._link = context.link
        self._has_said_leaving = False
        self._num_recorded = Counter({output.index: len(output.token_ids) for output in outputs})
        """Number of output tokens that records have, by sample."""
        self._logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        """Logprobs of tokens that are not recorded yet, by sample."""

    def write(self, output: SampleOutput, delta: Delta, events: bytes) -> bytes:
        """Return the unit of ``delta``. Without ``events`` there is none, and the next unit's record includes
        the tokens of ``delta``."""
        if delta.logprobs:
            self._logprobs[output.index] += delta.logprobs
        if not events:
            return b""
        line = journal_line(msgspec.json.encode(self._record(output, delta)))
        if self._link.is_leaving and not self._has_said_leaving:
            self._has_said_leaving = True
            line += journal_line(LEAVING)
        return events + line

    def _record(self, output: SampleOutput, delta: Delta) -> object:
        """Return a ``JournalRecord``, or a list of its fields up to the last one that is needed."""
        index = output.index
        if delta.scored:
            return JournalRecord(index, (), num_scored=len(delta.scored))
        record: list[object] = [index, output.token_ids[self._num_recorded[index] : delta.last_token]]
        self._num_recorded[index] = delta.last_token  # the end of the delta's half-open range of tokens
        if delta.finish is not None or delta.logprobs:
            record.append(self._logprobs.pop(index, ()))
        if (finish := delta.finish) is not None:
            matched = finish.matched if isinstance(finish.matched, int) else None
            record += [finish.reason, matched, output.stats]
        return record


_DIALECTS: Mapping[Endpoint, type[Dialect]] = {
    Endpoint.COMPLETIONS: CompletionsDialect,
    Endpoint.CHAT: ChatDialect,
    Endpoint.GENERATE: GenerateDialect,
    Endpoint.MESSAGES: MessagesDialect,
    Endpoint.RESPONSES: ResponsesDialect,
}


def _prepare(context: DecodeContext, work: Work) -> tuple[list[SampleOutput], Dialect]:
    """Return the outputs of the samples, and the dialect that writes them."""
    token_bytes = context.codec.token_bytes
    outputs = [SampleOutput(index, sample, token_bytes) for index, sample in enumerate(work.samples)]
    return outputs, _DIALECTS[work.request.endpoint](context, work)
