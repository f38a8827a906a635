"""Reads the conversation of OpenAI's chat completions into the form that chat templates take.

``schemas.py`` calls ``parse_chat_prompt`` for a chat that is answered, ``tokens.py`` for one to tokenize.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from hisparse_pd.serving.api import body_parts as parts
from hisparse_pd.serving.api import openai_parts
from hisparse_pd.serving.api.bodies import Conversation
from hisparse_pd.serving.api.conversations import (
    Turn,
    joined_text,
    may_call_tools,
    message_items,
    template_arguments,
    tool_items,
    written_arguments,
)
from hisparse_pd.serving.api.declared import NOT_SUPPORTED
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.prompts import ChatPrompt, limit_values
from hisparse_pd.serving.api.raw_json import decode_item
from hisparse_pd.serving.http.http_errors import InvalidField

_DESCRIBING_ROLES = ("system", "developer")
"""Roles whose messages may describe tools of their own."""
_MAY_BE_EMPTY = ("assistant", "tool")
"""Roles whose messages may lack content: agents send back empty turns and results."""


def parse_chat_prompt(body: Conversation, *, is_to_be_answered: bool = True) -> ChatPrompt:
    """Read the conversation of ``body``. Raises ApiError 400.

    ``is_to_be_answered``: whether the conversation has to end where an answer begins.
    """
    may_call = may_call_tools(body.tool_choice)
    items = message_items("messages", body.messages)
    # Messages are decoded one by one, and no further ones once they have too many JSON values.
    messages = tuple(limit_values(_chat_message(name, item, may_call) for name, item in items))
    arguments = template_arguments(body, body.reasoning_effort)
    continue_final = bool(body.continue_final_message)
    if continue_final and messages[-1]["role"] != "assistant":
        raise InvalidField("continue_final_message", True, "needs a last message of the assistant")
    if continue_final and body.add_generation_prompt:
        raise InvalidField("add_generation_prompt", True, "excludes continue_final_message")
    if is_to_be_answered and not continue_final and body.add_generation_prompt is False:
        raise InvalidField("add_generation_prompt", False, NOT_SUPPORTED)
    tools = described_tools("tools", body.tools)
    return ChatPrompt(
        messages,
        template_arguments=arguments,
        continue_final_message=continue_final,
        tools=tuple(tools) if may_call else (),
        separate_reasoning=body.separate_reasoning is not False,
        add_generation_prompt=not (continue_final or body.add_generation_prompt is False),
    )


def described_tools(field: str, value: Raw | None) -> list[dict[str, Any]]:
    """Return the descriptions of a chat's tools, checked, as the client wrote them. Raises ApiError 400."""
    items = tool_items(field, value)
    for name, item in items:
        decode(openai_parts.Tool, item, name)
    return [decode_item(name, item, as_spelled=True) for name, item in items]


def _chat_message(name: str, item: Raw, may_call: bool) -> dict[str, object]:
    """Check one message and return it as the chat template takes it."""
    message = decode(openai_parts.ChatMessage, item, name)
    if message.tool_calls and message.role != "assistant":
        calls = msgspec.to_builtins(message.tool_calls)
        raise InvalidField(f"{name}.tool_calls", calls, "belong to a message of the assistant")
    if message.content is None and message.role not in _MAY_BE_EMPTY:
        raise InvalidField(f"{name}.content", None, "must be a string or a list of text parts")
    text = joined_text(message.content)
    if message.role == "assistant":
        text += message.refusal or ""
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        turn = Turn([text], [] if reasoning is None else [reasoning])
        for index, call in enumerate(message.tool_calls or ()):
            path, function = f"{name}.tool_calls[{index}].function.arguments", call.function
            turn.call(function.name, written_arguments(path, function.arguments), call.id)
        return turn.message()
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, parts.Refusal):
            rule = 'must be "text": a refusal is the assistant\'s'
            raise InvalidField(f"{name}.content[{index}].type", "refusal", rule)
    shown: dict[str, object] = {"role": message.role, "content": text}
    if message.role == "tool" and message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.role in _DESCRIBING_ROLES:
        tools = described_tools(f"{name}.tools", message.tools)
        if tools and may_call:
            shown["tools"] = tools
    return shown
