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
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey
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
from hisparse_pd.serving.api.wanted_scores import check_logprob_start, check_num_scores, lacking_scores
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField
from hisparse_pd.serving.http.off_loop import off_loop

MAX_REQUEST_GRAMMAR_CHARS = 16 << 20
"""Most characters of grammars in one HTTP request; each sample is sent to its engine with its own copy."""

_NO_OUTPUT_SAMPLING = SamplingParams(max_new_tokens=1, temperature=0.0)
"""Sampling of a request for the prompt's logprobs alone: an engine draws at least one token, which is not
shown."""

_SAMPLES_BETWEEN_YIELDS = 128
"""Samples that are planned before other tasks of the event loop get a turn."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can hold, in tokens."""

    context_length: int
    max_total_tokens_hisparse: int
    max_total_tokens_dense: int
    default_max_tokens: int = 0
    """Length of an answer for which nobody names one; 0 for as much as there is room for."""

    @property
    def request_tokens(self) -> int:
        """Most prompt tokens times samples of one HTTP request. A single prompt may have any ``n``."""
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
    root: PageKey = NO_ISOLATION
    """Root of the prompt's page keys."""
    wanted_scores: WantedScores | None = None
    """Logprobs of the prompt's tokens that the sample shows. One of the prompt's samples has them computed
    for all (``generate.scores``)."""
    echo: str = ""
    """The prompt's text, where it is shown before the output's."""
    resumed: Resumed = NOT_RESUMED
    """Output that the client has from another node; the engine gets it behind the prompt."""
    num_resumes: int = 0
    """How often the sample went on at another node."""

    @property
    def is_empty(self) -> bool:
        """Whether no token is asked for. The prompt is computed, scored and kept; one token is drawn, not
        shown."""
        return self.options.max_new_tokens == 0

    @property
    def scored_ids(self) -> npt.NDArray[np.int32]:
        """Ids of the prompt's tokens that are shown with logprobs. The first of them has none."""
        if self.wanted_scores is None:
            return np.empty(0, np.int32)
        return unpack_token_ids(self.prompt)[self.wanted_scores.first - 1 :]


async def plan_samples(
    request: ApiRequest, codec: TextCodec, limits: RequestLimits, front_number: int = 0
) -> tuple[SampleRequest, ...]:
    """Return the samples of ``request``, prompt by prompt. Raises ApiError 400 for a prompt or a grammar that
    cannot be served."""
    pool_tokens = limits.pool_tokens(request.hisparse)
    prefix = request_prefix(front_number)
    names = [
        f"{request.prompt_field}[{index}]" if request.is_batch else request.prompt_field
        for index in range(len(request.prompts))
    ]
    prompts = await codec.encode(request.prompts, names, min(limits.context_length, pool_tokens))
    all_options = await _options_with_grammars(request, prompts, codec)
    all_resumed = {} if request.journal is None else request.journal.resumed()
    num_resumes = 0 if request.journal is None else request.journal.num_resumes
    is_chat = request.endpoint is Endpoint.CHAT
    samples: list[SampleRequest] = []
    num_request_tokens = num_scores = 0
    for prompt_index, (prompt, options) in enumerate(zip(prompts, all_options, strict=True)):
        name, num_prompt_tokens = names[prompt_index], num_packed_tokens(prompt)
        _check_token_ids("stop_token_ids", options.sampling.stop_token_ids, codec.vocab_size)
        _check_token_ids("logit_bias", options.biased_token_ids, codec.vocab_size)
        max_new_tokens = _max_new_tokens(name, num_prompt_tokens, options, limits, pool_tokens)
        num_request_tokens += num_prompt_tokens * options.n
        _check_request_tokens(request.prompt_field, num_request_tokens, limits)
        wanted = options.wanted_scores()
        if wanted is not None:
            check_logprob_start(name, num_prompt_tokens, options)
            num_scores += max(0, num_prompt_tokens - wanted.first) * (1 + wanted.num_top) * options.n
            check_num_scores(request, num_scores)
        resumed_of_prompt = [all_resumed.get(len(samples) + i, NOT_RESUMED) for i in range(options.n)]
        scores = lacking_scores(request.endpoint, wanted, num_prompt_tokens, resumed_of_prompt)
        echo = ""
        if options.echo:
            given = request.prompts[prompt_index]
            echo = given if isinstance(given, str) else await codec.text_of(prompt)
        for sample_index, resumed in enumerate(resumed_of_prompt):
            number = len(samples)
            _check_token_ids("journal_records", resumed.token_ids, codec.vocab_size)
            generate = Generate(
                request_id=f"{prefix}-{number}",
                room=request.rendezvous[number].room,
                num_prompt_tokens=num_prompt_tokens + len(resumed.token_ids),
                sampling=_sampling(request, options, max_new_tokens, number, sample_index, resumed),
                bootstrap_host=request.rendezvous[number].bootstrap_host,
                bootstrap_port=request.rendezvous[number].bootstrap_port,
                hisparse=request.hisparse,
                is_speculative=request.is_speculative,
                scores=None if resumed.is_over else scores,
            )
            if not resumed.is_over:
                scores = None  # computed once, for all samples of the prompt
            sample = SampleRequest(
                generate,
                prompt,
                prompt_index,
                options,
                root=request.roots[prompt_index],
                wanted_scores=wanted if sample_index == 0 or not is_chat else None,
                echo=echo,
                resumed=resumed,
                num_resumes=num_resumes,
            )
            samples.append(sample)
            if len(samples) % _SAMPLES_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
    return tuple(samples)


def _sampling(
    request: ApiRequest,
    options: SampleOptions,
    max_new_tokens: int,
    number: int,
    sample_index: int,
    resumed: Resumed,
) -> SamplingParams:
    """Return the engine's sampling parameters for a sample. Raises ApiError 400 if it cannot resume.

    ``number``: its place among the request's samples. ``sample_index``: its place among its prompt's.
    """
    sampling = options.sampling_params(max_new_tokens, sample_index)
    if request.journal is not None and sampling.seed is None:
        # A seed from the journal, so that another node would draw the same tokens.
        sampling = msgspec.structs.replace(sampling, seed=(request.journal.seed + number) & SEED_MASK)
    if max_new_tokens == 0:
        sampling = _NO_OUTPUT_SAMPLING
    return _resume_sampling(sampling, resumed) if resumed.token_ids else sampling


async def _options_with_grammars(
    request: ApiRequest, prompts: Sequence[bytes], codec: TextCodec
) -> Sequence[SampleOptions]:
    """Return each prompt's options with the grammar of its answers. ``prompts`` are packed token ids."""
    written: dict[Constraint, str] = {}
    found: list[SampleOptions] = []
    num_chars = 0
    for source, prompt, options in zip(request.prompts, prompts, request.options, strict=True):
        constraint = options.constraint
        if constraint is None:
            found.append(options)
            continue
        if constraint not in written:
            written[constraint] = await _grammar(constraint, source, prompt, codec)
            if written[constraint]:
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


def engine_groups(samples: Sequence[SampleRequest]) -> list[GenerateGroup]:
    """Return what the engine is sent: one message for all samples of a prompt, which it contains once.
    Resumed samples with different outputs have messages of their own, and samples that are over have none."""
    live = [sample for sample in samples if not sample.resumed.is_over]
    groups = []
    for _, alike in itertools.groupby(live, lambda sample: (sample.prompt_index, sample.resumed.token_ids)):
        group = list(alike)
        prompt = group[0].prompt + pack_token_ids(group[0].resumed.token_ids)
        groups.append(GenerateGroup(tuple(sample.generate for sample in group), group[0].root, prompt))
    return groups


def _resume_sampling(sampling: SamplingParams, resumed: Resumed) -> SamplingParams:
    """Return ``sampling`` for what is left of the sample. Raises ApiError 400 where no token may follow."""
    num_tokens = len(resumed.token_ids)
    if not resumed.is_over and num_tokens >= sampling.max_new_tokens:
        raise InvalidField("journal_records", num_tokens, f"must be below {sampling.max_new_tokens} tokens")
    return msgspec.structs.replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - num_tokens,
        min_new_tokens=max(0, sampling.min_new_tokens - num_tokens),
        num_resumed_tokens=num_tokens,
    )


def _check_request_tokens(field: str, num_tokens: int, limits: RequestLimits) -> None:
    if num_tokens > limits.request_tokens:
        raise FieldRefused(
            field,
            f"prompt tokens times samples are at least {num_tokens}; one request may have "
            f"{limits.request_tokens}: lower n or split it",
        )


def _max_new_tokens(
    name: str, num_prompt_tokens: int, options: SampleOptions, limits: RequestLimits, pool_tokens: int
) -> int:
    """Return how many tokens the answer may have: the number asked for, else the default or all that fits.
    Raises ApiError 400 where the number asked for does not fit.

    The last new token takes no place: its KV is never computed.
    """
    asked = options.max_new_tokens
    num_new_tokens = asked or 1  # the prompt has to fit even where no token is asked for
    length = f"{name}: the prompt has {num_prompt_tokens} tokens"
    if asked == 0:
        length += ", and none is generated"
    elif asked is not None:
        length += f" and {options.max_new_tokens_field} is {asked}: {num_prompt_tokens + asked} together"
    else:
        length += ", and at least one more is generated"
    if num_prompt_tokens + num_new_tokens - 1 > limits.context_length:
        # Clients recognise the error by these words.
        rule = f"this model's maximum context length is {limits.context_length} tokens, and one token more"
        raise _too_long(name, f"{length}; {rule}")
    if num_prompt_tokens + num_new_tokens - 1 > pool_tokens:
        raise _too_long(
            name,
            f"{length}; the pools of this node can hold {pool_tokens} of one request, and one token more",
        )
    room = min(limits.context_length, pool_tokens) + 1 - num_prompt_tokens
    max_new_tokens = asked
    if max_new_tokens is None:
        max_new_tokens = min(options.default_new_tokens or limits.default_max_tokens or room, room)
    min_new_tokens = options.sampling.min_new_tokens
    if min_new_tokens > max_new_tokens:
        field = options.min_new_tokens_field
        raise FieldRefused(
            field, f"{min_new_tokens} is above {max_new_tokens}, the most that this request can get"
        )
    return max_new_tokens


def _too_long(name: str, message: str) -> ApiError:
    return ApiError(400, message, param=name, code="context_length_exceeded")


def _check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise FieldRefused(field, f"{token_id} is no token id: the vocabulary has {vocab_size}")
