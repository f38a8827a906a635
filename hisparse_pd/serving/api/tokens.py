"""Answers ``/tokenize``, ``/detokenize`` and Anthropic's count of tokens, which need no engine.

``app.py`` calls ``answer_about_tokens``. A prompt is encoded like one that is served, within the same limits.
Long ones are done in pieces, in a thread.
"""

from __future__ import annotations

from typing import NamedTuple

from hisparse_pd.engine.messages import num_packed_tokens
from hisparse_pd.serving.api.anthropic_messages import parse_messages
from hisparse_pd.serving.api.bodies import CountTokensBody, DetokenizeBody, TokenizeBody, TokenPath
from hisparse_pd.serving.api.declared_decoding import decode_body
from hisparse_pd.serving.api.frame import HttpAnswer
from hisparse_pd.serving.api.openai_chat import parse_chat_prompt
from hisparse_pd.serving.api.plain_prompts import parse_text, parse_token_ids
from hisparse_pd.serving.api.prompts import ChatPrompt, Prompt
from hisparse_pd.serving.api.schemas import check_model
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.api.token_lists import json_list
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused
from hisparse_pd.serving.http.off_loop import parse_body


async def answer_about_tokens(
    path: TokenPath, body: bytes, model_name: str, codec: TextCodec, context_length: int
) -> HttpAnswer:
    """Answer a request to ``path``. Raises ApiError 400 and 404."""
    match path:
        case TokenPath.TOKENIZE:
            # ``parse_body`` looks at the first body's size; the second one is an argument of the parser.
            asked = await parse_body(body, _parse_tokenize, body, model_name)
            name = "prompt" if isinstance(asked.prompt, str) else "messages"
            (packed,) = await codec.encode(
                [asked.prompt], [name], context_length, add_special=asked.add_special
            )
            token_strs = await json_list(packed, codec.token_strings) if asked.with_strings else None
            return HttpAnswer.json(
                {
                    "count": num_packed_tokens(packed),
                    "max_model_len": context_length,
                    "tokens": await json_list(packed),
                    "token_strs": token_strs,
                }
            )
        case TokenPath.DETOKENIZE:
            packed = await parse_body(body, _parse_detokenize, body, model_name, codec, context_length)
            return HttpAnswer.json({"prompt": await codec.text_of(packed)})
        case TokenPath.COUNT_TOKENS:
            chat = await parse_body(body, _parse_messages, body, model_name)
            (packed,) = await codec.encode([chat], ["messages"], context_length)
            return HttpAnswer.json({"input_tokens": num_packed_tokens(packed)})


class _Tokenize(NamedTuple):
    prompt: Prompt
    add_special: bool
    with_strings: bool
    """Whether the answer shows the tokens' spellings, too."""


def _parse_tokenize(content: bytes, model_name: str) -> _Tokenize:
    body = decode_body(TokenizeBody, content)
    check_model(body, model_name)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
    is_text = body.prompt is not None
    prompt: Prompt
    if body.prompt is not None:
        prompt = parse_text("prompt", body.prompt)
    else:
        prompt = parse_chat_prompt(body, is_to_be_answered=False)
    add_special = is_text if body.add_special_tokens is None else body.add_special_tokens
    return _Tokenize(prompt, add_special, bool(body.return_token_strs))


def _parse_messages(content: bytes, model_name: str) -> ChatPrompt:
    body = decode_body(CountTokensBody, content)
    check_model(body, model_name)
    return parse_messages(body)


def _parse_detokenize(content: bytes, model_name: str, codec: TextCodec, context_length: int) -> bytes:
    body = decode_body(DetokenizeBody, content)
    check_model(body, model_name)
    packed = parse_token_ids("tokens", body.tokens)
    if (num_tokens := num_packed_tokens(packed)) > context_length:
        raise FieldRefused(
            "tokens", f"there are {num_tokens}; a context has {context_length}: split the request"
        )
    codec.check_ids(packed, "tokens")
    return packed
