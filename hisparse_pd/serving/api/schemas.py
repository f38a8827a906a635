"""Parses and checks the bodies of the endpoints that generate (``bodies.py``) into an ``ApiRequest``.

``app.py`` calls ``parse_request``, which checks all that needs no tokenizer; ``requests.py`` checks the rest.
Unknown fields are ignored. A known field that asks for something unsupported is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from hisparse_pd.base.access import is_host
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.paging.prompt_keys import PageKey, root_of
from hisparse_pd.serving.api.anthropic_messages import parse_messages
from hisparse_pd.serving.api.bodies import (
    BODIES,
    ChatBody,
    CompletionsBody,
    Endpoint,
    GenerateBody,
    GeneratingBody,
    MessagesBody,
    ModelBody,
    ResponsesBody,
)
from hisparse_pd.serving.api.body_parts import MAX_SAMPLES, Labels
from hisparse_pd.serving.api.constraints import (
    Constraint,
    chat_constraint,
    completion_constraint,
    messages_constraint,
    responses_constraint,
)
from hisparse_pd.serving.api.declared_decoding import decode, decode_body
from hisparse_pd.serving.api.openai_chat import parse_chat_prompt
from hisparse_pd.serving.api.openai_responses import parse_responses
from hisparse_pd.serving.api.plain_prompts import generate_prompt, parse_prompts
from hisparse_pd.serving.api.prompts import ChatPrompt, Prompt
from hisparse_pd.serving.api.request_journal import RequestJournal
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.api.sampling_options import (
    COMPLETIONS_DEFAULT_TOKENS,
    SampleOptions,
    chat_logprobs,
    parse_generate_options,
    parse_openai_options,
    parse_turn_options,
)
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField

DEFAULT_BOOTSTRAP_PORT: int = PrefillSettings.model_fields["bootstrap_port"].default
"""Port of a prefill node whose ``bootstrap_port`` is null: a prefill node's default port."""

OPENAI_DEFAULTS = SamplingDefaults()

_NO_MODEL = ("", "unknown", "default")
"""Values of ``model`` from public routers and clients where nobody named a model."""


class StreamedUsage(Enum):
    """The chunks of an OpenAI stream that have usage."""

    NONE = auto()
    LAST = auto()
    """A further chunk at the end has the usage of the whole request."""
    EVERY = auto()
    """Each chunk also has its sample's usage so far."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The prefill node of one sample, and the sample's room."""

    bootstrap_host: str
    bootstrap_port: int
    room: int


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One parsed HTTP request. ``options[p]`` and ``roots[p]`` belong to ``prompts[p]``."""

    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    prompt_field: str
    """Field of the prompts, for errors."""
    is_batch: bool
    """Whether the prompts came as a list, so that ``/generate`` answers with a list."""
    options: tuple[SampleOptions, ...]
    roots: tuple[PageKey, ...]
    """Root of each prompt's page keys. Prompts whose ``cache_salt`` or ``extra_key`` differ share no KV."""
    rendezvous: tuple[Rendezvous, ...]
    """One entry a sample."""
    stream: bool
    usage: StreamedUsage
    hisparse: HisparseFlag | None
    is_speculative: bool
    request_ids: tuple[str, ...]
    """Values of ``rid`` of ``/generate``, one a prompt; empty if there are none."""
    returns_token_ids: bool = False
    """Show token ids of prompts and answers, as vLLM does; ``/generate`` always shows those of answers."""
    names_tokens_by_id: bool = False
    """Name tokens in logprobs ``token_id:N``, as vLLM does."""
    echo: dict[str, object] | None = None
    """Fields of ``/v1/responses`` that its answer repeats."""
    omits_thinking: bool = False
    """Do not show the thinking in an answer to ``/v1/messages``."""
    journal: RequestJournal | None = None
    """None if no router keeps a journal."""

    @property
    def chat(self) -> ChatPrompt | None:
        """The request's only conversation; None if it has other prompts."""
        (prompt, *_) = self.prompts
        return prompt if isinstance(prompt, ChatPrompt) else None


def parse_request(
    endpoint: Endpoint, content: bytes, model_name: str, defaults: SamplingDefaults = OPENAI_DEFAULTS
) -> ApiRequest:
    """Parse the body ``content``. Sampling parameters that it leaves out are those of ``defaults``. Raises
    ApiError: 400 for a field, 404 for another model than ``model_name``."""
    body: GeneratingBody = decode_body(BODIES[endpoint], content)
    check_model(body, model_name)
    given = _read_prompts(body, defaults)
    num_prompts, num_samples = len(given.prompts), sum(option.n for option in given.options)
    if num_samples > MAX_SAMPLES:
        raise FieldRefused(
            given.field,
            f"{num_prompts} prompts with n samples each make {num_samples} samples; "
            f"at most {MAX_SAMPLES} fit in one request",
        )
    labels = _labels(body)
    return ApiRequest(
        endpoint=endpoint,
        prompts=given.prompts,
        prompt_field=given.field,
        is_batch=given.is_batch,
        options=given.options,
        roots=_roots(body, labels, num_prompts),
        rendezvous=_rendezvous(body, [option.n for option in given.options]),
        stream=bool(body.stream),
        usage=_streamed_usage(body),
        hisparse=_hisparse(body, labels),
        is_speculative=body.speculative is not False,
        request_ids=_request_ids(body, num_prompts),
        returns_token_ids=isinstance(body, CompletionsBody | ChatBody) and bool(body.return_token_ids),
        names_tokens_by_id=(
            isinstance(body, CompletionsBody | ChatBody) and bool(body.return_tokens_as_token_ids)
        ),
        echo=given.echo,
        omits_thinking=_omits_thinking(body),
        journal=RequestJournal.of(body, num_samples),
    )


def check_model(body: ModelBody, model_name: str) -> None:
    """Raises ApiError 404 for another model than ``model_name``."""
    if body.model is not None and body.model != model_name and body.model not in _NO_MODEL:
        raise ApiError(
            404,
            f"model: {body.model!r} does not exist here; this node serves {model_name!r}",
            param="model",
            code="model_not_found",
        )


class _GivenPrompts(NamedTuple):
    """The prompts of a body, with the options of each."""

    field: str
    is_batch: bool
    prompts: tuple[Prompt, ...]
    options: tuple[SampleOptions, ...]
    echo: dict[str, object] | None = None
    """As in ``ApiRequest``."""


def _read_prompts(body: GeneratingBody, defaults: SamplingDefaults) -> _GivenPrompts:
    """Read prompts, options and constraints from the body of any endpoint. Raises ApiError 400."""
    match body:
        case CompletionsBody():
            is_batch, prompts = parse_prompts("prompt", body.prompt)
            shared = parse_openai_options(
                body, defaults, num_logprobs=body.logprobs, default_new_tokens=COMPLETIONS_DEFAULT_TOKENS
            )
            options = replace(shared, constraint=completion_constraint(body))
            return _GivenPrompts("prompt", is_batch, prompts, (options,) * len(prompts))
        case GenerateBody():
            field, value = generate_prompt(body)
            is_batch, prompts = parse_prompts(field, value)
            each = parse_generate_options(body, len(prompts), defaults)
            return _GivenPrompts(field, is_batch, prompts, each)
        case ChatBody():
            chat = parse_chat_prompt(body)
            options = parse_openai_options(
                body, defaults, num_logprobs=chat_logprobs(body), default_new_tokens=None
            )
            return _given_chat("messages", chat, options, chat_constraint(body, chat))
        case MessagesBody():
            chat = parse_messages(body)
            options = parse_turn_options(body, defaults)
            return _given_chat("messages", chat, options, messages_constraint(body, chat))
        case ResponsesBody():
            chat, echo = parse_responses(body)
            options = parse_turn_options(body, defaults)
            return _given_chat("input", chat, options, responses_constraint(body, chat), echo)
        case _:
            raise AssertionError(f"{type(body).__name__} has no prompts")


def _given_chat(
    field: str,
    chat: ChatPrompt,
    options: SampleOptions,
    constraint: Constraint | None,
    echo: dict[str, object] | None = None,
) -> _GivenPrompts:
    # With tools, special tokens are kept: tokenizers may call the markup of a call special.
    skips_special = options.skip_special_tokens and not chat.all_tools
    options = replace(options, skip_special_tokens=skips_special, constraint=constraint)
    return _GivenPrompts(field, is_batch=False, prompts=(chat,), options=(options,), echo=echo)


def _omits_thinking(body: GeneratingBody) -> bool:
    thinking = body.thinking if isinstance(body, MessagesBody) else None
    return thinking is not None and thinking.display == "omitted"


# --- what the router adds, and the rest --------------------------------------------------------------


def _rendezvous(body: GeneratingBody, samples_per_prompt: Sequence[int]) -> tuple[Rendezvous, ...]:
    """Return the prefill node and room of each sample, prompt by prompt.

    Each field has one value for all samples, or a list of one entry a prompt or a sample. If samples share a
    room, the first one uses it, and the others derive theirs from it.
    """
    for field in ("bootstrap_room", "bootstrap_host"):
        if getattr(body, field) is None:
            raise FieldRefused(
                field,
                "the field is missing; a node takes work from a router only: send the request "
                "through the router, which adds it",
                code="missing_field",
            )
    hosts = _spread("bootstrap_host", body.bootstrap_host, samples_per_prompt)
    ports = _spread("bootstrap_port", body.bootstrap_port, samples_per_prompt)
    rooms = _spread("bootstrap_room", body.bootstrap_room, samples_per_prompt)
    all_rendezvous = tuple(
        Rendezvous(
            _bootstrap_host(host.value),
            DEFAULT_BOOTSTRAP_PORT if port.value is None else port.value,
            derive_room(room.value, room.sample_index),
        )
        for host, port, room in zip(hosts, ports, rooms, strict=True)
    )
    if len({rendezvous.room for rendezvous in all_rendezvous}) != len(all_rendezvous):
        raise InvalidField("bootstrap_room", body.bootstrap_room, "must be a different room for each sample")
    return all_rendezvous


class _Spread(NamedTuple):
    """A field's value for one sample, and the sample's index among those that share this entry."""

    value: Any
    sample_index: int


def _spread(field: str, value: Any, samples_per_prompt: Sequence[int]) -> list[_Spread]:
    """Return the value of a field for each sample: the only value, or the entry of the sample or its prompt.
    Raises InvalidField for a list of another length."""
    num_samples = sum(samples_per_prompt)
    if not isinstance(value, list):
        return [_Spread(value, index) for index in range(num_samples)]
    if len(value) == num_samples:
        return [_Spread(item, 0) for item in value]
    if len(value) == len(samples_per_prompt):
        return [
            _Spread(item, index)
            for item, num in zip(value, samples_per_prompt, strict=True)
            for index in range(num)
        ]
    rule = f"must have one entry a prompt, {len(samples_per_prompt)}, or one a sample, {num_samples}"
    raise InvalidField(field, value, rule)


def derive_room(room: int, sample_index: int) -> int:
    """Return the room of a prompt's sample, in [0, 2**63): ``room`` itself for the first, else a hash of
    ``room`` and ``sample_index``."""
    if sample_index == 0:
        return room
    key = room.to_bytes(8, "big") + sample_index.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _bootstrap_host(value: str) -> str:
    """Return a host without the brackets that a URL puts round an IPv6 address. Raises InvalidField."""
    host = value.removeprefix("[").removesuffix("]")
    if not is_host(host):
        raise InvalidField("bootstrap_host", value, "must be a host name or an address")
    return host


def _streamed_usage(body: GeneratingBody) -> StreamedUsage:
    options = body.stream_options if isinstance(body, CompletionsBody | ChatBody) else None
    if options is None:
        return StreamedUsage.NONE
    if not body.stream:
        raise FieldRefused("stream_options", "needs stream: true", code="invalid_value")
    if not options.include_usage:
        return StreamedUsage.NONE
    return StreamedUsage.EVERY if options.continuous_usage_stats else StreamedUsage.LAST


def _labels(body: GeneratingBody) -> Labels:
    """Return the fields that stand in the body's ``metadata`` or ``custom_labels``, which public routers pass
    on. A field at the body's top level takes precedence."""
    match body:
        case ChatBody() | MessagesBody():
            labels = body.metadata
        case ResponsesBody():
            labels = None if body.metadata is None else decode(Labels, body.metadata, "metadata")
        case GenerateBody():
            labels = body.custom_labels
        case _:
            labels = None
    return labels or Labels()


def _hisparse(body: GeneratingBody, labels: Labels) -> HisparseFlag | None:
    given = labels.hisparse if body.hisparse is None else body.hisparse
    return None if given is None else HisparseFlag(str(given).lower())  # JSON's true is True here


def _roots(body: GeneratingBody, labels: Labels, num_prompts: int) -> tuple[PageKey, ...]:
    """Return the root of each prompt's page keys, made of its ``cache_salt`` and ``extra_key``. Each field
    has one value for all prompts, or a list of one a prompt."""
    keys: list[list[str | None]] = []
    for field in ("cache_salt", "extra_key"):
        given = getattr(body, field)
        if given is None:
            given = getattr(labels, field)
        keys_by_prompt = given if isinstance(given, list) else [given] * num_prompts
        if len(keys_by_prompt) != num_prompts:
            rule = f"must be a string, or a list of one string a prompt, {num_prompts}"
            raise InvalidField(field, given, rule)
        keys.append(keys_by_prompt)
    return tuple(map(root_of, *keys))


def _request_ids(body: GeneratingBody, num_prompts: int) -> tuple[str, ...]:
    if not isinstance(body, GenerateBody) or body.rid is None:
        return ()
    rid = body.rid
    ids = rid if isinstance(rid, list) else [rid, *(f"{rid}-{i}" for i in range(1, num_prompts))]
    if len(ids) != num_prompts:
        raise InvalidField("rid", rid, f"must be a string, or a list of one string a prompt, {num_prompts}")
    return tuple(ids)
