"""Reads from a request's body how the samples of its prompts are drawn, and what is shown of them.

``schemas.py`` calls the parser of each endpoint. OpenAI's top-level fields, SGLang's ``sampling_params``, and
the fields of Anthropic's ``/v1/messages`` and OpenAI's ``/v1/responses`` all become ``SampleOptions``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import msgspec

from hisparse_pd.base.vocabulary import SamplingParams, pack_logit_bias
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.serving.api.bodies import (
    ChatBody,
    CompletionsBody,
    GenerateBody,
    MessagesBody,
    ResponsesBody,
    SamplingFields,
)
from hisparse_pd.serving.api.bodies import SamplingParams as SglangParams
from hisparse_pd.serving.api.body_parts import MAX_PROMPTS
from hisparse_pd.serving.api.constraints import Constraint, generate_constraint
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.raw_json import decode_item, first_chars, split
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.http.http_errors import InvalidField

COMPLETIONS_DEFAULT_TOKENS = 16
"""OpenAI's default for the tokens of a text completion."""
GENERATE_DEFAULT_TOKENS = 128
"""SGLang's default for the tokens of ``/generate``."""

SEED_MASK = 2**63 - 1
"""The bits of an engine's seeds."""


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How the samples of one prompt are drawn, and what the client wants to see of them."""

    sampling: SamplingParams
    """The engine's parameters, but for the number of tokens. The seed is the first sample's."""
    n: int = 1
    """Number of samples."""
    max_new_tokens: int | None = None
    """The most tokens that the client asks for; None for ``default_new_tokens``."""
    default_new_tokens: int | None = None
    """The endpoint's default; None for the node's ``default_max_tokens``. A default is cut to what fits.
    Without one, the answer may have all that fits."""
    max_new_tokens_field: str = "max_tokens"
    min_new_tokens_field: str = "min_tokens"
    biased_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    text_in_logprobs: bool = False
    """Whether ``/generate`` shows the text of each token beside its logprob."""
    constraint: Constraint | None = None
    """The rules for the answer; ``requests.py`` puts them into ``sampling`` as a grammar."""
    echo: bool = False
    """Whether the answer begins with the prompt's text and, if logprobs are asked for, with the prompt's."""
    num_prompt_logprobs: int | None = None
    """Value of vLLM's ``prompt_logprobs``."""
    logprob_start: int | None = None
    """Value of SGLang's ``logprob_start_len``; None for -1."""

    def wanted_scores(self) -> WantedScores | None:
        """Return which logprobs of the prompt's own tokens any of the fields asks for; None for none."""
        asked = [self.num_prompt_logprobs]
        asked += [self.sampling.num_logprobs] if self.echo or self.logprob_start is not None else []
        most = max((num for num in asked if num is not None), default=None)
        # The first token shown has no logprob, so the first logprob is the next token's.
        return None if most is None else WantedScores((self.logprob_start or 0) + 1, most)

    def sampling_params(self, max_new_tokens: int, sample_index: int) -> SamplingParams:
        """Return a sample's parameters for the engine. A prompt's samples have successive 63-bit seeds."""
        seed = self.sampling.seed
        seed = None if seed is None else (seed + sample_index) & SEED_MASK
        return msgspec.structs.replace(self.sampling, max_new_tokens=max_new_tokens, seed=seed)


def parse_openai_options(
    body: CompletionsBody | ChatBody,
    defaults: SamplingDefaults,
    *,
    num_logprobs: int | None,
    default_new_tokens: int | None,
) -> SampleOptions:
    """Return the options of completions and chat completions. Raises ApiError 400.

    ``num_logprobs``: how many likeliest tokens each logprob has beside it; None for no logprobs.
    ``default_new_tokens``: as in ``SampleOptions``.
    """
    limit = IntegerField("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        limit = IntegerField("max_completion_tokens", body.max_completion_tokens)
    minimum = IntegerField("min_tokens", body.min_tokens)
    options = _options(
        body, defaults, limit, minimum, seed=body.seed, stop=body.stop, n=body.n, num_logprobs=num_logprobs
    )
    if body.best_of is not None and body.best_of != options.n:
        raise InvalidField(
            "best_of", body.best_of, f"must equal n, which is {options.n}; leave the field out"
        )
    return replace(
        options,
        default_new_tokens=default_new_tokens,
        num_prompt_logprobs=body.prompt_logprobs,
        echo=isinstance(body, CompletionsBody) and bool(body.echo),
    )


def parse_generate_options(
    body: GenerateBody, num_prompts: int, defaults: SamplingDefaults
) -> tuple[SampleOptions, ...]:
    """Return the options of each prompt: from ``sampling_params``, one object for all prompts or a list with
    one for each. Raises ApiError 400."""
    num_logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    start = body.logprob_start_len if num_logprobs is not None else None
    name, given = "sampling_params", body.sampling_params
    if given is not None and first_chars(given)[0] == b"[":  # a list
        items = split(name, given, MAX_PROMPTS)
        if len(items) != num_prompts:
            shown = decode_item(name, given)
            raise InvalidField(name, shown, f"must have one entry a prompt, {num_prompts}")
        params = [decode(SglangParams, item, f"{name}[{index}]") for index, item in enumerate(items)]
        names = [f"{name}[{index}]" for index in range(num_prompts)]
    else:
        params = [decode(SglangParams, b"{}" if given is None else given, name)]
        names = [name]
    options = tuple(
        replace(
            _sglang_options(each, path, defaults, num_logprobs),
            logprob_start=None if start == -1 else start,
            text_in_logprobs=bool(body.return_text_in_logprobs),
            default_new_tokens=GENERATE_DEFAULT_TOKENS,
        )
        for each, path in zip(params, names, strict=True)
    )
    return options if len(options) == num_prompts else options * num_prompts


def parse_turn_options(body: MessagesBody | ResponsesBody, defaults: SamplingDefaults) -> SampleOptions:
    """Return the options of Anthropic's messages and OpenAI's responses."""
    stop: str | list[str] | None
    if isinstance(body, MessagesBody):
        limit, stop = IntegerField("max_tokens", body.max_tokens), body.stop_sequences
    else:
        limit, stop = IntegerField("max_output_tokens", body.max_output_tokens), body.stop
    minimum = IntegerField("min_tokens", body.min_tokens)
    return _options(body, defaults, limit, minimum, seed=body.seed, stop=stop)


def _sglang_options(
    params: SglangParams, name: str, defaults: SamplingDefaults, num_logprobs: int | None
) -> SampleOptions:
    limit = IntegerField(f"{name}.max_new_tokens", params.max_new_tokens)
    minimum = IntegerField(f"{name}.min_new_tokens", params.min_new_tokens)
    seed, stop, n = params.sampling_seed, params.stop, params.n
    options = _options(params, defaults, limit, minimum, seed=seed, stop=stop, n=n, num_logprobs=num_logprobs)
    return replace(options, constraint=generate_constraint(params, name))


class IntegerField(NamedTuple):
    """The path and value of an integer field."""

    name: str
    value: int | None


def _options(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    limit: IntegerField,
    minimum: IntegerField,
    *,
    seed: int | None,
    stop: str | list[str] | None,
    n: int | None = None,
    num_logprobs: int | None = None,
) -> SampleOptions:
    """Return the options of one prompt. ``fields``: those that have the same names on all endpoints.
    ``limit`` and ``minimum``: the most and the fewest tokens of an answer; their names differ, as those of
    the others do."""
    min_new_tokens = minimum.value or 0
    if limit.value is not None and min_new_tokens > limit.value:
        raise InvalidField(
            minimum.name, min_new_tokens, f"must be at most {limit.name}, which is {limit.value}"
        )
    biases = [(token_id, bias) for token_id, bias in (fields.logit_bias or {}).items() if bias]
    sampling = SamplingParams(
        max_new_tokens=0,  # set for each sample by ``SampleOptions.sampling_params``
        min_new_tokens=min_new_tokens,
        **asdict(defaults.changed_by(fields)),
        seed=seed,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        num_logprobs=num_logprobs,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=pack_logit_bias(biases),
    )
    return SampleOptions(
        sampling,
        n=n or 1,
        max_new_tokens=limit.value,
        max_new_tokens_field=limit.name,
        min_new_tokens_field=minimum.name,
        biased_token_ids=tuple(token_id for token_id, _ in biases),
        stop=tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop or ())),
        skip_special_tokens=fields.skip_special_tokens is not False,
        no_stop_trim=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
    )


def chat_logprobs(body: ChatBody) -> int | None:
    """Return how many likeliest tokens a chat's logprobs show; None for no logprobs."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidField("top_logprobs", body.top_logprobs, "needs logprobs: true")
    return None
