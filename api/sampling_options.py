"""How the samples of a prompt are drawn: OpenAI's fields at the top level, SGLang's in sampling_params."""

from __future__ import annotations

from dataclasses import dataclass, replace

from api.json_fields import JsonFields
from api.sampling_defaults import SamplingDefaults
from service.http_errors import ApiError, InvalidField
from vocabulary import SamplingParams

MAX_SAMPLES_PER_PROMPT = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
OPENAI_MAX_TEMPERATURE = 2.0
GENERATE_MAX_TEMPERATURE = 100.0
ANTHROPIC_MAX_TEMPERATURE = 1.0
COMPLETIONS_DEFAULT_TOKENS = 16
GENERATE_DEFAULT_TOKENS = 128

_SEED_MASK = 2**63 - 1

_UNSUPPORTED: dict[str, tuple[object, ...]] = {  # known field: the values that ask for nothing
    "allowed_token_ids": ([],),
    "audio": (),
    "audio_data": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image_data": ([],),
    "input_embeds": ([],),
    "json_schema": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "lora_path": ([],),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stop_regex": ([], ""),
    "structural_tag": (),
    "structured_outputs": ({},),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "video_data": ([],),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How the samples of one prompt are drawn, and what of them the client wants to see."""

    n: int = 1
    max_new_tokens: int | None = None
    """None: ``default_new_tokens``, or fewer when less room is left."""
    default_new_tokens: int | None = None
    """None: the node's own default, or whatever room is left."""
    max_new_tokens_field: str = "max_tokens"
    min_new_tokens: int = 0
    min_new_tokens_field: str = "min_tokens"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    num_logprobs: int | None = None
    text_in_logprobs: bool = False
    """``/generate`` shows the text of each token beside its logprob."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    grammar_field: str = "response_format"

    def sampling_params(self, max_new_tokens: int, sample_index: int) -> SamplingParams:
        """For the engine. The samples of one prompt have successive seeds, wrapped to 63 bits."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=None if self.seed is None else (self.seed + sample_index) & _SEED_MASK,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            num_logprobs=self.num_logprobs,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            grammar=self.grammar,
        )


def refuse_unsupported(fields: JsonFields, *supported: str) -> None:
    """Raises InvalidField for a known field that asks for something this service does not do.

    ``supported``: fields that only some endpoints have.
    """
    for field, harmless in _UNSUPPORTED.items():
        if field not in supported:
            fields.require_unset(field, *harmless)


def parse_openai_options(
    fields: JsonFields,
    num_logprobs: int | None,
    default_new_tokens: int | None,
    defaults: SamplingDefaults,
) -> SampleOptions:
    limit_field = "max_completion_tokens" if fields.present("max_completion_tokens") else "max_tokens"
    response_format = fields.nested("response_format")
    if response_format is not None and response_format.raw("type") != "text":
        raise response_format.invalid("type", 'must be "text"; other formats are not supported')
    options = _common_options(fields, limit_field, "min_tokens", "seed", OPENAI_MAX_TEMPERATURE, defaults)
    best_of = fields.integer("best_of", 1, MAX_SAMPLES_PER_PROMPT)
    if best_of is not None and best_of != options.n:
        raise fields.invalid("best_of", f"must equal n, which is {options.n}; leave the field out")
    return replace(options, num_logprobs=num_logprobs, default_new_tokens=default_new_tokens)


def parse_generate_options(
    fields: JsonFields, num_prompts: int, defaults: SamplingDefaults
) -> tuple[SampleOptions, ...]:
    """One a prompt: the same for all, or from a list."""
    num_top = fields.integer("top_logprobs_num", 0, MAX_LOGPROBS) or 0
    num_logprobs = num_top if fields.flag("return_logprob") else None
    with_text = fields.flag("return_text_in_logprobs")
    if num_logprobs is not None:
        fields.require_unset("logprob_start_len", -1)  # the prompt's own logprobs are not kept
        fields.require_unset("token_ids_logprob", [])
    given = fields.raw("sampling_params")
    match given:
        case None | dict():
            shared = JsonFields(given or {}, "sampling_params")
            options = _sglang_options(shared, num_logprobs, with_text, defaults)
            return (options,) * num_prompts
        case [*items]:
            if len(items) != num_prompts:
                raise fields.invalid("sampling_params", f"must have one entry a prompt, {num_prompts}")
            return tuple(
                _sglang_options(
                    JsonFields.of_item(f"sampling_params[{index}]", item), num_logprobs, with_text, defaults
                )
                for index, item in enumerate(items)
            )
        case _:
            raise fields.invalid("sampling_params", "must be an object or a list of objects")


def parse_messages_options(fields: JsonFields, defaults: SamplingDefaults) -> SampleOptions:
    """Of Anthropic's messages."""
    fields.require_unset("n", 1)
    if not fields.present("max_tokens"):
        raise ApiError(400, "max_tokens: the field is needed", param="max_tokens", code="missing_field")
    return _common_options(
        fields,
        "max_tokens",
        "min_tokens",
        "seed",
        ANTHROPIC_MAX_TEMPERATURE,
        defaults,
        stop_field="stop_sequences",
    )


def parse_responses_options(fields: JsonFields, defaults: SamplingDefaults) -> SampleOptions:
    """Of OpenAI's responses."""
    fields.require_unset("n", 1)
    return _common_options(
        fields, "max_output_tokens", "min_tokens", "seed", OPENAI_MAX_TEMPERATURE, defaults
    )


def _sglang_options(
    fields: JsonFields, num_logprobs: int | None, with_text: bool, defaults: SamplingDefaults
) -> SampleOptions:
    refuse_unsupported(fields)
    options = _common_options(
        fields, "max_new_tokens", "min_new_tokens", "sampling_seed", GENERATE_MAX_TEMPERATURE, defaults
    )
    return replace(
        options,
        num_logprobs=num_logprobs,
        text_in_logprobs=with_text,
        default_new_tokens=GENERATE_DEFAULT_TOKENS,
    )


def _common_options(
    fields: JsonFields,
    limit_field: str,
    minimum_field: str,
    seed_field: str,
    max_temperature: float,
    defaults: SamplingDefaults,
    stop_field: str = "stop",
) -> SampleOptions:
    limit = fields.integer(limit_field, 1, MAX_TOKENS)
    minimum = fields.integer(minimum_field, 0, MAX_TOKENS) or 0
    if limit is not None and minimum > limit:
        raise fields.invalid(minimum_field, f"must be at most {fields.name(limit_field)}, which is {limit}")
    top_k = fields.integer("top_k", -1, MAX_TOKENS)
    temperature = fields.number("temperature", 0, max_temperature)
    top_p = fields.number("top_p", 0, 1, above_low=True)
    return SampleOptions(
        n=fields.integer("n", 1, MAX_SAMPLES_PER_PROMPT) or 1,
        max_new_tokens=limit,
        max_new_tokens_field=fields.name(limit_field),
        min_new_tokens=minimum,
        min_new_tokens_field=fields.name(minimum_field),
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=defaults.top_k if top_k is None else max(top_k, 0),
        seed=fields.integer(seed_field, -(2**63), 2**63 - 1),
        ignore_eos=fields.flag("ignore_eos"),
        stop=_stop_strings(fields, stop_field),
        stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_TOKEN_IDS, 0, MAX_TOKEN_ID),
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        no_stop_trim=fields.flag("no_stop_trim") or fields.flag("include_stop_str_in_output"),
    )


def _stop_strings(fields: JsonFields, field: str) -> tuple[str, ...]:
    value = fields.raw(field)
    if isinstance(value, str):
        value = [value]
    elif not isinstance(value, list):
        if value is not None:
            raise fields.invalid(field, "must be a string or a list of strings")
        value = []
    if len(value) > MAX_STOP_STRINGS:
        raise fields.invalid(field, f"must have at most {MAX_STOP_STRINGS} strings")
    for index, item in enumerate(value):
        name = f"{fields.name(field)}[{index}]"
        if not isinstance(item, str) or not item:
            raise InvalidField(name, item, "must be a string that is not empty")
        if len(item) > MAX_STOP_CHARS:
            raise InvalidField(
                name, item, f"must have at most {MAX_STOP_CHARS} characters, it has {len(item)}"
            )
    return tuple(dict.fromkeys(value))


def completion_logprobs(fields: JsonFields) -> int | None:
    return fields.integer("logprobs", 0, MAX_LOGPROBS)


def chat_logprobs(fields: JsonFields) -> int | None:
    num_top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if fields.flag("logprobs"):
        return num_top or 0
    if num_top:
        raise fields.invalid("top_logprobs", "needs logprobs: true")
    return None
