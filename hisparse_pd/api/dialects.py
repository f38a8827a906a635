"""Which dialect answers a request: one for each endpoint."""

from __future__ import annotations

from typing import assert_never

from hisparse_pd.api.answers import Chat, Completions, Dialect, Generate
from hisparse_pd.api.anthropic_answers import Messages
from hisparse_pd.api.app import Work
from hisparse_pd.api.responses_answers import Responses
from hisparse_pd.api.schemas import Endpoint
from hisparse_pd.api.text_codec import TextCodec
from hisparse_pd.api.tool_markup import MARKUPS


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
