"""The prompts of a request: text, token ids, or a conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.decoding import NestedTooDeeply, decode_json
from hisparse_pd.serving.api import body_parts as parts
from hisparse_pd.serving.api.bodies import Conversation, GenerateBody, Templated
from hisparse_pd.serving.api.declared import NOT_SUPPORTED, tag_of
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.declared_errors import Complaint
from hisparse_pd.serving.api.raw_json import check_size, decode_item, first_chars, split
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField
from hisparse_pd.serving.http.off_loop import taking_interpreter

_DESCRIBING_ROLES = ("system", "developer")
_MAY_BE_EMPTY = ("assistant", "tool")
"""Agents send back turns and results in which nothing was said, on every API."""

_TEMPLATE_ARGUMENTS = {  # of apply_chat_template itself: not the client's to set
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


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool as the client of ``/v1/responses`` calls it. ``is_custom``: it takes a text, no arguments."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class LeftOutTool(NamedTuple):
    """A tool that a server of the API's vendor runs. ``place``: as errors call it."""

    place: str
    kind: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template.

    ``tools``: those that the model may call, as the client describes them; () also where it may call none.
    A system's or developer's message may bring tools of its own: ``tools`` of the message.
    ``separate_reasoning``: show the answer's reasoning beside its content, and not as the beginning of it.
    ``add_generation_prompt``: end with what begins an answer, unless the last message is continued.
    ``called_tools``: what clients call ``tools``, by the functions' names, where that is something else.
    ``left_out``: tools of which the model is not told, as the request has them.

    Raises ApiError 400 for more than MAX_VALUES.
    """

    messages: tuple[dict[str, object], ...]
    template_arguments: dict[str, object]
    continue_final_message: bool
    tools: tuple[dict[str, object], ...]
    separate_reasoning: bool
    add_generation_prompt: bool = True
    called_tools: Mapping[str, CalledTool] = field(default_factory=dict)
    left_out: tuple[LeftOutTool, ...] = ()
    num_chars: int = field(init=False)
    """Of all that a template may write of it, and some more for what each value costs it."""

    def __post_init__(self) -> None:
        num_chars = _num_chars(self.messages, self.tools, self.template_arguments)
        object.__setattr__(self, "num_chars", num_chars)

    @property
    def all_tools(self) -> list[dict[str, object]]:
        """Those of messages too."""
        found = list(self.tools)
        for message in self.messages:
            tools = message.get("tools")
            found += tools if isinstance(tools, list) else ()
        return found


MAX_VALUES = 1 << 19
"""JSON values of a conversation, each name, string, number, list and object: the garbage of more than these
is let go in a tenth of a second, in which nobody else is served."""

_CHARS_A_VALUE = 16
"""That could be encoded in the time in which a template writes a value without its text."""


T = TypeVar("T")


def within_values(messages: Iterable[T]) -> Iterator[T]:
    """``messages`` as they come. Raises ApiError 400 at the first one with which they have too many values,
    so that the others are not even read."""
    num_values = 0
    for message in messages:
        num_values += _num_values_and_chars(message)[0]
        _check_values(num_values)
        yield message


def _num_chars(*values: object) -> int:
    """Raises ApiError 400 for more than MAX_VALUES."""
    num_values, num_chars = _num_values_and_chars(*values)
    _check_values(num_values)
    return num_chars + _CHARS_A_VALUE * num_values


def _num_values_and_chars(*values: object) -> tuple[int, int]:
    """Of more than MAX_VALUES, no more are counted."""
    num_chars = num_values = 0
    open_values = list(values)
    while open_values and num_values <= MAX_VALUES:
        value = open_values.pop()
        num_values += 1
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, dict):
            open_values += value.keys()
            open_values += value.values()
        elif isinstance(value, list | tuple):
            open_values += value
        elif isinstance(value, msgspec.Struct):
            open_values += msgspec.structs.astuple(value)
    return num_values, num_chars


def _check_values(num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise ApiError(
            400,
            f"messages, tools: have more than {MAX_VALUES} JSON values with the arguments of calls, the "
            "most for a request: shorten the history",
            param="messages",
        )


Prompt = str | bytes | ChatPrompt
"""Text, token ids as of ``pack_token_ids``, or a conversation."""

_IDS_BYTES = 128 << 10
"""Of a list of token ids, decoded at a time: 5 ms, in which no other thread runs."""

_ids_decoder = msgspec.json.Decoder(list[parts.TokenId])


def generate_prompt(body: GenerateBody) -> tuple[str, Raw]:
    """The field of ``/generate`` that has the prompts, and its value."""
    given = [(name, value) for name in ("text", "input_ids") if (value := getattr(body, name)) is not None]
    if len(given) != 1:
        raise ApiError(400, "exactly one of text and input_ids is needed", param="text")
    return given[0]


def parse_prompts(field: str, value: Raw | None) -> tuple[bool, tuple[Prompt, ...]]:
    """``(the field is a list of prompts, prompts)``. A list of integers is one prompt."""
    takes_text, takes_ids = field != "input_ids", field != "text"
    shapes = ["a string", "a list of strings"] * takes_text + [
        "a list of token ids",
        "a list of such lists",
    ] * takes_ids
    if value is None:
        raise FieldRefused(field, "the field is needed", code="missing_field")
    match first_chars(value):
        case b'"', _ if takes_text:
            return False, (_text(field, value),)
        case b"[", b"]":
            raise InvalidField(field, [], "must not be empty")
        case b"[", first if takes_ids and first in _INTEGER_BEGINS:
            return False, (_packed_ids(field, value),)
        case b"[", (b'"' | b"[") as first if takes_text if first == b'"' else takes_ids:
            parse = _text if first == b'"' else _packed_ids
            items = split(field, value, parts.MAX_PROMPTS)
            return True, tuple(parse(f"{field}[{index}]", item) for index, item in enumerate(items))
        case _:
            raise InvalidField(field, decode_item(field, value), f"must be {' or '.join(shapes)}")


_INTEGER_BEGINS = tuple(bytes((char,)) for char in b"-0123456789tf")
"""Of an integer, and of true and false, which an error shall call no integer."""


def _text(name: str, value: Raw) -> str:
    text = decode_item(name, value)
    if not isinstance(text, str):
        raise InvalidField(name, text, "must be a string as the first prompt is")
    if not text:
        raise InvalidField(name, text, "must not be empty")
    return text


def parse_text(field: str, value: Raw) -> str:
    """A string of any length that is not empty."""
    if first_chars(value)[0] != b'"':
        raise InvalidField(field, decode_item(field, value), "must be a string")
    return _text(field, value)


def parse_token_ids(field: str, value: Raw | None) -> bytes:
    """A list of token ids, which may be empty, as of ``pack_token_ids``."""
    if value is None:
        raise FieldRefused(field, "the field is needed", code="missing_field")
    match first_chars(value):
        case b"[", b"]":
            return b""
        case b"[", _:
            return _packed_ids(field, value)
        case _:
            raise InvalidField(field, decode_item(field, value), "must be a list of token ids")


def _packed_ids(name: str, value: Raw) -> bytes:
    """Checked in bulk, for each id is an object, and piece by piece, so that others get their turns."""
    first, second = first_chars(value)
    if first != b"[":
        rule = "must be a list of token ids as the first prompt is"
        raise InvalidField(name, decode_item(name, value), rule)
    if second == b"]":
        raise InvalidField(name, [], "must not be empty")
    text = bytes(value)
    pieces: list[bytes] = []
    num_ids, start, end = 0, 1, len(text) - 1
    while start < end:
        stop = text.find(b",", start + _IDS_BYTES, end)
        stop = end if stop < 0 else stop
        piece = b"[" + text[start:stop] + b"]"
        try:
            token_ids = _ids_decoder.decode(piece)
        except msgspec.MsgspecError as error:
            raise _no_token_id(name, piece, num_ids, error) from error
        pieces.append(pack_token_ids(token_ids))
        num_ids += len(token_ids)
        start = stop + 1
    return b"".join(pieces)


def _no_token_id(name: str, piece: bytes, first_index: int, error: msgspec.MsgspecError) -> ApiError:
    if isinstance(error, msgspec.ValidationError):
        with suppress(msgspec.MsgspecError):  # cut within an entry that is a list or a string
            index = int(Complaint.of(error).steps[0])
            path, value = f"{name}[{first_index + index}]", msgspec.json.decode(piece)[index]
            return InvalidField(path, value, f"must be a token id, an integer from 0 to {parts.MAX_TOKEN_ID}")
    return FieldRefused(name, "must have nothing but token ids")


def parse_chat_prompt(body: Conversation, *, is_to_be_answered: bool = True) -> ChatPrompt:
    """``is_to_be_answered``: it ends where an answer begins."""
    may_call = may_call_tools(body.tool_choice)
    items = message_items("messages", body.messages)
    messages = tuple(within_values(_chat_message(name, item, may_call) for name, item in items))
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
        arguments,
        continue_final,
        tuple(tools) if may_call else (),
        separate_reasoning=body.separate_reasoning is not False,
        add_generation_prompt=not (continue_final or body.add_generation_prompt is False),
    )


def message_items(field: str, value: Raw | None) -> list[tuple[str, Raw]]:
    """Each by the name that errors call it."""
    items = [] if value is None else split(field, value, parts.MAX_MESSAGES)
    if not items:
        raise InvalidField(field, None if value is None else [], "must be a list with at least one message")
    return [(f"{field}[{index}]", item) for index, item in enumerate(items)]


def may_call_tools(tool_choice: Raw | None) -> bool:
    return tool_choice is None or decode_item("tool_choice", tool_choice) != "none"


def template_arguments(body: Templated, effort: str | None) -> dict[str, object]:
    """What the client sets of the model's template. ``effort``: what else the request says of it."""
    arguments = body.chat_template_kwargs or {}
    if reserved := sorted(_TEMPLATE_ARGUMENTS & arguments.keys()):
        raise InvalidField("chat_template_kwargs", arguments, f"must not set {', '.join(reserved)}")
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
    return arguments


def described_tools(field: str, value: Raw | None) -> list[dict[str, Any]]:
    """Descriptions of a chat's tools as the client wrote them."""
    items = tool_items(field, value)
    for name, item in items:
        decode(parts.Tool, item, name)
    return [decode_item(name, item, as_spelled=True) for name, item in items]


def tool_items(field: str, value: Raw | None) -> list[tuple[str, Raw]]:
    """Descriptions of tools, each by the name that errors call it."""
    if value is None:
        return []
    check_size(field, value)
    return [(f"{field}[{index}]", item) for index, item in enumerate(split(field, value, parts.MAX_TOOLS))]


_hosted = re.compile(parts.HOSTED_TOOL)


def without_hosted(items: list[tuple[str, Raw]]) -> tuple[list[tuple[str, Raw]], tuple[LeftOutTool, ...]]:
    """The tools without those that a server of the API's vendor runs, and these."""
    usable: list[tuple[str, Raw]] = []
    hosted: list[LeftOutTool] = []
    for name, item in items:
        kind = decode(parts.ItemKind, item, name).type
        if kind is not None and _hosted.match(kind):
            hosted.append(LeftOutTool(name, kind))
        else:
            usable.append((name, item))
    return usable, tuple(hosted)


def refuse_hosted_alone(hosted: Sequence[LeftOutTool], *, are_alone: bool) -> None:
    """Raises InvalidField where no other tool is there: then they are what the request is about."""
    if hosted and are_alone:
        rule = "is not supported: no server runs it here; it is left out only where there are other tools"
        raise InvalidField(f"{hosted[0].place}.type", hosted[0].kind, rule)


_PICTURES = {"image": "image", "document": "pdf", "input_image": "image", "input_file": "file"}
"""What errors call the types of parts that are not text."""


def text_of_part(name: str, part: parts.ResultBlock | parts.OutputPart, *, is_answered: bool) -> str:
    """What the model is shown of a part of a result or of a user's message.

    Raises InvalidField for one that it cannot see, unless the assistant has gone on since (``is_answered``):
    the answer is not about this part then, and its kind is shown.
    """
    match part:
        case parts.TextBlock() | parts.InputText():
            return part.text
        case parts.ToolReference():
            return f"[{part.tool_name}]"
    kind = tag_of(part)
    if not is_answered:
        # Agents know this by "could not process image", take the part out and go on.
        rule = f"is not supported: could not process {_PICTURES[kind]} data, the model reads text"
        raise InvalidField(f"{name}.type", kind, rule)
    return f"[{kind.removeprefix('input_')}]"


def result_message(
    name: str,
    content: str | Sequence[parts.ResultBlock | parts.OutputPart] | None,
    call_id: str,
    *,
    is_answered: bool,
) -> dict[str, object]:
    """The result of a call. ``name``: of ``content``, as errors call it; None: an empty one."""
    content = content or ""
    if not isinstance(content, str):
        content = "".join(
            text_of_part(f"{name}[{index}]", part, is_answered=is_answered)
            for index, part in enumerate(content)
        )
    return {"role": "tool", "content": content, "tool_call_id": call_id}


@dataclass
class Turn:
    """What the assistant said before the next user's message or the next result: one message."""

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
    content: str | Sequence[parts.TextBlock | parts.InputText | parts.OutputText | parts.Refusal] | None,
) -> str:
    """What a message says; "" for one without content."""
    if isinstance(content, str):
        return content
    texts = (part.refusal if isinstance(part, parts.Refusal) else part.text for part in content or ())
    return "".join(texts)


def _chat_message(name: str, item: Raw, may_call: bool) -> dict[str, object]:
    message = decode(parts.ChatMessage, item, name)
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
    for index, part in enumerate(message.content or ()):
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


def written_arguments(name: str, text: str | None) -> dict[str, object] | str:
    """Of an earlier call: a JSON object or, where the model failed to write one, the text that it wrote."""
    text = text or "{}"
    if not text.lstrip(" \t\r\n").startswith("{"):
        return text
    try:
        with taking_interpreter(len(text)):
            arguments: dict[str, object] = decode_json(text)
    except NestedTooDeeply as error:
        raise InvalidField(name, text, f"is not usable: {error}") from error
    except msgspec.DecodeError:
        return text
    return arguments
