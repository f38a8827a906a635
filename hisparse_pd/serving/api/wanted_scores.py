"""Logprobs that a request asks for: how many it may have, and which of its prompts' its samples lack.

``requests.py`` calls the functions when it plans samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.request_journal import Resumed
from hisparse_pd.serving.api.sampling_options import SampleOptions
from hisparse_pd.serving.api.schemas import ApiRequest
from hisparse_pd.serving.http.http_errors import FieldRefused, InvalidField

MAX_SCORES = 1 << 19
"""Most logprobs of prompt tokens in one answer: a context of 163,840 tokens with the two likeliest of each.
As JSON they have up to 40 MB."""
MAX_STREAMED_SCORES = 1 << 22
"""Most of them in a stream that passes them on in pieces: a context of 163,840 tokens with the twenty
likeliest of each. Those that the client has not read yet wait as rows of 8 bytes each, 34 MB at most."""
MAX_OUTPUT_LOGPROBS = 1 << 22
"""Most logprobs of output tokens in one answer or stream: 199,728 tokens with the twenty likeliest of each.
An answer keeps them as JSON, some 200 MB. In a stream whose client does not read they wait as Python's
objects, some 500 MB."""
MAX_REPEATED_LOGPROBS = 1 << 19
"""Most of them in a stream of ``/generate``, each event of which repeats all earlier ones: 24,966 tokens with
the twenty likeliest of each, 20 MB of JSON."""


def check_logprob_start(name: str, num_prompt_tokens: int, options: SampleOptions) -> None:
    """Raise FieldRefused if the logprobs of the prompt at ``name`` are to begin behind its end."""
    if options.logprob_start is not None and options.logprob_start > num_prompt_tokens:
        raise FieldRefused(
            "logprob_start_len",
            f"{options.logprob_start} is behind the end of {name}, which has {num_prompt_tokens} tokens",
        )


def lacking_scores(
    endpoint: Endpoint, wanted: WantedScores | None, num_prompt_tokens: int, all_resumed: Sequence[Resumed]
) -> WantedScores | None:
    """Return which of the ``wanted`` logprobs a prompt's samples lack; None for none. Raises ApiError 400 for
    a sample that already has output tokens, and still lacks logprobs, which come before output.

    Events of ``/generate`` repeat all logprobs, so there a sample lacks them until it is over.
    """
    if wanted is None:
        return None
    if endpoint is Endpoint.CHAT:
        all_resumed = all_resumed[:1]  # shown once, beside the choices
    lacking: int | None = None
    for resumed in all_resumed:
        # Position of the first logprob that it lacks. ``num_scored`` counts from the first token shown, at
        # wanted.first - 1, which has no logprob.
        first = wanted.first - 1 + max(1, resumed.num_scored)
        if resumed.is_over or first >= num_prompt_tokens:
            continue
        if resumed.token_ids and endpoint is not Endpoint.GENERATE:
            rule = "must count all of the prompt's logprobs, which come before tokens"
            raise InvalidField("journal_records", resumed.num_scored, rule)
        lacking = first if lacking is None else min(lacking, first)
    return None if lacking is None else WantedScores(lacking, wanted.num_top)


def check_num_scores(request: ApiRequest, num_scores: int) -> None:
    """Raise FieldRefused if one answer cannot have so many logprobs of prompt tokens."""
    is_in_pieces = request.stream and request.endpoint is not Endpoint.GENERATE
    most = MAX_STREAMED_SCORES if is_in_pieces else MAX_SCORES
    if num_scores > most:
        what = "stream" if is_in_pieces else "answer"
        raise FieldRefused(
            request.prompt_field,
            f"at least {num_scores} logprobs of prompt tokens are asked for, those of the likeliest "
            f"tokens included; {most} fit in one {what}: split the request, or ask for fewer a token",
        )


def max_output_logprobs(request: ApiRequest) -> int:
    """Return the most logprobs of output tokens that the answer to ``request`` may have."""
    is_repeated = request.stream and request.endpoint is Endpoint.GENERATE
    return MAX_REPEATED_LOGPROBS if is_repeated else MAX_OUTPUT_LOGPROBS


def logprobs_a_token(options: SampleOptions) -> int:
    """Return how many logprobs each output token has in all samples of one prompt together."""
    num_top = options.sampling.num_logprobs
    return 0 if num_top is None else (1 + num_top) * options.n


def default_tokens_with_logprobs(request: ApiRequest) -> int | None:
    """Return how many tokens a sample may have at most where the client names no number, so that the
    logprobs of all samples fit in the answer; None if no logprobs are asked for."""
    num_a_token = sum(map(logprobs_a_token, request.options))
    return max_output_logprobs(request) // num_a_token if num_a_token else None


def check_num_output_logprobs(request: ApiRequest, options: SampleOptions, num_logprobs: int) -> None:
    """Raise FieldRefused if one answer cannot have so many logprobs of output tokens. ``options``: those of
    the prompt with which they are too many."""
    most = max_output_logprobs(request)
    if num_logprobs > most:
        raise FieldRefused(
            options.max_new_tokens_field,
            f"at least {num_logprobs} logprobs of output tokens are asked for, those of the likeliest tokens "
            f"and of all samples included; {most} fit in one {'stream' if request.stream else 'answer'}: "
            "lower it, n or the number of logprobs, or split the request",
        )
