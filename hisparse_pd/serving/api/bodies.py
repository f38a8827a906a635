"""Declarations of all endpoints' bodies: every field with its type and bounds.

Parsing (``declared_decoding.py``), its errors (``declared_errors.py``) and the OpenAPI document
(``openapi.py``) come from these declarations. Plain classes are groups of fields, which bodies inherit;
classes decorated with ``declared`` are whole objects. ``Annotated[Raw | None, unsupported(...)]`` is a field
that is refused unless its value is one of those listed. Any other ``Raw`` field stays JSON until its reader
takes it apart; ``raw`` and ``list_of`` describe it in the OpenAPI document, by names of classes that are
declared here or in the ``*_parts.py``. Within an ``AS_SPELLED`` field, numbers keep the client's spelling.
Annotations such as ``parts.FLAG`` are texts of errors. ``schemas.py`` adds defaults and checks fields against
each other. ``BODIES`` has each path's body.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from hisparse_pd.serving.api import anthropic_parts, openai_parts, responses_parts
from hisparse_pd.serving.api import body_parts as parts
from hisparse_pd.serving.api.declared import AS_SPELLED, declared, list_of, raw, reference, rule, unsupported

# Texts of errors about refused fields.
_TEMPLATE_WRITES = "is not supported: the chat template decides; leave the field out"

_ELSEWHERE = (
    "is not supported here: completions and chats take it, /generate json_schema, regex and ebnf within "
    "sampling_params, and responses structured_outputs"
)
_OLD_WORDS = "is not supported: vLLM calls it structured_outputs now"

_TOOL_CHOICE = raw(
    anyOf=[
        {"enum": ["none", "auto", "required"]},
        *map(reference, ("ChatToolChoice", "ChatAllowedChoice", "ToolChoice", "AllowedChoice")),
    ]
)

_RECORD_IDS: dict[str, object] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
# Schema of a journal record in the OpenAPI document; ``request_journal.py`` says what each entry is.
_RECORD: dict[str, object] = {"type": "array", "items": {"anyOf": [{"type": "integer"}, _RECORD_IDS]}}
_RECORD_BLOCKS = raw(
    type="array", items={"type": "array", "items": _RECORD}, maxItems=parts.MAX_RECORD_BLOCKS
)


# --- groups of fields ------------------------------------------------------------------------------------


class RefusedFields:
    """Fields of other servers that this one refuses, except for the values that ask for nothing."""

    allowed_token_ids: Annotated[Raw | None, unsupported([])]
    audio: Annotated[Raw | None, unsupported()]
    audio_data: Annotated[Raw | None, unsupported([])]
    bad_words: Annotated[Raw | None, unsupported([])]
    chat_template: Annotated[Raw | None, unsupported()]
    custom_logit_processor: Annotated[Raw | None, unsupported()]
    documents: Annotated[Raw | None, unsupported([])]
    function_call: Annotated[Raw | None, unsupported("none", "auto")]
    functions: Annotated[Raw | None, unsupported([])]
    guided_choice: Annotated[Raw | None, unsupported([], why=_OLD_WORDS)]
    guided_grammar: Annotated[Raw | None, unsupported(why=_OLD_WORDS)]
    guided_json: Annotated[Raw | None, unsupported(why=_OLD_WORDS)]
    guided_regex: Annotated[Raw | None, unsupported(why=_OLD_WORDS)]
    guided_whitespace_pattern: Annotated[Raw | None, unsupported()]
    image_data: Annotated[Raw | None, unsupported([])]
    input_embeds: Annotated[Raw | None, unsupported([])]
    logits_processors: Annotated[Raw | None, unsupported([])]
    lora_path: Annotated[Raw | None, unsupported([])]
    modalities: Annotated[Raw | None, unsupported(["text"])]
    prediction: Annotated[Raw | None, unsupported()]
    prompt_embeds: Annotated[Raw | None, unsupported([])]
    return_hidden_states: Annotated[Raw | None, unsupported(False)]
    return_routed_experts: Annotated[Raw | None, unsupported(False)]
    stop_regex: Annotated[Raw | None, unsupported([], "")]
    structural_tag: Annotated[Raw | None, unsupported()]
    suffix: Annotated[Raw | None, unsupported("")]
    thinking_token_budget: Annotated[Raw | None, unsupported()]
    truncate_prompt_tokens: Annotated[Raw | None, unsupported()]
    use_beam_search: Annotated[Raw | None, unsupported(False)]
    video_data: Annotated[Raw | None, unsupported([])]
    web_search_options: Annotated[Raw | None, unsupported()]


class VllmFormat:
    """The format of an answer, in vLLM's field."""

    structured_outputs: parts.StructuredOutputs | None


class SglangFormat:
    """The format of an answer, in SGLang's fields."""

    json_schema: Annotated[parts.JsonSchema | None, parts.A_SCHEMA, AS_SPELLED]
    regex: parts.RegexText | None
    ebnf: parts.GrammarText | None


class NoVllmFormat:
    """vLLM's field of an answer's format, on endpoints that refuse it."""

    structured_outputs: Annotated[Raw | None, unsupported(why=_ELSEWHERE)]


class NoSglangFormat:
    """SGLang's fields of an answer's format, on endpoints that refuse them."""

    json_schema: Annotated[Raw | None, unsupported(why=_ELSEWHERE)]
    regex: Annotated[Raw | None, unsupported(why=_ELSEWHERE)]
    ebnf: Annotated[Raw | None, unsupported(why=_ELSEWHERE)]


class NoOpenAIExtras:
    """Fields of completions and chat completions, on endpoints that refuse them."""

    echo: Annotated[Raw | None, unsupported(False)]
    prompt_logprobs: Annotated[Raw | None, unsupported()]
    return_token_ids: Annotated[Raw | None, unsupported(False)]
    return_tokens_as_token_ids: Annotated[Raw | None, unsupported(False)]


class ModelBody:
    """Bodies that may name the model, which must be the served one."""

    model: parts.Name | None


class GeneratingBody(ModelBody):
    """Bodies of requests that generate. A router adds its journal and the bootstrap fields, each of which is
    one value for all samples, or a list with an entry for each prompt or each sample."""

    stream: bool | None
    speculative: bool | None
    hisparse: Annotated[bool | Literal["auto"] | None, parts.FLAG]
    bootstrap_host: Annotated[
        str | Annotated[list[str], Meta(max_length=parts.MAX_SAMPLES)] | None, parts.HOST
    ]
    bootstrap_port: parts.Port | Annotated[list[parts.Port | None], Meta(max_length=parts.MAX_SAMPLES)] | None
    bootstrap_room: parts.Room | Annotated[list[parts.Room], Meta(max_length=parts.MAX_SAMPLES)] | None
    journal: parts.JournalHead | None
    journal_records: Annotated[Raw | None, _RECORD_BLOCKS]
    cache_salt: parts.IsolationKeys | None
    extra_key: parts.IsolationKeys | None


class SamplingFields:
    """How tokens are drawn, and where an answer ends (``sampling_defaults.py`` has the defaults)."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None
    top_k: Annotated[int, Meta(ge=-1, le=parts.MAX_TOKENS)] | None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None
    presence_penalty: parts.Penalty | None
    frequency_penalty: parts.Penalty | None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None
    logit_bias: parts.Biases | None
    ignore_eos: bool | None
    stop_token_ids: parts.StopTokenIds | None
    skip_special_tokens: bool | None
    no_stop_trim: bool | None
    include_stop_str_in_output: bool | None


class MinTokensAndSeed:
    """Fewest tokens of an answer, and the seed."""

    min_tokens: parts.Count | None
    seed: parts.Seed | None


class OneSampleOnly:
    """Endpoints that give one sample."""

    n: Annotated[Raw | None, unsupported(1)]


class OpenAI(GeneratingBody, SamplingFields, MinTokensAndSeed, VllmFormat, SglangFormat, RefusedFields):
    """Fields of completions and of chats."""

    max_tokens: parts.Count | None
    max_completion_tokens: parts.Count | None
    prompt_logprobs: parts.NumLogprobs | None
    n: parts.NumSamples | None
    best_of: parts.NumSamples | None
    stop: parts.StopString | parts.StopStrings | None
    stream_options: openai_parts.StreamOptions | None
    response_format: openai_parts.ResponseFormat | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Logprobs name tokens token_id:N, not by their texts.")
    ]


class TemplateFields:
    """Arguments for the chat template."""

    chat_template_kwargs: dict[str, Any] | None


class Conversation(TemplateFields):
    """A conversation in OpenAI's fields."""

    messages: Annotated[Raw | None, list_of(parts.MAX_MESSAGES, "ChatMessage")]
    tools: Annotated[Raw | None, list_of(parts.MAX_TOOLS, "Tool", min_items=0)]
    tool_choice: Annotated[Raw | None, _TOOL_CHOICE]
    parallel_tool_calls: bool | None
    reasoning_effort: parts.Effort | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None
    separate_reasoning: bool | None


class AnthropicConversation(
    ModelBody, TemplateFields, NoVllmFormat, NoSglangFormat, NoOpenAIExtras, RefusedFields
):
    """A conversation in Anthropic's fields."""

    system: str | Annotated[list[parts.TextBlock], Meta(max_length=parts.MAX_PARTS)] | None
    messages: Annotated[
        Raw | None, list_of(parts.MAX_MESSAGES, "UserMessage", "AssistantMessage", "SystemMessage")
    ]
    tools: Annotated[Raw | None, list_of(parts.MAX_TOOLS, "AnthropicTool", "HostedTool", min_items=0)]
    tool_choice: anthropic_parts.AnthropicChoice | None
    thinking: anthropic_parts.Thinking | None
    output_config: anthropic_parts.OutputConfig | None
    container: Annotated[Raw | None, unsupported()]
    context_management: anthropic_parts.ContextManagement | None
    diagnostics: Annotated[Raw | None, unsupported()]
    inference_geo: Annotated[Raw | None, unsupported()]
    mcp_servers: Annotated[Raw | None, unsupported([])]
    output_format: anthropic_parts.AnthropicFormat | None
    speed: Annotated[Raw | None, unsupported("standard")]


# --- bodies ----------------------------------------------------------------------------------------------

_PROMPT_TEXT: dict[str, object] = {"type": "string", "minLength": 1}
_PROMPT_IDS: dict[str, object] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": parts.MAX_TOKEN_ID},
    "minItems": 1,
}


def _or_list(schema: dict[str, object]) -> list[dict[str, object]]:
    """Return the schemas of one prompt and of a list of prompts."""
    return [schema, {"type": "array", "items": schema, "minItems": 1, "maxItems": parts.MAX_PROMPTS}]


Included = Annotated[
    Literal[
        "reasoning.encrypted_content",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    ],
    rule("is not supported"),
]
"""What an answer may be asked to include. Reasoning is shown unencrypted in any case; the other values are
about items that no answer has."""

_INPUT_ITEMS = (
    *("InputMessage", "AnswerMessage", "FunctionCall", "CustomToolCall", "CallOutput"),
    *("ReasoningItem", "AdditionalTools", "ItemReference"),
)


@declared
class CompletionsBody(OpenAI):
    """``/v1/completions``, OpenAI's. It takes a list of prompts, too."""

    prompt: Annotated[Raw | None, raw(anyOf=[*_or_list(_PROMPT_TEXT), *_or_list(_PROMPT_IDS)])]
    logprobs: parts.NumLogprobs | None
    echo: bool | None
    add_special_tokens: Annotated[Raw | None, unsupported(True)]
    tools: Annotated[Raw | None, unsupported([])]


@declared
class ChatBody(OpenAI, Conversation):
    """``/v1/chat/completions``, OpenAI's."""

    logprobs: bool | None
    top_logprobs: parts.NumLogprobs | None
    metadata: parts.Labels | None
    add_special_tokens: Annotated[Raw | None, unsupported(False, why=_TEMPLATE_WRITES)]
    echo: Annotated[Raw | None, unsupported(False)]


@declared
class SamplingParams(SamplingFields, NoVllmFormat, SglangFormat, RefusedFields):
    """``sampling_params`` of ``/generate``."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None
    max_new_tokens: parts.Count | None
    min_new_tokens: parts.Count | None
    sampling_seed: parts.Seed | None
    n: parts.NumSamples | None
    stop: parts.StopString | parts.StopStrings | None


@declared
class GenerateBody(GeneratingBody, NoVllmFormat, NoSglangFormat, NoOpenAIExtras, RefusedFields):
    """``/generate``, SGLang's. One of text and input_ids is needed."""

    text: Annotated[Raw | None, raw(anyOf=_or_list(_PROMPT_TEXT))]
    input_ids: Annotated[Raw | None, raw(anyOf=_or_list(_PROMPT_IDS))]
    sampling_params: Annotated[Raw | None, raw(anyOf=_or_list(reference("SamplingParams")))]
    rid: parts.Name | Annotated[list[parts.Name], Meta(max_length=parts.MAX_PROMPTS)] | None
    return_logprob: bool | None
    top_logprobs_num: parts.NumLogprobs | None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=parts.MAX_TOKENS)] | None
    token_ids_logprob: Annotated[Raw | None, unsupported([])]
    return_text_in_logprobs: bool | None
    custom_labels: parts.Labels | None
    tools: Annotated[Raw | None, unsupported([])]


@declared
class MessagesBody(GeneratingBody, AnthropicConversation, SamplingFields, MinTokensAndSeed, OneSampleOnly):
    """``/v1/messages``, Anthropic's."""

    max_tokens: parts.NewTokens
    temperature: Annotated[float, Meta(ge=0, le=1)] | None
    stop_sequences: parts.StopStrings | None
    metadata: parts.Labels | None


@declared
class CountTokensBody(AnthropicConversation):
    """``/v1/messages/count_tokens``, Anthropic's."""


@declared
class ResponsesBody(
    GeneratingBody,
    TemplateFields,
    SamplingFields,
    MinTokensAndSeed,
    OneSampleOnly,
    VllmFormat,
    NoSglangFormat,
    NoOpenAIExtras,
    RefusedFields,
):
    """``/v1/responses``, OpenAI's. Nothing is stored: ``input`` is the whole conversation."""

    input: Annotated[Raw | None, list_of(parts.MAX_MESSAGES, *_INPUT_ITEMS, besides=_PROMPT_TEXT)]
    instructions: str | None
    max_output_tokens: parts.NewTokens | None
    stop: parts.StopString | parts.StopStrings | None
    tools: Annotated[Raw | None, list_of(parts.MAX_TOOLS, *responses_parts.RESPONSES_TOOLS, min_items=0)]
    reasoning: responses_parts.Reasoning | None
    text: responses_parts.TextOptions | None
    include: Annotated[list[Included], Meta(max_length=parts.MAX_PARTS)] | None
    metadata: Annotated[Raw | None, raw(**reference("Labels"))]  # the answer repeats it as it was sent
    max_tool_calls: int | None
    user: str | None
    safety_identifier: str | None
    background: Annotated[Raw | None, unsupported(False)]
    background_options: Annotated[Raw | None, unsupported()]
    context_management: Annotated[Raw | None, unsupported([])]
    conversation: Annotated[Raw | None, unsupported()]
    image: Annotated[Raw | None, unsupported()]
    moderation: Annotated[Raw | None, unsupported()]
    parallel_tool_calls: bool | None
    previous_response_id: Annotated[Raw | None, unsupported()]
    prompt: Annotated[Raw | None, unsupported()]
    store: Annotated[Raw | None, unsupported(False)]
    tool_choice: Annotated[Raw | None, _TOOL_CHOICE]
    top_logprobs: Annotated[Raw | None, unsupported(0)]
    truncation: Annotated[Raw | None, unsupported("disabled")]


@declared
class TokenizeBody(ModelBody, Conversation, NoVllmFormat, NoSglangFormat, NoOpenAIExtras, RefusedFields):
    """``/tokenize``, vLLM's. One of prompt and messages is needed."""

    prompt: Annotated[Raw | None, raw(**_PROMPT_TEXT)]
    add_special_tokens: bool | None
    return_token_strs: bool | None


@declared
class DetokenizeBody(ModelBody):
    """``/detokenize``, vLLM's."""

    tokens: Annotated[Raw | None, raw(**_PROMPT_IDS)]


class Endpoint(StrEnum):
    """Paths of requests that generate, which a router relays to a pair of nodes."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    GENERATE = "/generate"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


class TokenPath(StrEnum):
    """Paths about tokens, vLLM's and Anthropic's, which any decode node answers."""

    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    COUNT_TOKENS = "/v1/messages/count_tokens"


BODIES: dict[str, type[Any]] = {
    Endpoint.COMPLETIONS: CompletionsBody,
    Endpoint.CHAT: ChatBody,
    Endpoint.GENERATE: GenerateBody,
    Endpoint.MESSAGES: MessagesBody,
    Endpoint.RESPONSES: ResponsesBody,
    TokenPath.TOKENIZE: TokenizeBody,
    TokenPath.DETOKENIZE: DetokenizeBody,
    TokenPath.COUNT_TOKENS: CountTokensBody,
}
"""Bodies by their paths."""
