"""From logits to tokens: greedy, temperature, top-k, top-p, seeds, logprobs, and when a request is finished.

A row's outcome depends on its own logits, settings and output index only, never on the rest of the batch,
and a seeded draw is a pure function of (seed, output index, logits): whichever node samples token ``i``,
the stream is one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.engine_messages import FinishReason, SamplingParams, TokenLogprob

_DRAW_BITS = 53


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    num_generated: Sequence[int],
    eos_token_ids: Sequence[int],
) -> tuple[list[int], list[TokenLogprob | None]]:
    """One token for each row, with its logprobs where they are asked for.

    ``logits``: float32 [num_reqs, vocab_size], not changed; ``num_generated``: output tokens of each
    request so far, which is the index of the token drawn now. Logprobs are those of the unscaled, unmasked
    logits.
    """
    if not len(params) == len(num_generated) == logits.shape[0]:
        raise ValueError(
            f"sample: {logits.shape[0]} rows of logits, {len(params)} params, "
            f"{len(num_generated)} output lengths"
        )
    masked = _forbid_early_stop(logits, params, num_generated, eos_token_ids)
    token_ids: list[int] = masked.argmax(dim=-1).tolist()
    for row, param in enumerate(params):
        if param.temperature > 0:
            token_ids[row] = _draw(masked[row], param, num_generated[row])
    return token_ids, _logprobs(logits, params, token_ids)


def finish_reason(
    token_id: int, num_output: int, params: SamplingParams, eos_token_ids: Sequence[int]
) -> tuple[FinishReason | None, int | None]:
    """Why a request ends with ``token_id`` as its ``num_output``-th output token, and the stop token met."""
    is_eos = token_id in eos_token_ids and not params.ignore_eos
    if is_eos or token_id in params.stop_token_ids:
        return FinishReason.STOP, token_id
    if num_output >= params.max_new_tokens:
        return FinishReason.LENGTH, None
    return None, None


def _forbid_early_stop(
    logits: Tensor,
    params: Sequence[SamplingParams],
    num_generated: Sequence[int],
    eos_token_ids: Sequence[int],
) -> Tensor:
    """``logits`` without the tokens that would end a request before its min_new_tokens."""
    masked = logits
    for row, (param, generated) in enumerate(zip(params, num_generated, strict=True)):
        if generated >= param.min_new_tokens:
            continue
        ending = set(param.stop_token_ids) | (set() if param.ignore_eos else set(eos_token_ids))
        # Ids outside the vocabulary can never be drawn.
        ending = {token_id for token_id in ending if 0 <= token_id < logits.shape[1]}
        if ending:
            if masked is logits:
                masked = logits.clone()
            masked[row, sorted(ending)] = float("-inf")
    return masked


def _draw(logits: Tensor, params: SamplingParams, output_index: int) -> int:
    """Draw from softmax(logits / temperature), cut to top_k and then to top_p, by inverting its sum."""
    # Computed on the CPU in float64: one stream for both nodes, whatever device their logits come from.
    scaled = logits.cpu().double()
    # The largest logit is taken off before the division, so that a tiny temperature cannot overflow.
    scaled = (scaled - scaled.max()) / params.temperature
    if 0 < params.top_k < scaled.shape[0]:
        values, candidates = scaled.topk(params.top_k)
    elif params.top_p < 1:
        values, candidates = scaled.sort(descending=True, stable=True)
    else:
        values, candidates = scaled, None
    probs = torch.softmax(values, dim=0)
    if params.top_p < 1:
        # Kept: every token before which less than top_p has gathered, and always the likeliest.
        is_kept = probs.cumsum(0) - probs < params.top_p
        is_kept[0] = True
        probs = probs * is_kept
    cumulative = probs.cumsum(0)
    threshold = _uniform(params.seed, output_index) * float(cumulative[-1])
    drawn = int(torch.searchsorted(cumulative, threshold, right=True))
    # Rounding may put the threshold at the very end, behind the last token of non-zero probability.
    last = int(torch.nonzero(probs)[-1])
    drawn = min(drawn, last)
    return drawn if candidates is None else int(candidates[drawn])


def _uniform(seed: int | None, output_index: int) -> float:
    """A number in [0, 1): of the OS's entropy without a seed, else a function of seed and output index."""
    if seed is None:
        return secrets.randbits(_DRAW_BITS) / (1 << _DRAW_BITS)
    digest = hashlib.blake2b(f"{seed}:{output_index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def _logprobs(
    logits: Tensor, params: Sequence[SamplingParams], token_ids: Sequence[int]
) -> list[TokenLogprob | None]:
    results: list[TokenLogprob | None] = [None] * len(params)
    for row, (param, token_id) in enumerate(zip(params, token_ids, strict=True)):
        if param.num_logprobs is None:
            continue
        logprobs = torch.log_softmax(logits[row].float(), dim=-1)
        best = logprobs.topk(min(param.num_logprobs, logprobs.shape[0]))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        results[row] = TokenLogprob(token_id, float(logprobs[token_id]), top)
    return results
