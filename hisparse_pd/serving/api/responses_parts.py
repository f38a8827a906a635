"""Declarations of the objects within bodies of OpenAI's responses, for ``bodies.py`` and the readers of
conversations.

Docstrings of the classes are their descriptions in ``/openapi.json``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from hisparse_pd.serving.api.body_parts import (
    A_SCHEMA,
    MAX_PARTS,
    MAX_TOOLS,
    ArgumentsText,
    Effort,
    GrammarText,
    JsonSchema,
    NeededName,
    Refusal,
)
from hisparse_pd.serving.api.declared import (
    AS_SPELLED,
    declared,
    list_of,
    raw,
    reference,
    rule,
    tagged,
)

RESPONSES_TOOLS = ("ResponsesTool", "CustomTool", "NamespaceTool", "HostedTool")


@declared
class TextFormat:
    """The format of an answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Annotated[JsonSchema | None, A_SCHEMA, AS_SPELLED]


@declared
class ToolChoice:
    """The tool to call. Without ``namespace`` it must be the only tool of that name."""

    type: Annotated[
        Literal["function", "custom"], rule('must be "function" or "custom"; other tools are not supported')
    ]
    name: NeededName
    namespace: NeededName | None


@declared
class AllowedChoice:
    """The tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


@tagged("type", "input_text")
class InputText:
    text: str


@tagged("type", "output_text")
class OutputText:
    text: str


@tagged("type", "reasoning_text")
class ReasoningText:
    text: str


@tagged("type", "input_image")
class InputImage:
    """An image in an output that the assistant has answered, shown as ``[image]``."""


@tagged("type", "input_file")
class InputFile:
    """A file in an output that the assistant has answered, shown as ``[file]``."""


OutputPart = InputText | InputImage | InputFile


@declared
class InputMessage:
    type: Literal["message"] | None
    role: Literal["user", "system", "developer"]
    content: str | Annotated[list[InputText], Meta(max_length=MAX_PARTS)]


@declared
class AnswerMessage:
    type: Literal["message"] | None
    role: Literal["assistant"]
    content: str | Annotated[list[OutputText | InputText | Refusal], Meta(max_length=MAX_PARTS)] | None


@tagged("type", "function_call")
class FunctionCall:
    call_id: NeededName
    name: NeededName
    namespace: NeededName | None
    arguments: ArgumentsText | None


@tagged("type", "custom_tool_call")
class CustomToolCall:
    call_id: NeededName
    name: NeededName
    namespace: NeededName | None
    input: ArgumentsText


@declared
class CallOutput:
    """The output of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NeededName
    output: str | Annotated[list[OutputPart], Meta(max_length=MAX_PARTS)] | None


@tagged("type", "reasoning")
class ReasoningItem:
    """Reasoning of the assistant. ``encrypted_content``, which only its author can read, is left out."""

    content: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None


@tagged("type", "item_reference")
class ItemReference:
    """A reference to an item of the same input, which is shown once, at the first of its places."""

    id: NeededName


# How ``openai_responses.py`` reads the id of any item, to which an ItemReference may refer.
@declared
class NamedItem:
    id: str | None


@tagged("type", "additional_tools")
class AdditionalTools:
    """Further tools, shown with those of the request."""

    tools: Annotated[Raw | None, list_of(MAX_TOOLS, *RESPONSES_TOOLS, min_items=0)]


@tagged("type", "function")
class ResponsesTool:
    name: NeededName
    description: str | None
    parameters: Annotated[dict[str, Any] | None, rule("must be a JSON schema, an object"), AS_SPELLED]


@declared
class CustomFormat:
    """The format of a custom tool's text. It is shown to the model, and not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None
    definition: GrammarText | None


@tagged("type", "custom")
class CustomTool:
    """A tool that takes a text."""

    name: NeededName
    description: str | None
    format: CustomFormat | None


@tagged("type", "namespace")
class NamespaceTool:
    """Tools that are called by the namespace's name and their own."""

    name: NeededName
    description: str | None
    tools: Annotated[Raw | None, list_of(MAX_TOOLS, "ResponsesTool", "CustomTool", min_items=0)]


Summary = Literal["auto", "concise", "detailed"]


@declared
class Reasoning:
    effort: Effort | None
    summary: Annotated[Summary | None, Meta(description="A hint: all reasoning is shown.")]
    generate_summary: Annotated[Summary | None, Meta(description="Older name of summary.")]


@declared
class TextOptions:
    format: Annotated[Raw | None, raw(**reference("TextFormat"))]
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Meta(description="A hint, not followed.")]
