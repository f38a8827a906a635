"""Plans the samples of a parsed HTTP request: token ids, lengths that fit, seeds, rooms and grammars.

``app.py`` calls ``plan_samples`` after ``parse_request``. These are the front's last checks: nothing is
reserved anywhere before they have passed. ``engine_groups`` then makes the messages for the engines.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from hisparse_pd.base.vocabulary import HisparseFlag, SamplingParams
from hisparse_pd.core.paging.prompt_keys import PageKey, PromptKeys
from hisparse_pd.engine.messages import (
    Generate,
    GenerateGroup,
    num_packed_tokens,
    pack_token_ids,
    request_prefix,
    unpack_token_ids,
)
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.body_parts import MAX_SAMPLES_PER_PROMPT
from hisparse_pd.serving.api.chat_format import ReasoningStart
from hisparse_pd.serving.api.constraints import Constraint
from hisparse_pd.serving.api.grammars import write_grammar
from hisparse_pd.serving.api.prompts import ChatPrompt, Prompt
from hisparse_pd.serving.api.request_journal import NOT_RESUMED, Resumed
from hisparse_pd.serving.api.sampling_options import SEED_MASK, SampleOptions
from hisparse_pd.serving.api.schemas import ApiRequest
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.api.wanted_scores import (
    check_logprob_start,
    check_num_output_logprobs,
    check_num_scores,
    default_tokens_with_logprobs,
    lacking_scores,
    logprobs_a_token,
)
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField
from hisparse_pd.serving.http.off_loop import off_loop

MAX_REQUEST_GRAMMAR_CHARS = 16 << 20
"""Most characters of grammars in one HTTP request; each sample is sent to its engine with its own copy."""

_NO_OUTPUT_SAMPLING = SamplingParams(max_new_tokens=1, temperature=0.0)
"""Sampling of a request for the prompt's logprobs alone: an engine draws at least one token, which is not
shown."""

_MAX_INLINE_PAGES = 16
"""Pages up to which a prompt's keys are made on the event loop."""

_SAMPLES_BETWEEN_YIELDS = 128
"""Samples that are planned before other tasks of the event loop get a turn."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of one request, in tokens: the model's context, and for each mode what the pools of a rank hold
    of a prompt and its output."""

    context_length: int
    max_total_tokens_hisparse: int
    max_total_tokens_dense: int
    default_max_tokens: int = 0
    """Length of an answer for which nobody names one; 0 for as much as there is room for."""

    @property
    def request_tokens(self) -> int:
        """Most prompt tokens times samples of one HTTP request: enough for one prompt with any ``n``."""
        return MAX_SAMPLES_PER_PROMPT * self.context_length

    def pool_tokens(self, hisparse: HisparseFlag | None) -> int:
        """Return the longest prompt plus output that the pools can hold for a request with this flag."""
        match hisparse:
            case HisparseFlag.TRUE:
                return self.max_total_tokens_hisparse
            case HisparseFlag.FALSE:
                return self.max_total_tokens_dense
            case HisparseFlag.AUTO | None:
                return max(self.max_total_tokens_hisparse, self.max_total_tokens_dense)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample: what the engine gets, and what the front needs to show its output."""

    generate: Generate
    prompt: bytes
    """Token ids as ``pack_token_ids`` packs them; the samples of a prompt share them."""
    prompt_index: int
    options: SampleOptions
    keys: PromptKeys
    wanted_scores: WantedScores | None = None
    """Logprobs of the prompt's tokens that the sample shows. One of the prompt's samples asks the engine for
    them, for all (``generate.scores``)."""
    echo: str = ""
    """The prompt's text, where it is shown before the output's."""
    resumed: Resumed = NOT_RESUMED
    """Output that the client has from another node; the engine gets it behind the prompt."""
    num_resumes: int = 0
    """How often the HTTP request went on at another node."""

    @property
    def is_empty(self) -> bool:
        """Whether no token is asked for. The prompt is computed, scored and kept; one token is drawn, not
        shown."""
        return self.options.max_new_tokens == 0

    @property
    def scored_ids(self) -> npt.NDArray[np.int32]:
        """Ids of the prompt's tokens that are shown with logprobs. The first one, before the position
        ``wanted_scores.first``, is shown without a logprob."""
        if self.wanted_scores is None:
            return np.empty(0, np.int32)
        return unpack_token_ids(self.prompt)[self.wanted_scores.first - 1 :]


async def plan_samples(
    request: ApiRequest, codec: TextCodec, limits: RequestLimits, page_size: int, front_number: int = 0
) -> tuple[SampleRequest, ...]:
    """Return the samples of ``request``, prompt by prompt. Raises ApiError 400 for a prompt or a grammar that
    cannot be served. ``page_size``: that of the engines, to which prompts go with the keys of their pages.
    ``front_number``: the front that gets the engines' answers; request ids begin with it.
    """
    # Paths of the prompts in the body, for errors.
    names = [
        f"{request.prompt_field}[{index}]" if request.is_batch else request.prompt_field
        for index in range(len(request.prompts))
    ]
    max_prompt_tokens = min(limits.context_length, limits.pool_tokens(request.hisparse))
    prompts = await codec.encode(request.prompts, names, max_prompt_tokens)
    all_options = await _options_with_grammars(request, prompts, codec)
    checks = _PromptChecks(request, limits, codec.vocab_size)
    id_prefix = request_prefix(front_number)
    all_resumed = {} if request.journal is None else request.journal.resumed
    samples: list[SampleRequest] = []
    for index, (name, token_ids, options) in enumerate(zip(names, prompts, all_options, strict=True)):
        # What the prompt's samples share. ``wanted`` are the logprobs of its tokens that are shown,
        # ``scores`` those that an engine still has to compute.
        first_sample = len(samples)
        num_tokens, wanted = num_packed_tokens(token_ids), options.wanted_scores()
        max_new_tokens = checks.check(name, num_tokens, options, wanted)
        resumed_of_prompt = [all_resumed.get(first_sample + i, NOT_RESUMED) for i in range(options.n)]
        scores = lacking_scores(request.endpoint, wanted, num_tokens, resumed_of_prompt)
        echo = await _echo(request.prompts[index], token_ids, codec) if options.echo else ""
        prompt = _PlannedPrompt(
            index=index,
            token_ids=token_ids,
            keys=await _keys(request.roots[index], token_ids, page_size),
            num_tokens=num_tokens,
            options=options,
            max_new_tokens=max_new_tokens,
            wanted_scores=wanted,
            echo=echo,
            first_sample=first_sample,
        )
        # The samples themselves.
        for sample_index, resumed in enumerate(resumed_of_prompt):
            _check_token_ids("journal_records", resumed.token_ids, codec.vocab_size)
            samples.append(_plan_sample(request, prompt, sample_index, resumed, scores, id_prefix))
            if not resumed.is_over:
                scores = None  # this sample asks its engine for them, for all samples of the prompt
            if len(samples) % _SAMPLES_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
    return tuple(samples)


async def _keys(root: PageKey, token_ids: bytes, page_size: int) -> PromptKeys:
    """Return the keys of a prompt's pages. Each takes a microsecond, so many are made beside the loop."""
    if num_packed_tokens(token_ids) <= _MAX_INLINE_PAGES * page_size:
        return PromptKeys.of(root, token_ids, page_size)
    return await off_loop(PromptKeys.of, root, token_ids, page_size)


async def _echo(given: Prompt, token_ids: bytes, codec: TextCodec) -> str:
    """Return the text of a prompt that was ``given`` as text or as token ids."""
    return given if isinstance(given, str) else await codec.text_of(token_ids)


# --- grammars ----------------------------------------------------------------------------------------


async def _options_with_grammars(
    request: ApiRequest, prompts: Sequence[bytes], codec: TextCodec
) -> Sequence[SampleOptions]:
    """Return each prompt's options with the grammar of its answers. ``prompts`` are packed token ids."""
    written: dict[Constraint, str] = {}
    """Grammars by their constraints, which the prompts of a batch share."""
    found: list[SampleOptions] = []
    num_chars = 0
    for source, prompt, options in zip(request.prompts, prompts, request.options, strict=True):
        constraint = options.constraint
        if constraint is None:
            found.append(options)
            continue
        if constraint not in written:
            written[constraint] = await _grammar(constraint, source, prompt, codec)
            if written[constraint]:  # else the constraint excludes nothing
                await codec.check_grammar(written[constraint], constraint.field)
        num_chars += options.n * len(written[constraint])
        if num_chars > MAX_REQUEST_GRAMMAR_CHARS:
            raise FieldRefused(
                "n",
                f"the grammars of all samples together have at least {num_chars} characters; "
                f"{MAX_REQUEST_GRAMMAR_CHARS} are the most for a request: split it",
            )
        sampling = msgspec.structs.replace(options.sampling, grammar=written[constraint])
        found.append(replace(options, sampling=sampling))
    return found


async def _grammar(constraint: Constraint, source: Prompt, prompt: bytes, codec: TextCodec) -> str:
    """Write the grammar of the answers to one prompt, which is a conversation or plain text or token ids."""
    if isinstance(source, ChatPrompt):
        reasoning = codec.chat_format.reasoning_start(
            prompt, codec.token_bytes.of, is_continued=source.continue_final_message
        )
        tools, separates = source.all_tools, source.separate_reasoning
    else:
        reasoning, tools, separates = ReasoningStart.NONE, [], True
    return await off_loop(
        write_grammar, constraint, codec.chat_format, reasoning, tools, separates_reasoning=separates
    )


# --- checks of prompts -------------------------------------------------------------------------------


class _PromptChecks:
    """Checks the prompts of one request in turn, and adds up what all of its samples have so far."""

    def __init__(self, request: ApiRequest, limits: RequestLimits, vocab_size: int) -> None:
        self._request = request
        self._limits = limits
        self._vocab_size = vocab_size
        self._num_prompt_tokens = 0
        """Prompt tokens of all samples so far."""
        self._num_scores = 0
        """Logprobs of prompt tokens that all samples so far show."""
        self._num_output_logprobs = 0
        """Logprobs of output tokens that all samples so far may have."""
        self._most_default_tokens = default_tokens_with_logprobs(request)

    def check(
        self, name: str, num_prompt_tokens: int, options: SampleOptions, wanted: WantedScores | None
    ) -> int:
        """Check the next prompt, whose path in the body is ``name``. Returns how many tokens its answers may
        have. Raises ApiError 400."""
        _check_token_ids("stop_token_ids", options.sampling.stop_token_ids, self._vocab_size)
        _check_token_ids("logit_bias", options.biased_token_ids, self._vocab_size)
        pool_tokens = self._limits.pool_tokens(self._request.hisparse)
        max_new_tokens = _max_new_tokens(
            name, num_prompt_tokens, options, self._limits, pool_tokens, self._most_default_tokens
        )
        self._num_output_logprobs += max_new_tokens * logprobs_a_token(options)
        check_num_output_logprobs(self._request, options, self._num_output_logprobs)
        self._num_prompt_tokens += num_prompt_tokens * options.n
        if self._num_prompt_tokens > self._limits.request_tokens:
            raise FieldRefused(
                self._request.prompt_field,
                f"prompt tokens times samples are at least {self._num_prompt_tokens}; one request may have "
                f"{self._limits.request_tokens}: lower n or split it",
            )
        if wanted is not None:
            check_logprob_start(name, num_prompt_tokens, options)
            num_scored_tokens = max(0, num_prompt_tokens - wanted.first)
            self._num_scores += num_scored_tokens * (1 + wanted.num_top) * options.n
            check_num_scores(self._request, self._num_scores)
        return max_new_tokens


def _max_new_tokens(
    name: str,
    num_prompt_tokens: int,
    options: SampleOptions,
    limits: RequestLimits,
    pool_tokens: int,
    most_default_tokens: int | None,
) -> int:
    """Return how many tokens the answer may have: the number asked for, else the default or all that fits,
    ``most_default_tokens`` at most. Raises ApiError 400 where the number asked for does not fit.

    The last new token takes no place: its KV is never computed.
    """
    _check_length(name, num_prompt_tokens, options, limits, pool_tokens)
    max_new_tokens = options.max_new_tokens
    if max_new_tokens is None:
        num_free = min(limits.context_length, pool_tokens) + 1 - num_prompt_tokens
        default = options.default_new_tokens or limits.default_max_tokens or num_free
        max_new_tokens = min(default, num_free, most_default_tokens or num_free)
    min_new_tokens = options.sampling.min_new_tokens
    if min_new_tokens > max_new_tokens:
        field = options.min_new_tokens_field
        raise FieldRefused(
            field, f"{min_new_tokens} is above {max_new_tokens}, the most that this request can get"
        )
    return max_new_tokens


def _check_length(
    name: str, num_prompt_tokens: int, options: SampleOptions, limits: RequestLimits, pool_tokens: int
) -> None:
    """Raise ApiError 400 if the prompt and the tokens asked for do not fit the context or the pools."""
    asked = options.max_new_tokens
    num_new_tokens = asked or 1  # the prompt has to fit even where no token is asked for
    length = f"{name}: the prompt has {num_prompt_tokens} tokens"
    if asked == 0:
        length += ", and none is generated"
    elif asked is not None:
        length += f" and {options.max_new_tokens_field} is {asked}: {num_prompt_tokens + asked} together"
    else:
        length += ", and at least one more is generated"
    num_places = num_prompt_tokens + num_new_tokens - 1
    if num_places > limits.context_length:
        # Clients recognise the error by these words.
        rule = f"this model's maximum context length is {limits.context_length} tokens, and one token more"
        raise _too_long(name, f"{length}; {rule}")
    if num_places > pool_tokens:
        raise _too_long(
            name,
            f"{length}; the pools of this node can hold {pool_tokens} of one request, and one token more",
        )


def _too_long(name: str, message: str) -> ApiError:
    return ApiError(400, message, param=name, code="context_length_exceeded")


def _check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise FieldRefused(field, f"{token_id} is no token id: the vocabulary has {vocab_size}")


# --- samples -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PlannedPrompt:
    """A prompt that has passed the checks, with what its samples share."""

    index: int
    """Place among the request's prompts."""
    token_ids: bytes
    """Packed token ids."""
    keys: PromptKeys
    num_tokens: int
    options: SampleOptions
    max_new_tokens: int
    wanted_scores: WantedScores | None
    echo: str
    first_sample: int
    """Place of the prompt's first sample among the request's samples."""


def _plan_sample(
    request: ApiRequest,
    prompt: _PlannedPrompt,
    sample_index: int,
    resumed: Resumed,
    scores: WantedScores | None,
    id_prefix: str,
) -> SampleRequest:
    """Return the sample at ``sample_index`` among those of its prompt. Raises ApiError 400 if it cannot
    resume.

    ``scores``: logprobs of the prompt for which the sample asks its engine, unless it is over.
    """
    number = prompt.first_sample + sample_index
    rendezvous = request.rendezvous[number]
    generate = Generate(
        request_id=f"{id_prefix}-{number}",
        room=rendezvous.room,
        num_prompt_tokens=prompt.num_tokens + len(resumed.token_ids),
        sampling=_sampling(request, prompt, sample_index, resumed),
        bootstrap_host=rendezvous.bootstrap_host,
        bootstrap_port=rendezvous.bootstrap_port,
        hisparse=request.hisparse,
        is_speculative=request.is_speculative,
        scores=None if resumed.is_over else scores,
    )
    shows_scores = sample_index == 0 or request.endpoint is not Endpoint.CHAT  # a chat shows them once
    return SampleRequest(
        generate,
        prompt=prompt.token_ids,
        prompt_index=prompt.index,
        options=prompt.options,
        keys=prompt.keys,
        wanted_scores=prompt.wanted_scores if shows_scores else None,
        echo=prompt.echo,
        resumed=resumed,
        num_resumes=0 if request.journal is None else request.journal.num_resumes,
    )


def _sampling(
    request: ApiRequest, prompt: _PlannedPrompt, sample_index: int, resumed: Resumed
) -> SamplingParams:
    """Return the engine's sampling parameters for a sample. Raises ApiError 400 if it cannot resume."""
    sampling = prompt.options.sampling_params(prompt.max_new_tokens, sample_index)
    if request.journal is not None and sampling.seed is None:
        # The router's journal has a seed, so that a node that resumes the sample draws the same tokens.
        seed = (request.journal.seed + prompt.first_sample + sample_index) & SEED_MASK
        sampling = msgspec.structs.replace(sampling, seed=seed)
    if prompt.max_new_tokens == 0:
        sampling = _NO_OUTPUT_SAMPLING
    return _resume_sampling(sampling, resumed) if resumed.token_ids else sampling


def _resume_sampling(sampling: SamplingParams, resumed: Resumed) -> SamplingParams:
    """Return ``sampling`` for what the sample still lacks. Raises ApiError 400 where no token may follow."""
    num_tokens = len(resumed.token_ids)
    if not resumed.is_over and num_tokens >= sampling.max_new_tokens:
        raise InvalidField("journal_records", num_tokens, f"must be below {sampling.max_new_tokens} tokens")
    return msgspec.structs.replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - num_tokens,
        min_new_tokens=max(0, sampling.min_new_tokens - num_tokens),
        num_resumed_tokens=num_tokens,
    )


# --- messages for the engines ------------------------------------------------------------------------


def engine_groups(samples: Sequence[SampleRequest]) -> list[GenerateGroup]:
    """Return the messages for the engines: one for all samples of a prompt, which contains the prompt once.
    Resumed samples with different outputs have messages of their own, and samples that are over have none."""
    live = [sample for sample in samples if not sample.resumed.is_over]
    groups = []
    for _, alike in itertools.groupby(live, lambda sample: (sample.prompt_index, sample.resumed.token_ids)):
        group = list(alike)
        resumed, keys = pack_token_ids(group[0].resumed.token_ids), group[0].keys
        generates = tuple(sample.generate for sample in group)
        page_keys = tuple(keys.with_output(resumed))
        groups.append(GenerateGroup(generates, keys.root, group[0].prompt + resumed, page_keys))
    return groups
