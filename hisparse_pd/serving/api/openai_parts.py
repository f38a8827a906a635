"""Declarations of the objects within bodies of OpenAI's completions and chat completions, for ``bodies.py``
and the readers of conversations.

Docstrings of the classes are their descriptions in ``/openapi.json``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from hisparse_pd.serving.api.body_parts import (
    A_SCHEMA,
    MAX_CALLS,
    MAX_PARTS,
    MAX_TOOLS,
    ArgumentsText,
    JsonSchema,
    NonEmptyName,
    Refusal,
    TextBlock,
)
from hisparse_pd.serving.api.declared import (
    AS_SPELLED,
    declared,
    list_of,
    rule,
    unsupported,
)

_FUNCTIONS_ONLY = rule('must be "function"; other tools are not supported')


@declared
class StreamOptions:
    include_usage: bool | None
    continuous_usage_stats: bool | None


@declared
class DescribedSchema:
    schema: Annotated[JsonSchema, A_SCHEMA, AS_SPELLED]


@declared
class ResponseFormat:
    """The format of an answer to a chat or completion."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: DescribedSchema | None


@declared
class NamedFunction:
    name: NonEmptyName


@declared
class ChatToolChoice:
    type: Annotated[Literal["function"], _FUNCTIONS_ONLY]
    function: NamedFunction


@declared
class ChatAllowed:
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChatToolChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


@declared
class ChatAllowedChoice:
    allowed_tools: ChatAllowed


# Fields that are not declared, such as a description, are shown to the model as they are.
@declared
class Function:
    name: NonEmptyName
    parameters: Annotated[dict[str, Any] | None, rule("must be a JSON schema, an object"), AS_SPELLED]


@declared
class Tool:
    type: Annotated[Literal["function"], _FUNCTIONS_ONLY]
    function: Function


@declared
class CalledFunction:
    name: NonEmptyName
    arguments: ArgumentsText | None


@declared
class Call:
    id: Annotated[str, Meta(max_length=256)] | None
    function: CalledFunction


@declared
class ChatMessage:
    """A message of a chat. Assistants' and tools' messages may lack content, which is then an empty text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextBlock | Refusal], Meta(max_length=MAX_PARTS)] | None
    refusal: Annotated[str | None, Meta(description="Text of the assistant.")]
    reasoning_content: str | None
    reasoning: Annotated[
        str | None, Meta(description="vLLM's name of reasoning_content, which has precedence.")
    ]
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_CALLS)] | None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None
    # Tools that a message of the roles "system" and "developer" describes, beside those of the body.
    tools: Annotated[Raw | None, list_of(MAX_TOOLS, "Tool", min_items=0)]
    function_call: Annotated[Raw | None, unsupported()]
    response_format: Annotated[Raw | None, unsupported()]
