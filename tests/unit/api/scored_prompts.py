"""A prefill engine that scores prompts: logprobs that follow from the position alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hisparse_pd.base.vocabulary import FinishReason, TokenLogprob
from hisparse_pd.engine.messages import (
    FromEngine,
    Generate,
    PrefillFinished,
    PromptScores,
    RequestStats,
    Tokens,
    score_dtype,
)


def rows_of(generate: Generate) -> bytes:
    """At position p: logprob -p, rank p, and the likeliest tokens a, b, c and so on with -p/2, -p/2 - 1, …"""
    assert generate.scores is not None
    positions = np.arange(generate.scores.first, generate.num_prompt_tokens)
    rows = np.empty(len(positions), score_dtype(generate.scores.num_top))
    ranks = np.arange(generate.scores.num_top)
    rows["logprob"], rows["rank"] = -positions, positions
    rows["top_ids"] = ord("a") + ranks
    rows["top_logprobs"] = -positions[:, None] / 2 - ranks
    return rows.tobytes()


def scores(generate: Generate) -> Iterable[FromEngine]:
    """In two messages, as of two forwards."""
    if generate.scores is not None:
        rows, num_top = rows_of(generate), generate.scores.num_top
        half = generate.num_prompt_tokens // 2 * score_dtype(num_top).itemsize
        yield PromptScores(generate.request_id, num_top, rows[:half])
        yield PromptScores(generate.request_id, num_top, rows[half:])
    if not generate.is_prefill_only:
        yield PrefillFinished(generate.request_id, generate.num_prompt_tokens, 0, 4096, 0.25)
        return
    stats = RequestStats(None, num_cached_tokens=1)
    token_ids = tuple(b"!"[: generate.sampling.max_new_tokens])
    logprobs = tuple(TokenLogprob(token_id, -9.0) for token_id in token_ids)
    logprobs = logprobs if generate.sampling.num_logprobs is not None else ()
    yield Tokens(generate.request_id, token_ids, logprobs, FinishReason.LENGTH, stats=stats)
