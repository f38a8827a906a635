"""Draws tokens by ``enqueue_sample`` and waits for them, for tests that want numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hisparse_pd.base.vocabulary import SamplingParams, TokenLogprob
from hisparse_pd.core.model.sampling import enqueue_sample
from hisparse_pd.core.model.token_counts import CountedRows


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    num_generated: Sequence[int],
    eos_token_ids: Sequence[int],
    *,
    counts: CountedRows | None = None,
    masks: Tensor | None = None,
) -> tuple[list[int], list[TokenLogprob | None]]:
    """Do ``enqueue_sample``, wait for it, and return each row's token and logprobs."""
    assert counts is not None or not any(param.changes_logits for param in params), "params need counts"
    sampled = enqueue_sample(logits, params, num_generated, eos_token_ids, counts=counts, masks=masks)
    token_ids: list[int] = sampled.token_ids.tolist()  # waits for the device, hence for the logprobs, too
    return token_ids, sampled.read_logprobs(token_ids)
