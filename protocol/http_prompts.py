"""The prompts of a request: text, token ids, or a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.http_errors import ApiError, InvalidField
from protocol.json_fields import JsonFields, checked_integers

MAX_PROMPTS = 4096
MAX_MESSAGES = 4096
MAX_TOKEN_ID = 2**31 - 1
MAX_EFFORT_CHARS = 64

_ROLES = ("system", "developer", "user", "assistant")

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
    """A conversation for the model's chat template."""

    messages: tuple[dict[str, str], ...]
    template_arguments: dict[str, object]
    continue_final_message: bool


Prompt = str | tuple[int, ...] | ChatPrompt


def generate_prompt_field(fields: JsonFields) -> str:
    given = [name for name in ("text", "input_ids") if fields.present(name)]
    if len(given) != 1:
        raise ApiError(400, "exactly one of text and input_ids is needed", param="text")
    return given[0]


def parse_prompts(fields: JsonFields, field: str) -> tuple[bool, tuple[Prompt, ...]]:
    """``(the field is a list of prompts, prompts)``. A list of integers is one prompt."""
    value = fields.raw(field)
    takes_text, takes_ids = field != "input_ids", field != "text"
    shapes = ["a string", "a list of strings"] * takes_text + [
        "a list of token ids",
        "a list of such lists",
    ] * takes_ids
    match value:
        case None:
            raise ApiError(400, f"{field}: the field is needed", param=field, code="missing_field")
        case str() if takes_text:
            return False, (_not_empty(field, value),)
        case []:
            raise fields.invalid(field, "must not be empty")
        case [int(), *_] if takes_ids:
            return False, (tuple(checked_integers(field, value, 0, MAX_TOKEN_ID)),)
        case [*items] if len(items) > MAX_PROMPTS:
            raise fields.invalid(field, f"must have at most {MAX_PROMPTS} prompts")
        case [str(), *_] if takes_text:
            return True, tuple(_text_items(field, value))
        case [list(), *_] if takes_ids:
            return True, tuple(_id_items(field, value))
        case _:
            raise fields.invalid(field, f"must be {' or '.join(shapes)}")


def _not_empty(name: str, value: str) -> str:
    if not value:
        raise InvalidField(name, value, "must not be empty")
    return value


def _text_items(field: str, items: Sequence[object]) -> list[str]:
    texts = []
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise InvalidField(f"{field}[{index}]", item, "must be a string as the first prompt is")
        texts.append(_not_empty(f"{field}[{index}]", item))
    return texts


def _id_items(field: str, items: Sequence[object]) -> list[tuple[int, ...]]:
    prompts = []
    for index, item in enumerate(items):
        name = f"{field}[{index}]"
        if not isinstance(item, list):
            raise InvalidField(name, item, "must be a list of token ids as the first prompt is")
        if not item:
            raise InvalidField(name, item, "must not be empty")
        prompts.append(tuple(checked_integers(name, item, 0, MAX_TOKEN_ID)))
    return prompts


def parse_chat_prompt(fields: JsonFields) -> ChatPrompt:
    items = fields.items("messages", MAX_MESSAGES)
    if not items:
        raise fields.invalid("messages", "must be a list with at least one message")
    messages = tuple(_chat_message(f"messages[{index}]", item) for index, item in enumerate(items))
    arguments = fields.nested("chat_template_kwargs")
    template_arguments = arguments.to_dict() if arguments else {}
    if reserved := sorted(_TEMPLATE_ARGUMENTS & template_arguments.keys()):
        raise fields.invalid("chat_template_kwargs", f"must not set {', '.join(reserved)}")
    effort = fields.text("reasoning_effort", MAX_EFFORT_CHARS)
    if effort is not None:
        template_arguments.setdefault("reasoning_effort", effort)
    continue_final = fields.flag("continue_final_message")
    if continue_final and messages[-1]["role"] != "assistant":
        raise fields.invalid("continue_final_message", "needs a last message of the assistant")
    fields.require_unset("add_special_tokens", False)  # the template writes them
    fields.require_unset("add_generation_prompt", not continue_final)
    return ChatPrompt(messages, template_arguments, continue_final)


def _chat_message(name: str, item: object) -> dict[str, str]:
    if not isinstance(item, dict):
        raise InvalidField(name, item, "must be an object with role and content")
    message = JsonFields(item, name)
    role = message.raw("role")
    if role not in _ROLES:
        raise message.invalid("role", f"must be one of {', '.join(_ROLES)}")
    for field in ("tool_calls", "function_call", "tool_call_id"):
        message.require_unset(field, [])
    return {"role": str(role), "content": _message_content(message)}


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
