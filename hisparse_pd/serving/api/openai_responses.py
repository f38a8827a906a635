"""Turns a conversation of OpenAI's ``/v1/responses`` into that of a chat completion.

``schemas.py`` calls ``parse_responses``. Nothing is stored: a request has its whole conversation in the items
of ``input``. The reasoning, text and calls of one answer are items of their own, and become one message of
the assistant. The model is shown a namespace's tool under a name of its own: ``call_rules.py`` finds that
name for a tool that the client chose (``find_tool``), ``responses_answers.py`` the client's tool for a name
that the model called (``called_tool``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pydantic_core
from msgspec import Raw

from hisparse_pd.serving.api import responses_parts as parts
from hisparse_pd.serving.api.bodies import ResponsesBody
from hisparse_pd.serving.api.body_parts import MAX_TOOLS, ItemKind
from hisparse_pd.serving.api.conversations import (
    Item,
    Turn,
    joined_text,
    may_call_tools,
    message_items,
    refuse_hosted_alone,
    result_message,
    template_arguments,
    tool_items,
    without_hosted,
    written_arguments,
)
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.plain_prompts import parse_text
from hisparse_pd.serving.api.prompts import CalledTool, ChatPrompt, LeftOutTool, limit_values
from hisparse_pd.serving.api.raw_json import decode_item, first_chars
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField

_ITEMS: dict[str, type[Any]] = {
    "function_call": parts.FunctionCall,
    "function_call_output": parts.CallOutput,
    "custom_tool_call": parts.CustomToolCall,
    "custom_tool_call_output": parts.CallOutput,
    "reasoning": parts.ReasoningItem,
    "additional_tools": parts.AdditionalTools,
    "item_reference": parts.ItemReference,
}
"""Classes of items by their type, which messages may lack."""

_ANSWER_ITEMS = (
    parts.AnswerMessage,
    parts.FunctionCall,
    parts.CustomToolCall,
    parts.ReasoningItem,
)
"""Items of the assistant."""

_INPUT = "input"
"""Name of a custom tool's only argument, as the model is shown it."""

_ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "user", "safety_identifier")
"""Fields that the answer repeats as they are."""

Message = dict[str, object]


def parse_responses(body: ResponsesBody) -> tuple[ChatPrompt, dict[str, object]]:
    """Return the conversation, and the fields of the request that the answer repeats. Raises ApiError 400."""
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    tools = ResponseTools()
    tools.add("tools", body.tools)
    # Reading the input's items to their end also adds their tools to ``tools``, which the next lines need.
    messages += limit_values(_messages_of_input(body.input, tools))
    refuse_hosted_alone(tools.left_out, are_alone=not tools.functions)
    may_call = may_call_tools(body.tool_choice)
    effort = body.reasoning.effort if body.reasoning is not None else None
    text_format = body.text.format if body.text is not None else None
    echo: dict[str, object] = {field: getattr(body, field) for field in _ECHOED} | {
        "metadata": None if body.metadata is None else decode_item("metadata", body.metadata),
        "tools": tools.described,
        "tool_choice": decode_item("tool_choice", body.tool_choice) if body.tool_choice else "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": {"type": "text"} if text_format is None else text_format},
    }
    prompt = ChatPrompt(
        tuple(messages),
        template_arguments(body, effort),
        continue_final_message=False,
        tools=tuple(tools.functions) if may_call else (),
        separate_reasoning=True,
        called_tools=tools.called,
        left_out=tools.left_out,
    )
    return prompt, echo


def _messages_of_input(value: Raw | None, tools: ResponseTools) -> Iterator[Message]:
    """Yield the messages of ``input``, and add the tools among its items to ``tools``."""
    if value is None:
        raise FieldRefused("input", "the field is needed", code="missing_field")
    if first_chars(value)[0] == b'"':
        yield {"role": "user", "content": parse_text("input", value)}
        return
    turn = Turn()
    items = _items(message_items("input", value))
    last_answer_index = max(
        (i for i, (_, item) in enumerate(items) if isinstance(item, _ANSWER_ITEMS)), default=0
    )
    for index, (name, item) in enumerate(items):
        # A turn ends before an item of another role, and before the next answer. An answer is reasoning, then
        # texts, then calls; so reasoning, or a text, behind a text or a call begins the next one.
        has_other_role = not isinstance(item, (*_ANSWER_ITEMS, parts.AdditionalTools))
        begins_next_answer = isinstance(item, parts.AnswerMessage | parts.ReasoningItem) and (
            turn.calls or turn.texts
        )
        if not turn.is_empty and (has_other_role or begins_next_answer):
            yield turn.message()
            turn = Turn()
        match item:
            case parts.AnswerMessage():
                turn.texts.append(joined_text(item.content))
            case parts.FunctionCall():
                arguments = written_arguments(f"{name}.arguments", item.arguments)
                turn.call(shown_name(item.name, item.namespace), arguments, item.call_id)
            case parts.CustomToolCall():
                turn.call(shown_name(item.name, item.namespace), {_INPUT: item.input}, item.call_id)
            case parts.ReasoningItem():
                turn.reasoning += (part.text for part in item.content or ())
            case parts.AdditionalTools():
                tools.add(f"{name}.tools", item.tools)
            case parts.InputMessage():
                yield {"role": item.role, "content": joined_text(item.content)}
            case parts.CallOutput():
                # Parts other than text are refused if the new answer is about them, else shown as their kind.
                is_answered = index < last_answer_index
                yield result_message(f"{name}.output", item.output, item.call_id, is_answered=is_answered)
    if not turn.is_empty:
        yield turn.message()


def _items(given: list[Item]) -> list[tuple[str, Any]]:
    """Return the items with their paths, and references replaced by the items that they name.

    An item that is named more than once stands only at the first place.
    """
    items = [(name, _item(name, raw)) for name, raw in given]
    if not any(isinstance(item, parts.ItemReference) for _, item in items):
        return items
    by_id: dict[str | None, int] = {}
    for index, ((name, raw), (_, item)) in enumerate(zip(given, items, strict=True)):
        if not isinstance(item, parts.ItemReference):
            by_id.setdefault(decode(parts.NamedItem, raw, name).id, index)
    places: dict[int, None] = {}
    """Indexes of the items to return, in order and each once."""
    for index, (name, item) in enumerate(items):
        if isinstance(item, parts.ItemReference):
            if item.id not in by_id:
                rule = (
                    "is no item of this input, and none is stored: send the whole item, as with store: false"
                )
                raise InvalidField(f"{name}.id", item.id, rule)
            places.setdefault(by_id[item.id])
        else:
            places.setdefault(index)
    return [items[index] for index in places]


def _item(name: str, raw: Raw) -> Any:
    kind = decode(ItemKind, raw, name)
    if kind.type in (None, "message"):
        return decode(
            parts.AnswerMessage if kind.role == "assistant" else parts.InputMessage,
            raw,
            name,
        )
    if kind.type not in _ITEMS:
        known = f"message, {', '.join(_ITEMS)}"
        raise InvalidField(f"{name}.type", kind.type, f"is not supported; supported are {known}")
    return decode(_ITEMS[kind.type], raw, name)


# --- tools ---------------------------------------------------------------------------------------------


class ResponseTools:
    """The tools of one request, as functions that the model is shown.

    A function of a namespace has the name ``namespace.function``. A custom tool, which takes a text, has one
    argument, ``input``. ``called_tool`` and ``custom_input`` turn a call back into what the client knows.
    """

    def __init__(self) -> None:
        self.described: list[Raw] = []
        """The client's descriptions, without those of tools that are left out."""
        self.functions: list[dict[str, object]] = []
        """Descriptions for the template."""
        self.called: dict[str, CalledTool] = {}
        """The client's names of the functions, by the names that the model is shown."""
        self.left_out: tuple[LeftOutTool, ...] = ()

    def add(self, field: str, value: Raw | None) -> None:
        """Add the tools in ``field``. Raises ApiError 400."""
        items, left_out = without_hosted(tool_items(field, value))
        self.left_out += left_out
        for name, item in items:
            kind = decode(ItemKind, item, name).type
            if kind == "namespace":
                self._add_namespace(name, decode(parts.NamespaceTool, item, name))
            else:
                self._add(name, item, kind)
            self.described.append(item)

    def _add_namespace(self, name: str, space: parts.NamespaceTool) -> None:
        about = f"{space.name}: {space.description}" if space.description else ""
        for inner, item in tool_items(f"{name}.tools", space.tools):
            self._add(inner, item, decode(ItemKind, item, inner).type, space.name, about)
            about = ""  # only the first function's description includes it

    def _add(
        self, name: str, item: Raw, kind: str | None, namespace: str | None = None, about: str = ""
    ) -> None:
        """Add one function or custom tool, of ``namespace`` if it is in one. ``about``: text that precedes
        its description. Raises ApiError 400."""
        match kind:
            case "function":
                decode(parts.ResponsesTool, item, name)
                function = decode_item(name, item, as_spelled=True)
                del function["type"]
            case "custom":
                function = _function(decode(parts.CustomTool, item, name))
            case _:
                known = '"function" or "custom"' if namespace else '"function", "custom" or "namespace"'
                raise InvalidField(f"{name}.type", kind, f"must be {known}; other tools are not supported")
        called = CalledTool(function["name"], namespace, kind == "custom")
        shown = shown_name(called.name, namespace)
        if about:
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
        if len(self.functions) == MAX_TOOLS:
            message = f"{name}: a request may have {MAX_TOOLS} tools, those of namespaces counted"
            raise ApiError(400, message, param=name)
        self.functions.append({"type": "function", "function": function | {"name": shown}})
        self.called[shown] = called


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool that the model is shown."""
    return f"{namespace}.{name}" if namespace else name


def find_tool(called: Mapping[str, CalledTool], name: str, namespace: str | None = None) -> str | None:
    """Return the name that the model is shown for the tool ``name``; None for no tool. The namespace may be
    missing where only one tool has the name."""
    if (shown := shown_name(name, namespace)) in called:
        return shown
    found = [shown for shown, tool in called.items() if tool.name == name and namespace is None]
    return found[0] if len(found) == 1 else None


def called_tool(called: Mapping[str, CalledTool], name: str) -> CalledTool:
    """Return the client's name of the tool that the model called."""
    shown = find_tool(called, name)
    return CalledTool(name) if shown is None else called[shown]


def custom_input(arguments: str) -> str:
    """Return the ``input`` of a custom tool's call from its ``arguments``, JSON that may be cut off.
    Arguments that are no such object are returned as they stand."""
    with suppress(ValueError):
        found = pydantic_core.from_json(arguments or "{}", allow_partial="trailing-strings")
        if isinstance(found, dict) and isinstance(text := found.get(_INPUT, ""), str):
            return text
    return arguments


def _function(tool: parts.CustomTool) -> dict[str, Any]:
    """Describe a custom tool as a function. Its format is shown to the model, and not enforced."""
    rule: dict[str, str] = {"type": "string"}
    if tool.format is not None and tool.format.definition:
        rule["description"] = f"Follows this {tool.format.syntax or 'grammar'}:\n{tool.format.definition}"
    parameters = {
        "type": "object",
        "properties": {_INPUT: rule},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": parameters}
