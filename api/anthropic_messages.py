"""The conversation of ``/v1/messages``, Anthropic's, as the one that a chat completion would have.

Blocks become what chat templates know: text, reasoning, calls and results of tools. Texts of one message are
joined by nothing, as in the other APIs. What a model behind a chat template cannot take is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Raw

from api.bodies import Turns
from api.body_parts import (
    AnthropicMessage,
    AnthropicTool,
    AssistantMessage,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResult,
    ToolUse,
    UserMessage,
)
from api.declared import decode
from api.prompts import ChatPrompt, described_tools, message_items, template_arguments
from service.http_errors import InvalidField

Message = dict[str, object]


def parse_messages(body: Turns) -> ChatPrompt:
    """Raises ApiError 400."""
    messages: list[Message] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text_of(body.system)})
    items = message_items("messages", body.messages)
    for name, item in items:
        messages += _messages_of(name, item)
    last = messages[-1]
    is_continued = last["role"] == "assistant"
    if is_continued and "tool_calls" in last:
        rule = "must not end with a tool_use, but with its tool_result"
        raise InvalidField("messages", items, rule)
    may_call = body.tool_choice is None or body.tool_choice.type != "none"
    tools = tuple(_tools(body.tools))
    return ChatPrompt(
        tuple(messages),
        _template_arguments(body),
        continue_final_message=is_continued,
        tools=tools if may_call else (),
        separate_reasoning=True,
        add_generation_prompt=not is_continued,
    )


def _messages_of(name: str, item: Raw) -> Iterator[Message]:
    """Of one message: a result of a tool is a message of its own."""
    message = decode(AnthropicMessage, item, name)
    role = _ROLES[type(message)]
    if isinstance(message.content, str):
        yield {"role": role, "content": message.content}
        return
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Message] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUse():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"type": "function", "function": function, "id": block.id})
            case ToolResult():
                if texts:
                    yield {"role": "user", "content": "".join(texts)}
                    texts = []
                content = _text_of(block.content or "")
                yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
    shown: Message = {"role": role, "content": "".join(texts)}
    if calls:
        shown["tool_calls"] = calls
    if reasoning:
        shown["reasoning_content"] = "".join(reasoning)
    if texts or calls or reasoning or not message.content:
        yield shown


_ROLES = {UserMessage: "user", AssistantMessage: "assistant", SystemMessage: "system"}


def _text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tools(tools: Raw | None) -> Iterator[Message]:
    """As descriptions of functions."""
    for tool in described_tools("tools", tools, AnthropicTool):
        function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        if tool.get("strict"):
            function["strict"] = True
        yield {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _template_arguments(body: Turns) -> dict[str, object]:
    """Thinking is switched as templates have it: DeepSeek's by ``thinking``, GLM's by ``enable_thinking``."""
    arguments = template_arguments(body)
    if body.output_config is not None and body.output_config.effort is not None:
        arguments.setdefault("reasoning_effort", body.output_config.effort)
    if body.thinking is not None:
        for switch in ("thinking", "enable_thinking"):
            arguments.setdefault(switch, body.thinking.type == "adaptive")
    return arguments
