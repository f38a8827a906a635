"""The prompts of a request: text, token ids, or a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from api.json_fields import MAX_FIELD_BYTES, JsonFields, checked_integers, decode_item, first_chars
from service.engine_messages import pack_token_ids
from service.http_errors import ApiError, InvalidField

MAX_PROMPTS = 4096
MAX_MESSAGES = 4096
MAX_TOKEN_ID = 2**31 - 1
MAX_EFFORT_CHARS = 64
MAX_TOOLS = 256
MAX_TOOL_NAME_CHARS = 256
MAX_CALLS = 256
MAX_CALL_ID_CHARS = 256
MAX_ARGUMENTS_CHARS = MAX_FIELD_BYTES

_ROLES = ("system", "developer", "user", "assistant", "tool")
_DESCRIBING_ROLES = ("system", "developer")

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
class ChatPrompt:
    """A conversation for the model's chat template.

    ``tools``: those that the model may call, as the client describes them; () also where it may call none.
    A system's or developer's message may bring tools of its own: ``tools`` of the message.
    ``separate_reasoning``: show the answer's reasoning beside its content, and not as the beginning of it.
    ``add_generation_prompt``: end with what begins an answer, unless the last message is continued.
    """

    messages: tuple[dict[str, object], ...]
    template_arguments: dict[str, object]
    continue_final_message: bool
    tools: tuple[dict[str, object], ...]
    separate_reasoning: bool
    add_generation_prompt: bool = True

    @property
    def all_tools(self) -> list[dict[str, object]]:
        """Those of messages too."""
        found = list(self.tools)
        for message in self.messages:
            tools = message.get("tools")
            found += tools if isinstance(tools, list) else ()
        return found


Prompt = str | bytes | ChatPrompt
"""Text, token ids as of ``pack_token_ids``, or a conversation."""

_IDS_BYTES = 128 << 10
"""Of a list of token ids, decoded at a time: 5 ms, in which no other thread runs."""

_ids_decoder = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]])


def generate_prompt_field(fields: JsonFields) -> str:
    given = [name for name in ("text", "input_ids") if fields.present(name)]
    if len(given) != 1:
        raise ApiError(400, "exactly one of text and input_ids is needed", param="text")
    return given[0]


def parse_prompts(fields: JsonFields, field: str) -> tuple[bool, tuple[Prompt, ...]]:
    """``(the field is a list of prompts, prompts)``. A list of integers is one prompt."""
    value = fields.undecoded(field)
    takes_text, takes_ids = field != "input_ids", field != "text"
    shapes = ["a string", "a list of strings"] * takes_text + [
        "a list of token ids",
        "a list of such lists",
    ] * takes_ids
    if value is None:
        raise ApiError(400, f"{field}: the field is needed", param=field, code="missing_field")
    match first_chars(value):
        case b'"', _ if takes_text:
            return False, (_text(field, value),)
        case b"[", b"]":
            raise InvalidField(field, [], "must not be empty")
        case b"[", first if takes_ids and first in _INTEGER_BEGINS:
            return False, (_packed_ids(field, value),)
        case b"[", (b'"' | b"[") as first if takes_text if first == b'"' else takes_ids:
            items = fields.split(field, MAX_PROMPTS) or []
            parse = _text if first == b'"' else _packed_ids
            return True, tuple(parse(f"{field}[{index}]", item) for index, item in enumerate(items))
        case _:
            raise fields.invalid(field, f"must be {' or '.join(shapes)}")


_INTEGER_BEGINS = tuple(bytes((char,)) for char in b"-0123456789tf")
"""Of an integer, and of true and false, which an error shall call no integer."""


def _text(name: str, value: Raw) -> str:
    text = decode_item(name, value)
    if not isinstance(text, str):
        raise InvalidField(name, text, "must be a string as the first prompt is")
    if not text:
        raise InvalidField(name, text, "must not be empty")
    return text


def parse_text(fields: JsonFields, field: str) -> str:
    """A string of any length that is not empty."""
    value = fields.undecoded(field)
    if value is None or bytes(memoryview(value)[:1]) != b'"':
        raise fields.invalid(field, "must be a string")
    return _text(field, value)


def parse_token_ids(fields: JsonFields, field: str) -> bytes:
    """A list of token ids, which may be empty, as of ``pack_token_ids``."""
    value = fields.undecoded(field)
    if value is None:
        raise ApiError(400, f"{field}: the field is needed", param=field, code="missing_field")
    match first_chars(value):
        case b"[", b"]":
            return b""
        case b"[", _:
            return _packed_ids(field, value)
        case _:
            raise fields.invalid(field, "must be a list of token ids")


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
            raise _no_token_id(name, piece, num_ids) from error
        pieces.append(pack_token_ids(token_ids))
        num_ids += len(token_ids)
        start = stop + 1
    return b"".join(pieces)


def _no_token_id(name: str, piece: bytes, first_index: int) -> ApiError:
    try:
        for _ in checked_integers(name, msgspec.json.decode(piece), 0, MAX_TOKEN_ID, first_index):
            pass
    except InvalidField as error:
        return error
    except (msgspec.MsgspecError, RecursionError):  # cut within an entry that is a list or a string
        pass
    return ApiError(400, f"{name}: must have nothing but token ids", param=name)


def parse_chat_prompt(fields: JsonFields, *, is_to_be_answered: bool = True) -> ChatPrompt:
    """``is_to_be_answered``: it ends where an answer begins, and its special tokens are the template's."""
    items = fields.split("messages", MAX_MESSAGES)
    if not items:
        raise fields.invalid("messages", "must be a list with at least one message")
    may_call = fields.raw("tool_choice") != "none"
    messages = tuple(_chat_message(f"messages[{index}]", item, may_call) for index, item in enumerate(items))
    arguments = template_arguments(fields)
    effort = fields.text("reasoning_effort", MAX_EFFORT_CHARS)
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
    continue_final = fields.flag("continue_final_message")
    if continue_final and messages[-1]["role"] != "assistant":
        raise fields.invalid("continue_final_message", "needs a last message of the assistant")
    if is_to_be_answered:
        fields.require_unset("add_special_tokens", False)  # the template writes them
        fields.require_unset("add_generation_prompt", not continue_final)
    add_generation_prompt = fields.flag("add_generation_prompt", default=not continue_final)
    if add_generation_prompt and continue_final:
        raise fields.invalid("add_generation_prompt", "excludes continue_final_message")
    return ChatPrompt(
        messages,
        arguments,
        continue_final,
        _tools(fields, may_call),
        fields.flag("separate_reasoning", default=True),
        add_generation_prompt,
    )


def template_arguments(fields: JsonFields) -> dict[str, object]:
    """What the client sets of the model's template."""
    given = fields.nested("chat_template_kwargs")
    arguments = given.to_dict() if given else {}
    if reserved := sorted(_TEMPLATE_ARGUMENTS & arguments.keys()):
        raise fields.invalid("chat_template_kwargs", f"must not set {', '.join(reserved)}")
    return arguments


def _tools(fields: JsonFields, may_call: bool) -> tuple[dict[str, object], ...]:
    """Those of the request."""
    described = _described_tools(fields)
    return tuple(described) if may_call else ()


def _described_tools(fields: JsonFields) -> list[dict[str, object]]:
    """Descriptions of functions."""
    tools = []
    for index, item in enumerate(fields.items("tools", MAX_TOOLS) or ()):
        tool = JsonFields.of_item(f"{fields.name('tools')}[{index}]", item)
        if tool.raw("type") != "function":
            raise tool.invalid("type", 'must be "function"; other tools are not supported')
        function = tool.nested("function")
        if function is None or not function.text("name", MAX_TOOL_NAME_CHARS):
            raise tool.invalid("function", "must be an object with a name")
        if not isinstance(function.raw("parameters"), dict | None):
            raise function.invalid("parameters", "must be a JSON schema, an object")
        tools.append(tool.to_dict())
    return tools


def _chat_message(name: str, item: object, may_call: bool) -> dict[str, object]:
    message = JsonFields.of_item(name, item)
    role = message.raw("role")
    if role not in _ROLES:
        raise message.invalid("role", f"must be one of {', '.join(_ROLES)}")
    message.require_unset("function_call")
    message.require_unset("response_format")
    shown: dict[str, object] = {"role": role}
    calls = message.items("tool_calls", MAX_CALLS)
    if calls and role != "assistant":
        raise message.invalid("tool_calls", "belong to a message of the assistant")
    if calls:
        shown["content"] = _message_content(message) if message.present("content") else ""
        shown["tool_calls"] = [
            _tool_call(JsonFields.of_item(f"{message.name('tool_calls')}[{index}]", call))
            for index, call in enumerate(calls)
        ]
    else:
        shown["content"] = _message_content(message)
    if role == "tool" and (call_id := message.text("tool_call_id", MAX_CALL_ID_CHARS)) is not None:
        shown["tool_call_id"] = call_id
    if role in _DESCRIBING_ROLES and (tools := _described_tools(message)) and may_call:
        shown["tools"] = tools
    if role == "assistant" and isinstance(reasoning := message.raw("reasoning_content"), str):
        shown["reasoning_content"] = reasoning
    return shown


def _tool_call(call: JsonFields) -> dict[str, object]:
    """A call of an earlier answer, its arguments as the object that templates expect."""
    function = call.nested("function")
    if function is None or not (name := function.text("name", MAX_TOOL_NAME_CHARS)):
        raise call.invalid("function", "must be an object with name and arguments")
    described = {"name": name, "arguments": written_arguments(function)}
    shown: dict[str, object] = {"type": "function", "function": described}
    if (call_id := call.text("id", MAX_CALL_ID_CHARS)) is not None:
        shown["id"] = call_id
    return shown


def written_arguments(function: JsonFields) -> dict[str, object]:
    """Of a call, which are JSON as text."""
    text = function.text("arguments", MAX_ARGUMENTS_CHARS) or "{}"
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise function.invalid("arguments", "must be a JSON object, as text")
    return arguments


def _message_content(message: JsonFields) -> str:
    """The text of a message, given as a string or as a list of text parts."""
    match message.raw("content"):
        case str() as text:
            return text
        case [*parts] if parts:
            return "".join(
                _part_text(f"{message.name('content')}[{i}]", part) for i, part in enumerate(parts)
            )
        case _:
            raise message.invalid("content", "must be a string or a list of text parts")


def _part_text(name: str, part: object) -> str:
    match part:
        case {"type": "text", "text": str() as text}:
            return text
        case _:
            raise InvalidField(
                name, part, 'must be {"type": "text", "text": …}; other parts are not supported'
            )
