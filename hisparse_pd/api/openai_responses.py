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
    InputFile,
    InputImage,
    InputMessage,
    InputText,
    ItemKind,
    OutputPart,
    OutputText,
    ReasoningItem,
    Refusal,
    TextOptions,
)
from hisparse_pd.api.declared import decode
from hisparse_pd.api.prompts import (
    ChatPrompt,
    may_call_tools,
    message_items,
    parse_text,
    refuse_hosted_alone,
    template_arguments,
    unseen,
    within_values,
    written_arguments,
)
from hisparse_pd.api.raw_json import decode_item, first_chars
from hisparse_pd.api.response_tools import ResponseTools, custom_arguments, shown_name
from hisparse_pd.http.http_errors import ApiError, InvalidField

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


class _Turn:
    """A message of the assistant that is put together from items."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[Message] = []

    def add_call(self, item: FunctionCall | CustomToolCall, arguments: object) -> None:
        function = {"name": shown_name(item.name, item.namespace), "arguments": arguments}
        self.calls.append({"type": "function", "function": function, "id": item.call_id})

    def message(self) -> Iterator[Message]:
        if not (self.reasoning or self.texts or self.calls):
            return
        shown: Message = {"role": "assistant", "content": "".join(self.texts)}
        if self.calls:
            shown["tool_calls"] = self.calls
        if self.reasoning:
            shown["reasoning_content"] = "".join(self.reasoning)
        yield shown


def _input(value: Raw | None, tools: ResponseTools) -> Iterator[Message]:
    """The messages; tools among the items go to ``tools``."""
    if value is None:
        raise ApiError(400, "input: the field is needed", param="input", code="missing_field")
    if first_chars(value)[0] == b'"':
        yield {"role": "user", "content": parse_text("input", value)}
        return
    turn = _Turn()
    items = [(name, _item(name, raw)) for name, raw in message_items("input", value)]
    num_answered = max((i for i, (_, item) in enumerate(items) if isinstance(item, _OF_ANSWERS)), default=0)
    for index, (name, item) in enumerate(items):
        if isinstance(item, AnswerMessage | ReasoningItem) and (turn.calls or turn.texts):
            yield from turn.message()
            turn = _Turn()
        match item:
            case AnswerMessage():
                turn.texts.append(_text_of(item.content))
            case FunctionCall():
                turn.add_call(item, written_arguments(f"{name}.arguments", item.arguments))
            case CustomToolCall():
                turn.add_call(item, custom_arguments(item.input))
            case ReasoningItem():
                turn.reasoning += (part.text for part in item.content or ())
            case AdditionalTools():
                tools.add(f"{name}.tools", item.tools)
            case FunctionCallOutput() | CustomToolCallOutput() | InputMessage():
                yield from turn.message()
                turn = _Turn()
                if isinstance(item, InputMessage):
                    yield {"role": item.role, "content": _text_of(item.content)}
                else:
                    output = _output(f"{name}.output", item.output, is_answered=index < num_answered)
                    yield {"role": "tool", "content": output, "tool_call_id": item.call_id}
    yield from turn.message()


def _item(name: str, raw: Raw) -> Any:
    """As the class that is declared for its type and role."""
    kind = decode(ItemKind, raw, name)
    if kind.type in (None, "message"):
        return decode(AnswerMessage if kind.role == "assistant" else InputMessage, raw, name)
    if kind.type not in _ITEMS:
        known = f"message, {', '.join(_ITEMS)}"
        raise InvalidField(f"{name}.type", kind.type, f"is not supported; supported are {known}")
    return decode(_ITEMS[kind.type], raw, name)


def _output(name: str, output: str | list[OutputPart], *, is_answered: bool) -> str:
    """Of a tool."""
    if isinstance(output, str):
        return output
    texts: list[str] = []
    for index, part in enumerate(output):
        match part:
            case InputText():
                texts.append(part.text)
            case InputImage() | InputFile():
                kind = "input_image" if isinstance(part, InputImage) else "input_file"
                texts.append(unseen(f"{name}[{index}]", kind, is_answered=is_answered))
    return "".join(texts)


def _text_of(content: str | list[InputText] | list[OutputText | InputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
