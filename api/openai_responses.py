"""The conversation of ``/v1/responses``, OpenAI's, as the one that a chat completion would have.

Nothing is stored: a request brings its whole conversation, as items of ``input``. Items of one answer, its
reasoning, text and calls, become one message of the assistant again.
"""

from __future__ import annotations

from collections.abc import Iterator

from api.json_fields import JsonFields, first_chars
from api.prompts import (
    MAX_CALL_ID_CHARS,
    MAX_EFFORT_CHARS,
    MAX_MESSAGES,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    ChatPrompt,
    parse_text,
    template_arguments,
    written_arguments,
)
from service.http_errors import ApiError

MAX_PARTS = 4096

_UNSUPPORTED: dict[str, tuple[object, ...]] = {  # known field: the values that ask for nothing
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_INCLUDABLE = ("reasoning.encrypted_content",)
"""What an answer may be asked to have besides: reasoning is in the open here, which serves the same end."""

_INPUT_PARTS = ("input_text",)
_ECHOED = ("instructions", "metadata", "max_output_tokens", "max_tool_calls", "user", "safety_identifier")

Message = dict[str, object]


def parse_responses(fields: JsonFields) -> tuple[ChatPrompt, dict[str, object]]:
    """The conversation, and what the answer repeats of the request. Raises ApiError 400."""
    for field, harmless in _UNSUPPORTED.items():
        fields.require_unset(field, *harmless)
    for index, item in enumerate(fields.items("include", MAX_PARTS) or ()):
        if item not in _INCLUDABLE:
            raise fields.invalid("include", f"[{index}] is not supported; supported is {_INCLUDABLE[0]}")
    messages: list[Message] = []
    if fields.present("instructions") and (instructions := fields.needed_text("instructions")):
        messages.append({"role": "system", "content": instructions})
    messages += _input(fields)
    may_call = fields.raw("tool_choice") != "none"
    described = list(_tools(fields))
    tools: tuple[Message, ...] = tuple({"type": "function", "function": tool} for tool in described)
    arguments, reasoning = _template_arguments(fields)
    text = _text_format(fields)
    echo = {field: fields.raw(field) for field in _ECHOED} | {
        "tools": [{"type": "function", **tool} for tool in described],
        "tool_choice": fields.raw("tool_choice") or "auto",
        "parallel_tool_calls": fields.flag("parallel_tool_calls", default=True),
        "reasoning": reasoning,
        "text": text,
    }
    prompt = ChatPrompt(
        tuple(messages),
        arguments,
        continue_final_message=False,
        tools=tools if may_call else (),
        separate_reasoning=True,
    )
    return prompt, echo


# --- input -------------------------------------------------------------------------------------------


class _Turn:
    """A message of the assistant that is put together from items."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[Message] = []

    def message(self) -> Iterator[Message]:
        if not (self.reasoning or self.texts or self.calls):
            return
        shown: Message = {"role": "assistant", "content": "".join(self.texts)}
        if self.calls:
            shown["tool_calls"] = self.calls
        if self.reasoning:
            shown["reasoning_content"] = "".join(self.reasoning)
        yield shown


def _input(fields: JsonFields) -> Iterator[Message]:
    value = fields.undecoded("input")
    if value is None:
        raise ApiError(400, "input: the field is needed", param="input", code="missing_field")
    if first_chars(value)[0] == b'"':
        yield {"role": "user", "content": parse_text(fields, "input")}
        return
    items = fields.split("input", MAX_MESSAGES)
    if not items:
        raise fields.invalid("input", "must not be empty")
    turn = _Turn()
    for index, raw in enumerate(items):
        item = JsonFields.of_item(f"input[{index}]", raw)
        role, kind = item.raw("role"), item.raw("type")
        is_answer = role == "assistant" and kind in ("message", None)
        if (is_answer or kind == "reasoning") and (turn.calls or turn.texts):
            yield from turn.message()
            turn = _Turn()
        if is_answer:
            turn.texts.append(_content(item, "content", ("output_text", "input_text")))
            continue
        if kind == "function_call":
            turn.calls.append(_call(item))
            continue
        if kind == "reasoning":
            turn.reasoning += _reasoning(item)
            continue
        yield from turn.message()
        turn = _Turn()
        yield _other_message(item, role, kind)
    yield from turn.message()


def _other_message(item: JsonFields, role: object, kind: object) -> Message:
    """Of anybody but the assistant."""
    if kind == "function_call_output":
        call_id = item.needed_text("call_id", MAX_CALL_ID_CHARS)
        return {"role": "tool", "content": _content(item, "output", _INPUT_PARTS), "tool_call_id": call_id}
    if kind not in (None, "message"):
        known = "message, function_call, function_call_output and reasoning"
        raise item.invalid("type", f"is not supported; supported are {known}")
    if role not in ("user", "system", "developer"):
        raise item.invalid("role", "must be user, assistant, system or developer")
    return {"role": role, "content": _content(item, "content", _INPUT_PARTS)}


def _content(item: JsonFields, field: str, kinds: tuple[str, ...]) -> str:
    """A string, or a list of parts with text."""
    if isinstance(text := item.raw(field), str):
        return text
    if not isinstance(text, list):
        raise item.invalid(field, "must be a string or a list of parts")
    texts = []
    for index, raw in enumerate(item.items(field, MAX_PARTS) or ()):
        part = JsonFields.of_item(f"{item.name(field)}[{index}]", raw)
        if part.raw("type") == "refusal" and "output_text" in kinds:
            texts.append(part.needed_text("refusal"))
        elif part.raw("type") in kinds:
            texts.append(part.needed_text("text"))
        else:
            raise part.invalid("type", f'must be "{kinds[0]}"; other parts are not supported here')
    return "".join(texts)


def _call(item: JsonFields) -> Message:
    name = item.needed_text("name", MAX_TOOL_NAME_CHARS)
    return {
        "type": "function",
        "function": {"name": name, "arguments": written_arguments(item)},
        "id": item.needed_text("call_id", MAX_CALL_ID_CHARS),
    }


def _reasoning(item: JsonFields) -> Iterator[str]:
    item.require_unset("encrypted_content", "")
    for index, raw in enumerate(item.items("content", MAX_PARTS) or ()):
        part = JsonFields.of_item(f"{item.name('content')}[{index}]", raw)
        if part.raw("type") != "reasoning_text":
            raise part.invalid("type", 'must be "reasoning_text"')
        yield part.needed_text("text")


# --- tools, reasoning, format ------------------------------------------------------------------------


def _tools(fields: JsonFields) -> Iterator[Message]:
    """The descriptions of functions."""
    for index, raw in enumerate(fields.items("tools", MAX_TOOLS) or ()):
        tool = JsonFields.of_item(f"tools[{index}]", raw)
        if tool.raw("type") != "function":
            raise tool.invalid("type", 'must be "function"; other tools are not supported')
        tool.require_unset("defer_loading", False)
        tool.needed_text("name", MAX_TOOL_NAME_CHARS)
        if not isinstance(tool.raw("parameters"), dict | None):
            raise tool.invalid("parameters", "must be a JSON schema, an object")
        yield {field: value for field, value in tool.to_dict().items() if field != "type"}


def _template_arguments(fields: JsonFields) -> tuple[dict[str, object], Message]:
    """What goes to the template, and ``reasoning`` as the answer repeats it."""
    arguments = template_arguments(fields)
    effort = None
    if (reasoning := fields.nested("reasoning")) is not None:
        reasoning.require_unset("summary", "auto")
        reasoning.require_unset("generate_summary", "auto")
        if (effort := reasoning.text("effort", MAX_EFFORT_CHARS)) is not None:
            arguments.setdefault("reasoning_effort", effort)
    return arguments, {"effort": effort, "summary": None}


def _text_format(fields: JsonFields) -> Message:
    """As the answer repeats it."""
    if (text := fields.nested("text")) is not None:
        text.require_unset("verbosity", "medium")
        if (chosen := text.nested("format")) is not None:
            return {"format": chosen.to_dict()}
    return {"format": {"type": "text"}}
