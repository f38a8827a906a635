"""The conversation of ``/v1/messages``, Anthropic's, as the one that a chat completion would have.

Blocks become what chat templates know: text, reasoning, calls and results of tools. Texts of one message are
joined by line breaks. What a model behind a chat template cannot take is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Raw

from api.json_fields import JsonFields
from api.prompts import (
    MAX_CALL_ID_CHARS,
    MAX_EFFORT_CHARS,
    MAX_MESSAGES,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    ChatPrompt,
    template_arguments,
)

MAX_BLOCKS = 4096

_UNSUPPORTED: dict[str, tuple[object, ...]] = {  # known field: the values that ask for nothing
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}

_BLOCKS_OF = {"user": "text and tool_result", "assistant": "text, thinking and tool_use", "system": "text"}

Message = dict[str, object]


def parse_messages(fields: JsonFields) -> ChatPrompt:
    """Raises ApiError 400."""
    for field, harmless in _UNSUPPORTED.items():
        fields.require_unset(field, *harmless)
    items = fields.split("messages", MAX_MESSAGES)
    if not items:
        raise fields.invalid("messages", "must be a list with at least one message")
    messages = [*_system(fields)]
    for index, item in enumerate(items):
        messages += _messages_of(f"messages[{index}]", item)
    last = messages[-1]
    is_continued = last["role"] == "assistant"
    if is_continued and "tool_calls" in last:
        raise fields.invalid("messages", "must not end with a tool_use, but with its tool_result")
    may_call = _may_call(fields)
    tools = tuple(_tools(fields))
    return ChatPrompt(
        tuple(messages),
        _template_arguments(fields),
        continue_final_message=is_continued,
        tools=tools if may_call else (),
        separate_reasoning=True,
        add_generation_prompt=not is_continued,
    )


def _system(fields: JsonFields) -> Iterator[Message]:
    if fields.present("system"):
        yield {"role": "system", "content": _text_of(fields, "system")}


def _messages_of(name: str, item: Raw) -> Iterator[Message]:
    """Of one message: a result of a tool is a message of its own."""
    message = JsonFields.of_item(name, item)
    role = message.raw("role")
    if role not in _BLOCKS_OF:
        raise message.invalid("role", "must be user, assistant or system")
    if isinstance(content := message.raw("content"), str):
        yield {"role": role, "content": content}
        return
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Message] = []
    for block in _blocks(message, "content"):
        match role, block.raw("type"):
            case _, "text":
                texts.append(block.needed_text("text"))
            case "assistant", "thinking":
                reasoning.append(block.needed_text("thinking"))
            case "assistant", "tool_use":
                calls.append(_call(block))
            case "user", "tool_result":
                if texts:
                    yield {"role": "user", "content": "\n".join(texts)}
                    texts = []
                yield _result(block)
            case _:
                known = _BLOCKS_OF[str(role)]
                raise block.invalid("type", f"is not supported in a message of the {role}, which has {known}")
    shown: Message = {"role": role, "content": "\n".join(texts)}
    if calls:
        shown["tool_calls"] = calls
    if reasoning:
        shown["reasoning_content"] = "\n".join(reasoning)
    if texts or calls or reasoning or not content:
        yield shown


def _call(block: JsonFields) -> Message:
    arguments = block.raw("input")
    if not isinstance(arguments, dict):
        raise block.invalid("input", "must be an object")
    return {
        "type": "function",
        "function": {"name": block.needed_text("name", MAX_TOOL_NAME_CHARS), "arguments": arguments},
        "id": block.needed_text("id", MAX_CALL_ID_CHARS),
    }


def _result(block: JsonFields) -> Message:
    content = _text_of(block, "content") if block.present("content") else ""
    call_id = block.needed_text("tool_use_id", MAX_CALL_ID_CHARS)
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _text_of(holder: JsonFields, field: str) -> str:
    """A string, or a list of blocks of text."""
    if isinstance(text := holder.raw(field), str):
        return text
    texts = []
    for block in _blocks(holder, field):
        if block.raw("type") != "text":
            raise block.invalid("type", 'must be "text"; other blocks are not supported here')
        texts.append(block.needed_text("text"))
    return "\n".join(texts)


def _blocks(holder: JsonFields, field: str) -> Sequence[JsonFields]:
    if not isinstance(holder.raw(field), list):
        raise holder.invalid(field, "must be a string or a list of blocks")
    items = holder.items(field, MAX_BLOCKS) or []
    return [JsonFields.of_item(f"{holder.name(field)}[{index}]", item) for index, item in enumerate(items)]


# --- tools and thinking ------------------------------------------------------------------------------


def _may_call(fields: JsonFields) -> bool:
    choice = fields.nested("tool_choice")
    if choice is None:
        return True
    if choice.raw("type") not in ("auto", "any", "tool", "none"):
        raise choice.invalid("type", 'must be "auto", "any", "tool" or "none"')
    return choice.raw("type") != "none"


def _tools(fields: JsonFields) -> Iterator[Message]:
    """As descriptions of functions."""
    for index, item in enumerate(fields.items("tools", MAX_TOOLS) or ()):
        tool = JsonFields.of_item(f"tools[{index}]", item)
        if tool.raw("type") not in (None, "custom"):
            raise tool.invalid("type", 'must be "custom"; tools that a server runs are not supported')
        tool.require_unset("defer_loading", False)
        function: Message = {"name": tool.needed_text("name", MAX_TOOL_NAME_CHARS)}
        if tool.present("description"):
            function["description"] = tool.needed_text("description")
        if not isinstance(schema := tool.raw("input_schema"), dict):
            raise tool.invalid("input_schema", "must be a JSON schema, an object")
        if tool.flag("strict"):
            function["strict"] = True
        yield {"type": "function", "function": function | {"parameters": schema}}


def _template_arguments(fields: JsonFields) -> dict[str, object]:
    """Thinking is switched as templates have it: DeepSeek's by ``thinking``, GLM's by ``enable_thinking``."""
    arguments = template_arguments(fields)
    config = fields.nested("output_config")
    if config is not None and (effort := config.text("effort", MAX_EFFORT_CHARS)) is not None:
        arguments.setdefault("reasoning_effort", effort)
    if (thinking := fields.nested("thinking")) is not None:
        kind = thinking.raw("type")
        if kind not in ("adaptive", "disabled"):
            rule = 'must be "adaptive" or "disabled"'
            raise thinking.invalid("type", f"{rule}: a budget of thinking (budget_tokens) is not supported")
        thinking.require_unset("budget_tokens")
        thinking.require_unset("display", "summarized")
        for switch in ("thinking", "enable_thinking"):
            arguments.setdefault(switch, kind == "adaptive")
    return arguments
