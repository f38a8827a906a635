"""A decode engine whose prompts are scored: logprobs that follow from the position alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hisparse_pd.base.vocabulary import FinishReason, Mode, TokenLogprob
from hisparse_pd.engine.messages import CachedTokens, FromEngine, Generate, PromptScores, RequestStats, Tokens
from hisparse_pd.protocol.prompt_scores import score_dtype


def rows_of(generate: Generate) -> bytes:
    """Position p has logprob -p, rank p, and the likeliest tokens a, b, c … with -p/2, -p/2 - 1 and so on."""
    assert generate.scores is not None
    positions = np.arange(generate.scores.first, generate.num_prompt_tokens)
    rows = np.empty(len(positions), score_dtype(generate.scores.num_top))
    ranks = np.arange(generate.scores.num_top)
    rows["logprob"], rows["rank"] = -positions, positions
    rows["top_ids"] = ord("a") + ranks
    rows["top_logprobs"] = -positions[:, None] / 2 - ranks
    return rows.tobytes()


def scores(generate: Generate) -> Iterable[FromEngine]:
    """Send the scores in two messages, as of two forwards, then as many ``!`` as the answer may have."""
    if generate.scores is not None:
        rows, num_top = rows_of(generate), generate.scores.num_top
        half = generate.num_prompt_tokens // 2 * score_dtype(num_top).itemsize
        yield PromptScores(generate.request_id, num_top, rows[:half])
        yield PromptScores(generate.request_id, num_top, rows[half:])
    for number in range(1, generate.sampling.max_new_tokens + 1):
        logprobs = (TokenLogprob(ord("!"), -9.0),) if generate.sampling.num_logprobs is not None else ()
        finish = FinishReason.LENGTH if number == generate.sampling.max_new_tokens else None
        stats = RequestStats(Mode.DENSE, cached=CachedTokens(device=1))
        yield Tokens(generate.request_id, (ord("!"),), logprobs, finish, stats=stats)
