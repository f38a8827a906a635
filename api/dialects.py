"""Which dialect answers a request: one for each endpoint."""

from __future__ import annotations

from typing import assert_never

from api.answers import Chat, Completions, Dialect, Generate
from api.anthropic_answers import Messages
from api.app import Work
from api.responses_answers import Responses
from api.schemas import Endpoint
from api.text_codec import TextCodec
from api.tool_markup import MARKUPS


def dialect_of(work: Work, model_name: str, codec: TextCodec) -> Dialect:
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
