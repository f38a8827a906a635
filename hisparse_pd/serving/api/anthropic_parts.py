"""Declarations of the objects within bodies of Anthropic's messages, for ``bodies.py`` and the readers of
conversations.

Docstrings of the classes are their descriptions in ``/openapi.json``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from hisparse_pd.serving.api.body_parts import (
    A_SCHEMA,
    MAX_MESSAGES,
    MAX_PARTS,
    Effort,
    JsonSchema,
    NewTokens,
    NonEmptyName,
    TextBlock,
)
from hisparse_pd.serving.api.declared import (
    AS_SPELLED,
    declared,
    rule,
    tagged,
)


@declared
class AnthropicFormat:
    type: Literal["json_schema"]
    schema: Annotated[JsonSchema, A_SCHEMA, AS_SPELLED]


@tagged("type", "thinking")
class ThinkingBlock:
    """Thinking of the assistant. The signature is read where the text was omitted."""

    # If ``thinking`` is "", the text is read from the signature that this service gave the block when it
    # omitted the text (``anthropic_messages.signature_of``).
    thinking: str
    signature: str | None


@tagged("type", "redacted_thinking")
class RedactedThinking:
    """Thinking that only its author can read. It is left out."""


@tagged("type", "image")
class ImageBlock:
    """An image in a result that the assistant has answered, shown as ``[image]``."""


@tagged("type", "document")
class DocumentBlock:
    """A document in a result that the assistant has answered, shown as ``[document]``."""


@tagged("type", "tool_reference")
class ToolReference:
    """A tool that was searched for. All tools are shown from the start."""

    tool_name: NonEmptyName


@tagged("type", "tool_use")
class ToolUse:
    id: NonEmptyName
    name: NonEmptyName
    input: dict[str, Any]


ResultBlock = TextBlock | ImageBlock | DocumentBlock | ToolReference


@tagged("type", "tool_result")
class ToolResult:
    tool_use_id: NonEmptyName
    content: str | Annotated[list[ResultBlock], Meta(max_length=MAX_PARTS)] | None


UserBlock = TextBlock | ToolResult | ImageBlock | DocumentBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinking | ToolUse


@tagged("role", "user")
class UserMessage:
    content: str | Annotated[list[UserBlock], Meta(max_length=MAX_PARTS)]


@tagged("role", "assistant")
class AssistantMessage:
    content: str | Annotated[list[AssistantBlock], Meta(max_length=MAX_PARTS)] | None


@tagged("role", "system")
class SystemMessage:
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]


AnthropicMessage = UserMessage | AssistantMessage | SystemMessage


@declared
class AnthropicTool:
    type: Annotated[
        Literal["custom"] | None,
        rule('must be "custom"; tools that the API itself defines are not supported'),
    ]
    name: NonEmptyName
    description: str | None
    strict: bool | None
    input_schema: Annotated[dict[str, Any], rule("must be a JSON schema, an object"), AS_SPELLED]


@declared
class AnthropicChoice:
    type: Literal["auto", "any", "tool", "none"]
    name: NonEmptyName | None
    disable_parallel_tool_use: bool | None


@declared
class Thinking:
    """Switches thinking. All types but ``disabled`` switch it on."""

    type: Literal["adaptive", "enabled", "between_tools", "disabled"]
    budget_tokens: Annotated[NewTokens | None, Meta(description="A hint: max_tokens is the only bound.")]
    display: Literal["summarized", "omitted"] | None


@declared
class KeptThinking:
    type: Literal["thinking_turns", "all"]
    # The number of the last turns that keep their thinking; not used with "all".
    value: Annotated[int, Meta(ge=1, le=MAX_MESSAGES)] | None


@declared
class ContextEdit:
    type: Annotated[
        Literal["clear_thinking_20251015"],
        rule('must be "clear_thinking_20251015"; other edits of the conversation are not supported'),
    ]
    keep: Literal["all"] | KeptThinking | None


@declared
class ContextManagement:
    edits: Annotated[list[ContextEdit], Meta(max_length=MAX_PARTS)] | None


@declared
class OutputConfig:
    effort: Effort | None
    format: AnthropicFormat | None
