"""Which tools an answer may or must call, by OpenAI's and Anthropic's ``tool_choice`` and related fields.

``constraints.py`` calls ``openai_calls`` or ``anthropic_calls`` and puts the rule into the answer's
constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Raw

from hisparse_pd.serving.api import anthropic_parts, openai_parts, responses_parts
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.openai_responses import find_tool
from hisparse_pd.serving.api.prompts import ChatPrompt
from hisparse_pd.serving.api.raw_json import decode_item
from hisparse_pd.serving.http.http_errors import InvalidField

_Choice = openai_parts.ChatToolChoice | responses_parts.ToolChoice


@dataclass(frozen=True, slots=True)
class CallRule:
    """The tools that an answer may or must call."""

    field: str
    """Path of the field that asks for the rule, for errors."""
    names: tuple[str, ...]
    is_forced: bool
    """Whether the answer consists of calls; otherwise it may have some."""
    at_most_one: bool


def openai_calls(
    tool_choice: Raw | None, parallel_tool_calls: bool | None, prompt: ChatPrompt, *, is_chat: bool
) -> CallRule | None:
    """Return the rule of chat completions and responses; None if calls need no grammar, since the model may
    call any tool in any way, or no tool is offered to it. Raises ApiError 400.

    ``is_chat``: whether ``tool_choice`` names tools as in chats, within ``function``, and not beside their
    type, as in responses.
    """
    names = names_of_tools(prompt)
    at_most_one = parallel_tool_calls is False
    field, is_forced = "tool_choice", False
    choice = None if tool_choice is None else decode_item(field, tool_choice)
    match choice:
        case None | "auto":
            field = ""  # the client chose no tools
        case "none":
            return None
        case "required":
            if not names:
                raise InvalidField(field, choice, "needs tools")
            is_forced = True
        case {"type": "function" | "custom"}:
            assert tool_choice is not None
            kind: type[_Choice] = openai_parts.ChatToolChoice if is_chat else responses_parts.ToolChoice
            names, is_forced = (_chosen_name(decode(kind, tool_choice, field), field, prompt),), True
            at_most_one = True  # as OpenAI has it for one named function
        case {"type": "allowed_tools"}:
            assert tool_choice is not None
            names, is_forced = _allowed_tools(tool_choice, field, prompt, is_chat)
        case _:
            rule = 'must be "none", "auto", "required", or an object of type "function" or "allowed_tools"'
            raise InvalidField(field, choice, rule)
    return _call_rule(
        prompt, field, names, is_forced=is_forced, at_most_one=at_most_one, serial_field="parallel_tool_calls"
    )


def anthropic_calls(choice: anthropic_parts.AnthropicChoice | None, prompt: ChatPrompt) -> CallRule | None:
    """Return the rule of Anthropic's messages; None as for ``openai_calls``. Raises ApiError 400."""
    names = names_of_tools(prompt)
    if choice is None:
        return _call_rule(prompt, "", names, is_forced=False, at_most_one=False, serial_field="")
    field, is_forced = "tool_choice.type", True
    match choice.type:
        case "none":
            return None
        case "auto":
            field, is_forced = "", False
        case "any":
            if not names:
                raise InvalidField(field, choice.type, "needs tools")
        case "tool":
            names = (_checked_name("tool_choice.name", choice.name, names),)
    return _call_rule(
        prompt,
        field,
        names,
        is_forced=is_forced,
        at_most_one=bool(choice.disable_parallel_tool_use),
        serial_field="tool_choice.disable_parallel_tool_use",
    )


def _call_rule(
    prompt: ChatPrompt,
    field: str,
    names: tuple[str, ...],
    *,
    is_forced: bool,
    at_most_one: bool,
    serial_field: str,
) -> CallRule | None:
    """Return the rule that ``field`` asks for. Where the client chose no tools, ``field`` is "", and there is
    a rule only if ``serial_field`` asks for ``at_most_one`` call, or a tool is strict, so that its schema is
    enforced."""
    if not names:
        return None
    if not field and at_most_one:
        field = serial_field
    if not field and any(_is_strict(tool) for tool in prompt.all_tools):
        field = "tools"
    return CallRule(field, names, is_forced, at_most_one) if field else None


def _is_strict(tool: dict[str, object]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def names_of_tools(prompt: ChatPrompt) -> tuple[str, ...]:
    """Return the names of the tools that may be called, each once."""
    functions = (tool["function"] for tool in prompt.all_tools)
    return tuple(dict.fromkeys(str(function["name"]) for function in functions if isinstance(function, dict)))


def _allowed_tools(
    choice: Raw, field: str, prompt: ChatPrompt, is_chat: bool
) -> tuple[tuple[str, ...], bool]:
    """Return the allowed names, and whether one of them must be called."""
    allowed: openai_parts.ChatAllowed | responses_parts.AllowedChoice
    if is_chat:
        allowed = decode(openai_parts.ChatAllowedChoice, choice, field).allowed_tools
        field = f"{field}.allowed_tools"
    else:
        allowed = decode(responses_parts.AllowedChoice, choice, field)
    tools: Sequence[_Choice] = allowed.tools
    known = [_chosen_name(tool, f"{field}.tools[{index}]", prompt) for index, tool in enumerate(tools)]
    return tuple(dict.fromkeys(known)), allowed.mode == "required"


def _chosen_name(tool: _Choice, field: str, prompt: ChatPrompt) -> str:
    """Return the name of the chosen tool that the model is shown, which includes its namespace."""
    names = names_of_tools(prompt)
    if isinstance(tool, openai_parts.ChatToolChoice):
        return _checked_name(f"{field}.function.name", tool.function.name, names)
    name = find_tool(prompt.called_tools, tool.name, tool.namespace)
    return _checked_name(f"{field}.name", tool.name if name is None else name, names)


def _checked_name(field: str, name: str | None, names: tuple[str, ...]) -> str:
    if name is None or name not in names:
        raise InvalidField(field, name, "is none of the tools")
    return name
