"""Turns a conversation of Anthropic's ``/v1/messages`` into that of a chat completion.

``schemas.py`` calls ``parse_messages``, and ``tokens.py`` to count tokens. Blocks become what chat templates
take: text, reasoning, calls and results of tools. Texts of one message are joined without a separator, as in
the other APIs. A template takes no images or documents: one in a tool's result to which the assistant has
already replied is shown as its kind, such as ``[image]``; any other one is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence

from msgspec import Raw

from hisparse_pd.serving.api import anthropic_parts as parts
from hisparse_pd.serving.api.bodies import AnthropicConversation
from hisparse_pd.serving.api.conversations import (
    Turn,
    message_items,
    refuse_hosted_alone,
    result_message,
    template_arguments,
    text_of_part,
    tool_items,
    without_hosted,
)
from hisparse_pd.serving.api.declared import tag_of
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.prompts import ChatPrompt, limit_values
from hisparse_pd.serving.api.raw_json import decode_item
from hisparse_pd.serving.http.http_errors import InvalidField

Message = dict[str, object]


def parse_messages(body: AnthropicConversation) -> ChatPrompt:
    """Read the conversation of ``body``. Raises ApiError 400."""
    items = message_items("messages", body.messages)
    messages = (*_system_message(body), *_conversation(items, body.context_management))
    is_continued = messages[-1]["role"] == "assistant"
    if is_continued and "tool_calls" in messages[-1]:
        rule = "must not end with a tool_use, but with its tool_result"
        raise InvalidField("messages", items, rule)
    may_call = body.tool_choice is None or body.tool_choice.type != "none"
    # Tools that Anthropic's servers would run are left out beside others, and refused alone.
    usable, left_out = without_hosted(tool_items("tools", body.tools))
    refuse_hosted_alone(left_out, are_alone=not usable)
    tools = tuple(_tool(name, item) for name, item in usable)
    return ChatPrompt(
        messages,
        _template_arguments(body),
        continue_final_message=is_continued,
        tools=tools if may_call else (),
        separate_reasoning=True,
        add_generation_prompt=not is_continued,
        left_out=left_out,
    )


def _system_message(body: AnthropicConversation) -> Iterator[Message]:
    if (system := body.system) is not None:
        text = system if isinstance(system, str) else "".join(block.text for block in system)
        yield {"role": "system", "content": text}


def _conversation(
    items: Sequence[tuple[str, Raw]], asked: parts.ContextManagement | None
) -> Iterator[Message]:
    """Yield the chat messages of all ``items``, each a message with its name. ``asked``: see
    ``_first_thinking``."""
    decoded = list(limit_values(decode(parts.AnthropicMessage, item, name) for name, item in items))
    last_answer = max(
        (i for i, each in enumerate(decoded) if isinstance(each, parts.AssistantMessage)), default=0
    )
    first_thinking = _first_thinking(decoded, asked)
    for index, ((name, _), message) in enumerate(zip(items, decoded, strict=True)):
        is_answered, keeps_thinking = index < last_answer, index >= first_thinking
        yield from _messages_of(name, message, is_answered=is_answered, keeps_thinking=keeps_thinking)


def _first_thinking(items: Sequence[parts.AnthropicMessage], asked: parts.ContextManagement | None) -> int:
    """Return the index of the first message whose thinking is kept.

    A turn is the assistant's whole answer to a user's message, with all calls of tools and their results: it
    begins behind a user's message without a tool's result. The last turns keep their thinking, as many as the
    strictest of the edits in ``asked`` says; without edits, all keep it.

    Example: one turn is to keep it, and the messages are user, assistant, user, assistant (with a call), user
    (with its result), assistant. The last turn begins behind the second user's message, so the result is 2.
    """
    kept = [_num_turns(edit.keep) for edit in (asked.edits or () if asked is not None else ())]
    num_turns = min((num for num in kept if num is not None), default=None)
    if num_turns is None:
        return 0
    is_in_turn = False
    for index in range(len(items) - 1, -1, -1):
        match items[index]:
            case parts.AssistantMessage() if not is_in_turn:
                if num_turns == 0:
                    return index + 1
                num_turns, is_in_turn = num_turns - 1, True
            case parts.UserMessage(content=content) if not any(
                isinstance(block, parts.ToolResult) for block in content
            ):
                is_in_turn = False
    return 0


def _num_turns(keep: str | parts.KeptThinking | None) -> int | None:
    """Return how many turns keep their thinking; None for all."""
    if keep is None:
        return 1  # what Anthropic's API does
    if isinstance(keep, str) or keep.type == "all":
        return None
    if keep.value is None:
        raise InvalidField("context_management.edits.keep.value", None, "must be a number of turns")
    return keep.value


def _messages_of(
    name: str, message: parts.AnthropicMessage, *, is_answered: bool, keeps_thinking: bool
) -> Iterator[Message]:
    """Yield the chat messages of one message: results of tools are messages of their own.

    ``is_answered``: whether a later message is the assistant's. An image or a document in a tool's result is
    then shown as its kind, since the new answer is not about it. Otherwise, and always outside of results, it
    is refused. ``keeps_thinking``: whether the model is shown the message's thinking.
    """
    role: Message = {"role": tag_of(message)}
    if isinstance(message.content, str):
        yield role | {"content": message.content}
        return
    turn, has_results = Turn(), False  # for a user's words, too: ``| role`` replaces the role in its message
    for index, block in enumerate(message.content or ()):
        place = f"{name}.content[{index}]"
        match block:
            case parts.ThinkingBlock():
                if keeps_thinking:
                    turn.reasoning.append(block.thinking or thinking_of(block.signature))
            case parts.RedactedThinking():
                pass
            case parts.ToolUse():
                turn.call(block.name, block.input, block.id)
            case parts.ToolResult():
                if turn.texts:
                    yield turn.message() | role  # the user's words before the result
                    turn = Turn()
                has_results, call_id = True, block.tool_use_id
                yield result_message(f"{place}.content", block.content, call_id, is_answered=is_answered)
            case _:
                turn.texts.append(text_of_part(place, block, is_answered=False))
    if not turn.is_empty or not has_results:
        yield turn.message() | role


def _tool(name: str, item: Raw) -> Message:
    decode(parts.AnthropicTool, item, name)  # a check only: numbers of the schema are kept as spelled
    tool = decode_item(name, item, as_spelled=True)
    function = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _template_arguments(body: AnthropicConversation) -> dict[str, object]:
    """Return the template's arguments. ``thinking`` switches thinking in DeepSeek's templates, and
    ``enable_thinking`` in GLM's; where the client sets one itself, that value stays."""
    arguments = template_arguments(body, body.output_config.effort if body.output_config else None)
    if body.thinking is not None:
        for switch in ("thinking", "enable_thinking"):
            arguments.setdefault(switch, body.thinking.type != "disabled")
    return arguments


# --- thinking that a client does not want to see ------------------------------------------------------

_MARK = "hisparse-pd:"


def signature_of(thinking: str) -> str:
    """Return the signature of a block whose thinking is omitted: the thinking itself, in base64.

    Clients send it back, and the model sees it again. It is no secret from those who may read the answer.
    """
    return _MARK + base64.b64encode(thinking.encode()).decode()


def thinking_of(signature: str | None) -> str:
    """Return the thinking in a signature; "" for another service's signature."""
    if signature is None or not signature.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
