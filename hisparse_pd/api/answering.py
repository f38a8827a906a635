"""One HTTP answer from the output of its samples, whole or streamed, in the dialect of its endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import assert_never

import msgspec
from msgspec import Raw

from hisparse_pd.api.answers import Chat, Completions, Dialect, Generate
from hisparse_pd.api.anthropic_answers import Messages
from hisparse_pd.api.app import Front, Work
from hisparse_pd.api.chat_format import MARKUPS
from hisparse_pd.api.output import Delta, SampleOutput
from hisparse_pd.api.responses_answers import Responses
from hisparse_pd.api.schemas import Endpoint
from hisparse_pd.http.http_errors import RequestFailedError

Deltas = Callable[[Sequence[SampleOutput]], AsyncGenerator[Delta, None]]
"""Feeds the outputs, and yields what is new until all have finished. Raises RequestFailedError."""


async def whole_body(front: Front, work: Work, deltas_of: Deltas) -> bytes:
    """JSON."""
    outputs, dialect = _outputs(front, work), _dialect(front, work)
    choices: dict[int, Raw] = {}
    async with aclosing(deltas_of(outputs)) as deltas:
        async for delta in deltas:
            dialect.keep(outputs[delta.index], delta)
            if delta.finish is not None:
                choices[delta.index] = dialect.choice(outputs[delta.index])
    return msgspec.json.encode(dialect.whole(outputs, [choices[output.index] for output in outputs]))


async def streamed(front: Front, work: Work, deltas_of: Deltas) -> AsyncGenerator[bytes, None]:
    """Server-sent events."""
    outputs, dialect = _outputs(front, work), _dialect(front, work)
    try:
        async with aclosing(deltas_of(outputs)) as deltas:
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


def _dialect(front: Front, work: Work) -> Dialect:
    codec, model_name = front.codec, front.settings.model_name
    markup = None if codec.tool_markup is None else MARKUPS[codec.tool_markup]
    match work.request.endpoint:
        case Endpoint.COMPLETIONS:
            return Completions(work, model_name, codec.token_bytes)
        case Endpoint.CHAT:
            return Chat(work, model_name, codec.token_bytes, markup)
        case Endpoint.GENERATE:
            return Generate(work, codec.token_bytes)
        case Endpoint.MESSAGES:
            return Messages(work, model_name, codec.token_bytes, markup)
        case Endpoint.RESPONSES:
            return Responses(work, model_name, codec.token_bytes, markup)
        case endpoint:
            assert_never(endpoint)
