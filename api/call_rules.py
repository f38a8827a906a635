"""Which tools an answer must call or may: OpenAI's and Anthropic's ``tool_choice``, and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from api.json_fields import JsonFields
from api.prompts import MAX_TOOL_NAME_CHARS, MAX_TOOLS, ChatPrompt


@dataclass(frozen=True, slots=True)
class CallRule:
    """Which tools an answer calls. ``field``: what says so.

    ``is_forced``: the answer calls one or more of ``names`` and says nothing else; otherwise it may.
    """

    field: str
    names: tuple[str, ...]
    is_forced: bool
    at_most_one: bool


def openai_calls(fields: JsonFields, prompt: ChatPrompt, *, in_function: bool) -> CallRule | None:
    """Of chat completions and responses; None where the model calls what it likes as it likes.

    ``in_function``: a tool is named within ``function``, as in chats, and not beside its type.
    """
    names = names_of_tools(prompt)
    at_most_one = not fields.flag("parallel_tool_calls", default=True)
    choice = fields.raw("tool_choice")
    field, is_forced = "tool_choice", False
    match choice:
        case None | "auto":
            field = ""
        case "none":
            return None
        case "required":
            if not names:
                raise fields.invalid("tool_choice", "needs tools")
            is_forced = True
        case {"type": "function"}:
            chosen = JsonFields.of_item(field, choice)
            names, is_forced = (_named(chosen, names, in_function=in_function),), True
            at_most_one = True  # one specific function, as OpenAI has it
        case {"type": "allowed_tools"}:
            chosen = JsonFields.of_item(field, choice)
            if in_function:
                inner = chosen.nested("allowed_tools")
                if inner is None:
                    raise chosen.invalid("allowed_tools", "must be an object with mode and tools")
                chosen = inner
            if (mode := chosen.raw("mode")) not in ("auto", "required"):
                raise chosen.invalid("mode", 'must be "auto" or "required"')
            names, is_forced = _allowed(chosen, names, in_function=in_function), mode == "required"
        case _:
            rule = 'must be "none", "auto", "required", or an object of type "function" or "allowed_tools"'
            raise fields.invalid("tool_choice", rule)
    return _rule(prompt, field, names, is_forced, at_most_one, "parallel_tool_calls")


def anthropic_calls(fields: JsonFields, prompt: ChatPrompt) -> CallRule | None:
    """Of messages."""
    names = names_of_tools(prompt)
    choice = fields.nested("tool_choice")
    if choice is None:
        return _rule(prompt, "", names, False, False, "")
    at_most_one = choice.flag("disable_parallel_tool_use")
    field, is_forced = choice.name("type"), True
    match choice.raw("type"):
        case "none":
            return None
        case "auto":
            field, is_forced = "", False
        case "any":
            if not names:
                raise choice.invalid("type", "needs tools")
        case "tool":
            names = (_named(choice, names, in_function=False),)
        case _:
            raise choice.invalid("type", 'must be "auto", "any", "tool" or "none"')
    return _rule(prompt, field, names, is_forced, at_most_one, choice.name("disable_parallel_tool_use"))


def _rule(
    prompt: ChatPrompt,
    field: str,
    names: tuple[str, ...],
    is_forced: bool,
    at_most_one: bool,
    serial_field: str,
) -> CallRule | None:
    """None where the model calls what it likes as it likes. ``field``: of the choice, "" for none."""
    if not names:
        return None
    if not field and at_most_one:
        field = serial_field
    if not field and any(_is_strict(tool) for tool in prompt.all_tools):
        field = "tools"
    return CallRule(field, names, is_forced, at_most_one) if field else None


def _is_strict(tool: dict[str, object]) -> bool:
    """Whether arguments have to follow the tool's schema."""
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def names_of_tools(prompt: ChatPrompt) -> tuple[str, ...]:
    """Of the tools that may be called, each once."""
    functions = (tool["function"] for tool in prompt.all_tools)
    return tuple(dict.fromkeys(str(function["name"]) for function in functions if isinstance(function, dict)))


def _allowed(chosen: JsonFields, names: tuple[str, ...], *, in_function: bool) -> tuple[str, ...]:
    items = chosen.items("tools", MAX_TOOLS)
    if not items:
        raise chosen.invalid("tools", "must be a list with at least one tool")
    found = []
    for index, item in enumerate(items):
        tool = JsonFields.of_item(f"{chosen.name('tools')}[{index}]", item)
        if tool.raw("type") != "function":
            raise tool.invalid("type", 'must be "function"; other tools are not supported')
        found.append(_named(tool, names, in_function=in_function))
    return tuple(dict.fromkeys(found))


def _named(chosen: JsonFields, names: tuple[str, ...], *, in_function: bool) -> str:
    if in_function:
        function = chosen.nested("function")
        if function is None:
            raise chosen.invalid("function", "must be an object with a name")
        chosen = function
    name = chosen.needed_text("name", MAX_TOOL_NAME_CHARS)
    if name not in names:
        raise chosen.invalid("name", "is none of the tools")
    return name
