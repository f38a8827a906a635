"""The objects within bodies, declared, and the bounded types that their fields and those of bodies have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from hisparse_pd.base.vocabulary import MAX_LOGIT_BIAS
from hisparse_pd.protocol.prompt_scores import MAX_LOGPROBS
from hisparse_pd.serving.api.declared import (
    AS_SPELLED,
    declared,
    list_of,
    raw,
    reference,
    rule,
    tagged,
    unsupported,
)
from hisparse_pd.serving.api.raw_json import MAX_FIELD_BYTES

MAX_SAMPLES = 4096
"""Samples of one request at most: prompts times n."""
MAX_SAMPLES_PER_PROMPT = 128
MAX_PROMPTS = 4096
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Of a message: parts, blocks."""
MAX_TOOLS = 256
MAX_CALLS = 256
MAX_TOKEN_ID = 2**31 - 1
MAX_ROOM = 2**63 - 1
MAX_RECORD_BLOCKS = 256
"""Of a journal, in a body: as many as fit at 64 KiB each."""

MAX_TOKENS = 2**31 - 1

Name = Annotated[str, Meta(max_length=1024)]
NeededName = Annotated[str, Meta(min_length=1, max_length=256)]
"""Of a tool or a call."""
Effort = Annotated[str, Meta(max_length=64)]
NewTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Minimum = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
NumSamples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES_PER_PROMPT)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=256)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
_TOKEN_KEY = "^(0|[1-9][0-9]{0,9})$"
Biases = Annotated[
    dict[TokenId, Bias],
    Meta(max_length=MAX_LOGIT_BIAS, extra_json_schema={"propertyNames": {"pattern": _TOKEN_KEY}}),
]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
IsolationKey = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        description="KV is shared only among requests with the same cache_salt and extra_key.",
    ),
]
IsolationKeys = IsolationKey | Annotated[list[IsolationKey | None], Meta(max_length=MAX_PROMPTS)]
"""One for all prompts of a request, or one a prompt."""
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Room = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Port = Annotated[int, Meta(ge=1, le=65535)]
JsonSchema = dict[str, Any] | Annotated[str, Meta(min_length=1, max_length=128 << 10)]
A_SCHEMA = rule("must be a JSON schema, an object or its text of 1 to 131072 characters")
RegexText = Annotated[str, Meta(min_length=1, max_length=16 << 10)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=64 << 10)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=1024)]
ArgumentsText = Annotated[str, Meta(max_length=MAX_FIELD_BYTES)]

RESPONSES_TOOLS = ("ResponsesTool", "CustomTool", "NamespaceTool", "HostedTool")

FLAG = rule('must be true, false or "auto"')
HOST = rule("must be a host name or an address")
_FUNCTIONS_ONLY = rule('must be "function"; other tools are not supported')
HOSTED_TOOL = (
    "^(advisor|code_execution|code_interpreter|file_search|image_generation|mcp|programmatic_tool_calling"
    "|tool_search|web_fetch|web_search)(_[a-z0-9_]{1,64})?$"
)
"""The type of a tool that a server of the API's vendor runs, with or without a version."""


@declared
class Labels:
    """What public routers let pass, of fields that they drop elsewhere."""

    hisparse: Annotated[bool | Literal["true", "false", "auto"] | None, FLAG]
    cache_salt: IsolationKey | None
    extra_key: IsolationKey | None


@declared
class JournalHead:
    """What a router says of an answer that may go on at another node: what is drawn once for it."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    created: Annotated[int, Meta(ge=0, le=2**53)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    may_move: bool | None
    num_resumes: Minimum | None


@declared
class StreamOptions:
    include_usage: bool | None
    continuous_usage_stats: bool | None


@declared
class DescribedSchema:
    schema: Annotated[JsonSchema, A_SCHEMA, AS_SPELLED]


@declared
class ResponseFormat:
    """Of chats and completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: DescribedSchema | None


@declared
class TextFormat:
    """Of responses."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Annotated[JsonSchema | None, A_SCHEMA, AS_SPELLED]


@declared
class AnthropicFormat:
    type: Literal["json_schema"]
    schema: Annotated[JsonSchema, A_SCHEMA, AS_SPELLED]


@declared
class StructuredOutputs:
    """vLLM's."""

    json: Annotated[JsonSchema | None, A_SCHEMA, AS_SPELLED]
    regex: RegexText | None
    choice: Choices | None
    grammar: GrammarText | None
    json_object: bool | None
    structural_tag: Annotated[Raw | None, unsupported()]
    disable_any_whitespace: Annotated[Raw | None, unsupported(False)]
    disable_additional_properties: Annotated[Raw | None, unsupported(False)]
    whitespace_pattern: Annotated[Raw | None, unsupported()]


@declared
class NamedFunction:
    name: NeededName


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


@declared
class ToolChoice:
    """Of responses. Without ``namespace`` the only tool of that name."""

    type: Annotated[
        Literal["function", "custom"], rule('must be "function" or "custom"; other tools are not supported')
    ]
    name: NeededName
    namespace: NeededName | None


@declared
class AllowedChoice:
    """Of responses."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


@declared
class Function:
    name: NeededName
    parameters: Annotated[dict[str, Any] | None, rule("must be a JSON schema, an object"), AS_SPELLED]


@declared
class Tool:
    type: Annotated[Literal["function"], _FUNCTIONS_ONLY]
    function: Function


@declared
class CalledFunction:
    name: NeededName
    arguments: ArgumentsText | None


@declared
class Call:
    id: Annotated[str, Meta(max_length=256)] | None
    function: CalledFunction


@tagged("type", "text")
class TextBlock:
    text: str


@tagged("type", "refusal")
class Refusal:
    """Text of the assistant."""

    refusal: str


@declared
class ChatMessage:
    """Without content, one of the assistant or of a tool is an empty text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextBlock | Refusal], Meta(max_length=MAX_PARTS)] | None
    refusal: Annotated[str | None, Meta(description="Text of the assistant.")]
    reasoning_content: str | None
    reasoning: Annotated[str | None, Meta(description="vLLM's name of reasoning_content, which comes first.")]
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_CALLS)] | None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None
    tools: Annotated[Raw | None, list_of(MAX_TOOLS, "Tool", min_items=0)]
    function_call: Annotated[Raw | None, unsupported()]
    response_format: Annotated[Raw | None, unsupported()]


@tagged("type", "thinking")
class ThinkingBlock:
    """Its signature is read where its text was omitted."""

    thinking: str
    signature: str | None


@tagged("type", "redacted_thinking")
class RedactedThinking:
    """Thinking that only its author can read: left out."""


@tagged("type", "image")
class ImageBlock:
    """In a result that the assistant has answered: shown as ``[image]``."""


@tagged("type", "document")
class DocumentBlock:
    """In a result that the assistant has answered: shown as ``[document]``."""


@tagged("type", "tool_reference")
class ToolReference:
    """Of a tool that was searched for. All tools are shown from the start."""

    tool_name: NeededName


@tagged("type", "tool_use")
class ToolUse:
    id: NeededName
    name: NeededName
    input: dict[str, Any]


ResultBlock = TextBlock | ImageBlock | DocumentBlock | ToolReference


@tagged("type", "tool_result")
class ToolResult:
    tool_use_id: NeededName
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
    name: NeededName
    description: str | None
    strict: bool | None
    input_schema: Annotated[dict[str, Any], rule("must be a JSON schema, an object"), AS_SPELLED]


@declared
class HostedTool:
    """Run by a server of the API's vendor: left out beside other tools, and refused alone."""

    type: Annotated[str, Meta(pattern=HOSTED_TOOL)]


@declared
class AnthropicChoice:
    type: Literal["auto", "any", "tool", "none"]
    name: NeededName | None
    disable_parallel_tool_use: bool | None


@declared
class Thinking:
    """All types but ``disabled`` switch it on."""

    type: Literal["adaptive", "enabled", "between_tools", "disabled"]
    budget_tokens: Annotated[NewTokens | None, Meta(description="A hint: max_tokens is the only bound.")]
    display: Literal["summarized", "omitted"] | None


@declared
class KeptThinking:
    type: Literal["thinking_turns", "all"]
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
    """In an output that the assistant has answered: shown as ``[image]``."""


@tagged("type", "input_file")
class InputFile:
    """In an output that the assistant has answered: shown as ``[file]``."""


OutputPart = InputText | InputImage | InputFile


@declared
class ItemKind:
    """By which an item of ``input``, or a tool, is told from others: an item may lack its type."""

    type: str | None
    role: str | None


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
    """What a function or a custom tool gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NeededName
    output: str | Annotated[list[OutputPart], Meta(max_length=MAX_PARTS)] | None


@tagged("type", "reasoning")
class ReasoningItem:
    """``encrypted_content``, which only its author can read, is left out."""

    content: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None


@tagged("type", "item_reference")
class ItemReference:
    """An item of the same input, which is shown once, at the first of its places."""

    id: NeededName


@declared
class NamedItem:
    id: str | None


@tagged("type", "additional_tools")
class AdditionalTools:
    """Tools that are shown with those of the request."""

    tools: Annotated[Raw | None, list_of(MAX_TOOLS, *RESPONSES_TOOLS, min_items=0)]


@tagged("type", "function")
class ResponsesTool:
    name: NeededName
    description: str | None
    parameters: Annotated[dict[str, Any] | None, rule("must be a JSON schema, an object"), AS_SPELLED]


@declared
class CustomFormat:
    """Shown to the model, and not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None
    definition: GrammarText | None


@tagged("type", "custom")
class CustomTool:
    """Takes a text."""

    name: NeededName
    description: str | None
    format: CustomFormat | None


@tagged("type", "namespace")
class NamespaceTool:
    """Tools that are called by its name and theirs."""

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
