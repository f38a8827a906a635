"""Shared pieces of reading conversations: messages, the assistant's turns, results of tools, and tools.

The readers of each API (``openai_chat.py``, ``anthropic_messages.py``, ``openai_responses.py``) call them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from msgspec import Raw

from hisparse_pd.protocol.decoding import NestedTooDeeply, decode_json
from hisparse_pd.serving.api.anthropic_parts import ResultBlock, ToolReference
from hisparse_pd.serving.api.bodies import TemplateFields
from hisparse_pd.serving.api.body_parts import (
    HOSTED_TOOL,
    MAX_MESSAGES,
    MAX_TOOLS,
    ItemKind,
    Refusal,
    TextBlock,
)
from hisparse_pd.serving.api.declared import tag_of
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.prompts import LeftOutTool
from hisparse_pd.serving.api.raw_json import check_size, decode_item, split
from hisparse_pd.serving.api.responses_parts import InputText, OutputPart, OutputText
from hisparse_pd.serving.http.http_errors import InvalidField
from hisparse_pd.serving.http.off_loop import taking_interpreter

_TEMPLATE_ARGUMENTS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""Arguments of ``apply_chat_template`` itself, which clients may not set."""


Item: TypeAlias = tuple[str, Raw]
"""The path of a message or a tool in the request, for errors, and its JSON."""


def message_items(field: str, value: Raw | None) -> list[Item]:
    """Split a list of messages. Raises ApiError 400."""
    items = [] if value is None else split(field, value, MAX_MESSAGES)
    if not items:
        raise InvalidField(field, None if value is None else [], "must be a list with at least one message")
    return [(f"{field}[{index}]", item) for index, item in enumerate(items)]


def may_call_tools(tool_choice: Raw | None) -> bool:
    return tool_choice is None or decode_item("tool_choice", tool_choice) != "none"


def template_arguments(body: TemplateFields, effort: str | None) -> dict[str, object]:
    """Return the template's arguments that the client sets. ``effort``: the effort that it asks for in
    another field; ``reasoning_effort`` among the arguments has precedence."""
    arguments = body.chat_template_kwargs or {}
    if reserved := sorted(_TEMPLATE_ARGUMENTS & arguments.keys()):
        raise InvalidField("chat_template_kwargs", arguments, f"must not set {', '.join(reserved)}")
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
    return arguments


def tool_items(field: str, value: Raw | None) -> list[Item]:
    """Split a list of tools' descriptions. Raises ApiError 400."""
    if value is None:
        return []
    check_size(field, value)
    return [(f"{field}[{index}]", item) for index, item in enumerate(split(field, value, MAX_TOOLS))]


_hosted = re.compile(HOSTED_TOOL)


def without_hosted(items: list[Item]) -> tuple[list[Item], tuple[LeftOutTool, ...]]:
    """Return the tools without those that a server of the API's vendor runs, and the latter."""
    usable: list[Item] = []
    hosted: list[LeftOutTool] = []
    for name, item in items:
        kind = decode(ItemKind, item, name).type
        if kind is not None and _hosted.match(kind):
            hosted.append(LeftOutTool(name, kind))
        else:
            usable.append((name, item))
    return usable, tuple(hosted)


def refuse_hosted_alone(hosted: Sequence[LeftOutTool], *, are_alone: bool) -> None:
    """Raises InvalidField for hosted tools if they ``are_alone``, without other tools: such a request needs
    them."""
    if hosted and are_alone:
        rule = "is not supported: no server runs it here; it is left out only where there are other tools"
        raise InvalidField(f"{hosted[0].place}.type", hosted[0].kind, rule)


_DATA_NAMES = {"image": "image", "document": "pdf", "input_image": "image", "input_file": "file"}
"""Words for the data of a part that is no text, in an error, by the part's type."""


def text_of_part(name: str, part: ResultBlock | OutputPart, *, is_answered: bool) -> str:
    """Return the text that the model is shown for a part of a result or of a user's message.

    A part that is not text is shown as its kind, such as ``[image]``, where a later message of the assistant
    has answered it (``is_answered``): the new answer is not about it. Otherwise InvalidField is raised. Of a
    tool's reference, the name is shown.
    """
    match part:
        case TextBlock() | InputText():
            return part.text
        case ToolReference():
            return f"[{part.tool_name}]"
    kind = tag_of(part)
    if not is_answered:
        # Agents recognise "could not process image", take the part out and go on.
        rule = f"is not supported: could not process {_DATA_NAMES[kind]} data, the model reads text"
        raise InvalidField(f"{name}.type", kind, rule)
    return f"[{kind.removeprefix('input_')}]"


def result_message(
    name: str,
    content: str | Sequence[ResultBlock | OutputPart] | None,
    call_id: str,
    *,
    is_answered: bool,
) -> dict[str, object]:
    """Return the message with a call's result. ``name`` is the path of ``content``, which may be None."""
    content = content or ""
    if not isinstance(content, str):
        content = "".join(
            text_of_part(f"{name}[{index}]", part, is_answered=is_answered)
            for index, part in enumerate(content)
        )
    return {"role": "tool", "content": content, "tool_call_id": call_id}


@dataclass
class Turn:
    """The assistant's words, reasoning and calls up to the next message of another role: one message of
    the chat. A caller that collects the parts of a user's message in it replaces the role."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, object]] = field(default_factory=list)

    def call(self, name: str, arguments: object, call_id: str | None) -> None:
        shown: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        self.calls.append(shown if call_id is None else shown | {"id": call_id})

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.reasoning or self.calls)

    def message(self) -> dict[str, object]:
        shown: dict[str, object] = {"role": "assistant", "content": "".join(self.texts)}
        if self.calls:
            shown["tool_calls"] = self.calls
        if self.reasoning:
            shown["reasoning_content"] = "".join(self.reasoning)
        return shown


def joined_text(
    content: str | Sequence[TextBlock | InputText | OutputText | Refusal] | None,
) -> str:
    """Return the text of a message's content; "" for None."""
    if isinstance(content, str):
        return content
    texts = (part.refusal if isinstance(part, Refusal) else part.text for part in content or ())
    return "".join(texts)


def written_arguments(name: str, text: str | None) -> dict[str, object] | str:
    """Return an earlier call's arguments as an object, or as text where the model wrote no JSON object."""
    text = text or "{}"
    if not text.lstrip(" \t\r\n").startswith("{"):
        return text
    try:
        with taking_interpreter(len(text)):  # decoding long texts must not starve the event loop
            arguments: dict[str, object] = decode_json(text)
    except NestedTooDeeply as error:
        raise InvalidField(name, text, f"is not usable: {error}") from error
    except msgspec.DecodeError:
        return text
    return arguments
