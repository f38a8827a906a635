"""The bodies of the endpoints that generate, parsed and checked.

Prefill and decode nodes get the same body and parse it with the same code into an ``ApiRequest``, so both
see the same samples, the same rooms and the same seeds. Whatever needs no tokenizer is checked here;
``requests.py`` does the rest. Unknown fields are ignored; a known field that asks for something unsupported
is an error.

Rooms: a prompt's first sample uses the router's room, the others derive theirs from it (``derive_room``),
unless the router sent one room a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from api.anthropic_messages import parse_messages
from api.constraints import (
    Constraint,
    chat_constraint,
    completion_constraint,
    messages_constraint,
    refuse_formats,
    responses_constraint,
)
from api.json_fields import JsonFields, is_integer, within
from api.openai_responses import parse_responses
from api.prompts import ChatPrompt, Prompt, generate_prompt_field, parse_chat_prompt, parse_prompts
from api.sampling_defaults import SamplingDefaults
from api.sampling_options import (
    COMPLETIONS_DEFAULT_TOKENS,
    SampleOptions,
    chat_logprobs,
    completion_logprobs,
    parse_generate_options,
    parse_messages_options,
    parse_openai_options,
    parse_responses_options,
    refuse_unsupported,
)
from protocol.access import is_host
from service.http_errors import ApiError, InvalidField
from service.settings import PrefillSettings
from vocabulary import HisparseFlag

DEFAULT_BOOTSTRAP_PORT: int = PrefillSettings.model_fields["bootstrap_port"].default
"""Where a decode node looks when ``bootstrap_port`` is null: a prefill node's default port."""

MAX_SAMPLES = 4096
"""Samples of one request at most: prompts times n."""

MAX_ROOM = 2**63 - 1
MAX_NAME_CHARS = 1024

OPENAI_DEFAULTS = SamplingDefaults()

_NO_MODEL = ("", "unknown", "default")
"""What public routers and clients fill in when the client named no model."""


class Endpoint(StrEnum):
    """The paths that take work."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    GENERATE = "/generate"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


class StreamedUsage(Enum):
    """Which chunks of an OpenAI stream carry usage."""

    NONE = auto()
    LAST = auto()
    """One more chunk at the end, for the whole request."""
    EVERY = auto()
    """That, and each chunk what its sample has used so far."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and under which room the two nodes of one sample meet."""

    bootstrap_host: str
    bootstrap_port: int
    room: int


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One HTTP request. ``options[p]`` belongs to ``prompts[p]``, ``rendezvous`` has one a sample."""

    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    prompt_field: str
    is_batch: bool
    """The prompts came as a list: ``/generate`` then answers with a list."""
    options: tuple[SampleOptions, ...]
    rendezvous: tuple[Rendezvous, ...]
    stream: bool
    usage: StreamedUsage
    hisparse: HisparseFlag | None
    is_speculative: bool
    request_ids: tuple[str, ...]
    """``rid`` of ``/generate``: one a prompt, or ()."""
    returns_token_ids: bool = False
    """Show the ids of the prompts and the answer, as vLLM does; ``/generate`` shows the latter always."""
    echo: dict[str, object] | None = None
    """Fields of ``/v1/responses`` that its answer repeats."""


def parse_request(
    endpoint: Endpoint, body: bytes, model_name: str, defaults: SamplingDefaults = OPENAI_DEFAULTS
) -> ApiRequest:
    """Check ``body``; what it does not say of drawing tokens is of ``defaults``.

    Raises ApiError: 400 for a field, 404 for another model than ``model_name``.
    """
    fields = JsonFields.of_body(body)
    check_model(fields, model_name)
    is_openai = endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)
    refuse_unsupported(fields, *(("return_token_ids",) if is_openai else ()))
    returns_token_ids = is_openai and fields.flag("return_token_ids")
    if endpoint in (Endpoint.COMPLETIONS, Endpoint.GENERATE):
        fields.require_unset("tools", [])
    stream = fields.flag("stream")
    options: tuple[SampleOptions, ...]
    echo = None
    match endpoint:
        case Endpoint.COMPLETIONS:
            prompt_field = "prompt"
            is_batch, prompts = parse_prompts(fields, prompt_field)
            fields.require_unset("add_special_tokens", True)
            num_logprobs = completion_logprobs(fields)
            shared = parse_openai_options(fields, num_logprobs, COMPLETIONS_DEFAULT_TOKENS, defaults)
            options = (replace(shared, constraint=completion_constraint(fields)),) * len(prompts)
        case Endpoint.CHAT:
            prompt_field = "messages"
            chat = parse_chat_prompt(fields)
            is_batch, prompts = False, (chat,)
            shared = parse_openai_options(fields, chat_logprobs(fields), None, defaults)
            options = (_for_chat(shared, chat, chat_constraint(fields, chat)),)
        case Endpoint.MESSAGES:
            prompt_field = "messages"
            chat = parse_messages(fields)
            is_batch, prompts = False, (chat,)
            shared = parse_messages_options(fields, defaults)
            options = (_for_chat(shared, chat, messages_constraint(fields, chat)),)
        case Endpoint.RESPONSES:
            prompt_field = "input"
            chat, echo = parse_responses(fields)
            is_batch, prompts = False, (chat,)
            shared = parse_responses_options(fields, defaults)
            options = (_for_chat(shared, chat, responses_constraint(fields, chat)),)
        case Endpoint.GENERATE:
            refuse_formats(fields)
            prompt_field = generate_prompt_field(fields)
            is_batch, prompts = parse_prompts(fields, prompt_field)
            options = parse_generate_options(fields, len(prompts), defaults)
    num_samples = sum(option.n for option in options)
    if num_samples > MAX_SAMPLES:
        raise ApiError(
            400,
            f"{prompt_field}: {len(prompts)} prompts with n samples each make {num_samples} samples; "
            f"at most {MAX_SAMPLES} fit in one request",
            param=prompt_field,
        )
    return ApiRequest(
        endpoint=endpoint,
        prompts=prompts,
        prompt_field=prompt_field,
        is_batch=is_batch,
        options=options,
        rendezvous=_rendezvous(fields, [option.n for option in options]),
        stream=stream,
        usage=_streamed_usage(fields, endpoint, stream),
        hisparse=_hisparse(fields, endpoint),
        is_speculative=fields.flag("speculative", default=True),
        request_ids=_request_ids(fields, endpoint, len(prompts)),
        returns_token_ids=returns_token_ids,
        echo=echo,
    )


def _for_chat(options: SampleOptions, chat: ChatPrompt, constraint: Constraint | None) -> SampleOptions:
    """With tools, special tokens are kept: tokenizers may call the markup of a call special."""
    skips_special = options.skip_special_tokens and not chat.all_tools
    return replace(options, skip_special_tokens=skips_special, constraint=constraint)


def derive_room(room: int, sample_index: int) -> int:
    """The room of a prompt's sample ``sample_index``: ``room`` itself for the first, else a hash of both.

    In [0, 2**63), the same on both nodes.
    """
    if sample_index == 0:
        return room
    key = room.to_bytes(8, "big") + sample_index.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def check_model(fields: JsonFields, model_name: str) -> None:
    model = fields.text("model", MAX_NAME_CHARS)
    if model is not None and model != model_name and model not in _NO_MODEL:
        raise ApiError(
            404,
            f"model: {model!r} does not exist here; this node serves {model_name!r}",
            param="model",
            code="model_not_found",
        )


# --- what the router adds, and the rest --------------------------------------------------------------


def _rendezvous(fields: JsonFields, samples_per_prompt: Sequence[int]) -> tuple[Rendezvous, ...]:
    """One a sample, prompt-major. Lists have one entry a prompt or one a sample; one value serves all."""
    for field in ("bootstrap_room", "bootstrap_host"):
        if not fields.present(field):
            raise ApiError(
                400,
                f"{field}: the field is missing; a node takes work from a router only: send the request "
                "through the router, which adds it",
                param=field,
                code="missing_field",
            )
    hosts = _spread(fields, "bootstrap_host", samples_per_prompt)
    ports = _spread(fields, "bootstrap_port", samples_per_prompt)
    rooms = _spread(fields, "bootstrap_room", samples_per_prompt)
    meetings = tuple(
        Rendezvous(
            _bootstrap_host(host),
            DEFAULT_BOOTSTRAP_PORT if port is None else _bounded("bootstrap_port", port, 1, 65535),
            derive_room(_bounded("bootstrap_room", room, 0, MAX_ROOM), sample_index),
        )
        for (host, _), (port, _), (room, sample_index) in zip(hosts, ports, rooms, strict=True)
    )
    if len({meeting.room for meeting in meetings}) != len(meetings):
        raise fields.invalid("bootstrap_room", "must be a different room for each sample")
    return meetings


def _spread(fields: JsonFields, field: str, samples_per_prompt: Sequence[int]) -> list[tuple[object, int]]:
    """``(value, index among the samples that share it)`` of each sample."""
    value = fields.raw(field)
    num_samples = sum(samples_per_prompt)
    if not isinstance(value, list):
        return [(value, index) for index in range(num_samples)]
    if len(value) == num_samples:
        return [(item, 0) for item in value]
    if len(value) == len(samples_per_prompt):
        return [(item, i) for item, n in zip(value, samples_per_prompt, strict=True) for i in range(n)]
    raise fields.invalid(
        field, f"must have one entry a prompt, {len(samples_per_prompt)}, or one a sample, {num_samples}"
    )


def _bounded(name: str, value: object, low: int, high: int) -> int:
    if not is_integer(value):
        raise InvalidField(name, value, "must be an integer")
    return within(name, value, low, high)


def _bootstrap_host(value: object) -> str:
    """Without the brackets that a URL puts round an IPv6 address."""
    host = value.removeprefix("[").removesuffix("]") if isinstance(value, str) else ""
    if not is_host(host):
        raise InvalidField("bootstrap_host", value, "must be a host name or an address")
    return host


def _streamed_usage(fields: JsonFields, endpoint: Endpoint, stream: bool) -> StreamedUsage:
    options = fields.nested("stream_options")
    if options is None or endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return StreamedUsage.NONE
    if not stream:
        raise fields.invalid("stream_options", "needs stream: true")
    is_continuous = options.flag("continuous_usage_stats")
    if not options.flag("include_usage"):
        return StreamedUsage.NONE
    return StreamedUsage.EVERY if is_continuous else StreamedUsage.LAST


def _hisparse(fields: JsonFields, endpoint: Endpoint) -> HisparseFlag | None:
    """From the top level or, because public routers drop it there, from what they let pass."""
    match endpoint:
        case Endpoint.CHAT | Endpoint.MESSAGES | Endpoint.RESPONSES:
            carrier = fields.nested("metadata")
        case Endpoint.GENERATE:
            carrier = fields.nested("custom_labels")
        case Endpoint.COMPLETIONS:
            carrier = None
    flags: dict[object, HisparseFlag] = {flag.value: flag for flag in HisparseFlag}
    for holder in (fields, carrier):
        if holder is None or not holder.present("hisparse"):
            continue
        match holder.raw("hisparse"):
            case bool() as value:
                return HisparseFlag.TRUE if value else HisparseFlag.FALSE
            case str() as text if text == HisparseFlag.AUTO or (holder is carrier and text in flags):
                return flags[text]
            case _:
                raise holder.invalid("hisparse", 'must be true, false or "auto"')
    return None


def _request_ids(fields: JsonFields, endpoint: Endpoint, num_prompts: int) -> tuple[str, ...]:
    value = fields.raw("rid")
    if endpoint is not Endpoint.GENERATE or value is None:
        return ()
    ids = value if isinstance(value, list) else [value, *(f"{value}-{i}" for i in range(1, num_prompts))]
    if len(ids) != num_prompts or not all(isinstance(i, str) and len(i) <= MAX_NAME_CHARS for i in ids):
        raise fields.invalid("rid", f"must be a string, or a list of one string a prompt, {num_prompts}")
    return tuple(str(i) for i in ids)
