"""The conversation of ``/v1/responses``, OpenAI's, as the one that a chat completion would have.

Nothing is stored: a request brings its whole conversation, as items of ``input``. Items of one answer, its
reasoning, text and calls, become one message of the assistant again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from hisparse_pd.api.bodies import ResponsesBody
from hisparse_pd.api.body_parts import (
    AdditionalTools,
    AnswerMessage,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    InputText,
    ItemKind,
    OutputText,
    ReasoningItem,
    Refusal,
    TextOptions,
)
from hisparse_pd.api.declared import decode
from hisparse_pd.api.prompts import (
    ChatPrompt,
    Turn,
    may_call_tools,
    message_items,
    parse_text,
    refuse_hosted_alone,
    result_message,
    template_arguments,
    within_values,
    written_arguments,
)
from hisparse_pd.api.raw_json import decode_item, first_chars
from hisparse_pd.api.response_tools import ResponseTools, custom_arguments, shown_name
from hisparse_pd.http.http_errors import FieldRefused, InvalidField

_ITEMS: dict[str, type[Any]] = {
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "custom_tool_call": CustomToolCall,
    "custom_tool_call_output": CustomToolCallOutput,
    "reasoning": ReasoningItem,
    "additional_tools": AdditionalTools,
}
"""By their type; messages may lack it."""

_OF_ANSWERS = (AnswerMessage, FunctionCall, CustomToolCall, ReasoningItem)

_ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "user", "safety_identifier")

Message = dict[str, object]


def parse_responses(body: ResponsesBody) -> tuple[ChatPrompt, dict[str, object]]:
    """The conversation, and what the answer repeats of the request. Raises ApiError 400."""
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    tools = ResponseTools()
    tools.add("tools", body.tools)
    messages += within_values(_input(body.input, tools))
    refuse_hosted_alone(tools.left_out, are_alone=not tools.functions)
    may_call = may_call_tools(body.tool_choice)
    arguments = template_arguments(body)
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
    echo: dict[str, object] = {field: getattr(body, field) for field in _ECHOED} | {
        "metadata": None if body.metadata is None else decode_item("metadata", body.metadata),
        "tools": tools.described,
        "tool_choice": decode_item("tool_choice", body.tool_choice) if body.tool_choice else "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": _text_format(body.text)},
    }
    prompt = ChatPrompt(
        tuple(messages),
        arguments,
        continue_final_message=False,
        tools=tuple(tools.functions) if may_call else (),
        separate_reasoning=True,
        called_tools=tools.called,
        left_out=tools.left_out,
    )
    return prompt, echo


def _text_format(text: TextOptions | None) -> object:
    """As the answer repeats it."""
    if text is None or text.format is None:
        return {"type": "text"}
    return decode_item("text.format", text.format)


def _input(value: Raw | None, tools: ResponseTools) -> Iterator[Message]:
    """The messages; tools among the items go to ``tools``."""
    if value is None:
        raise FieldRefused("input", "the field is needed", code="missing_field")
    if first_chars(value)[0] == b'"':
        yield {"role": "user", "content": parse_text("input", value)}
        return
    turn = Turn()
    items = [(name, _item(name, raw)) for name, raw in message_items("input", value)]
    num_answered = max((i for i, (_, item) in enumerate(items) if isinstance(item, _OF_ANSWERS)), default=0)
    for index, (name, item) in enumerate(items):
        is_of_next = isinstance(item, AnswerMessage | ReasoningItem) and (turn.calls or turn.texts)
        if not turn.is_empty and (is_of_next or not isinstance(item, (*_OF_ANSWERS, AdditionalTools))):
            yield turn.message()
            turn = Turn()
        match item:
            case AnswerMessage():
                turn.texts.append(_text_of(item.content))
            case FunctionCall():
                arguments = written_arguments(f"{name}.arguments", item.arguments)
                turn.call(shown_name(item.name, item.namespace), arguments, item.call_id)
            case CustomToolCall():
                turn.call(shown_name(item.name, item.namespace), custom_arguments(item.input), item.call_id)
            case ReasoningItem():
                turn.reasoning += (part.text for part in item.content or ())
            case AdditionalTools():
                tools.add(f"{name}.tools", item.tools)
            case InputMessage():
                yield {"role": item.role, "content": _text_of(item.content)}
            case FunctionCallOutput() | CustomToolCallOutput():
                is_answered = index < num_answered
                yield result_message(f"{name}.output", item.output, item.call_id, is_answered=is_answered)
    if not turn.is_empty:
        yield turn.message()


def _item(name: str, raw: Raw) -> Any:
    """As the class that is declared for its type and role."""
    kind = decode(ItemKind, raw, name)
    if kind.type in (None, "message"):
        return decode(AnswerMessage if kind.role == "assistant" else InputMessage, raw, name)
    if kind.type not in _ITEMS:
        known = f"message, {', '.join(_ITEMS)}"
        raise InvalidField(f"{name}.type", kind.type, f"is not supported; supported are {known}")
    return decode(_ITEMS[kind.type], raw, name)


def _text_of(content: str | list[InputText] | list[OutputText | InputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
