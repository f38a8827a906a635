"""Draws tokens from logits (greedy, temperature, top-k, top-p, min-p, seeds), with logprobs, and decides when
a request is finished.

A decode node's step calls ``enqueue_sample`` after the model's forward, and ``finish_reason`` for each token
that it has read. Penalties and biases are applied before the draw (``token_counts.py``).

A row's token depends on its own logits, settings and output index only, never on the rest of the batch. A
seeded draw is a function of (seed, output index, logits), up to the rounding of float64: whichever node draws
token ``i``, the stream is the same.

Random numbers are made on the host. Everything else happens on the logits' device without waiting for it, so
that a decode node can launch the next step before anybody has read this one's tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import FinishReason, SamplingParams, TokenLogprob
from hisparse_pd.core.model.token_counts import CountedRows, to_device
from hisparse_pd.kernels.bit_masks import allowed_logits
from hisparse_pd.kernels.row_math import cumulate
from hisparse_pd.kernels.selection import ranked_topk

_DRAW_BITS = 53
"""Bits of a random number: as many as a float64's significand has."""


@dataclass(frozen=True)
class Sampled:
    """The result of ``enqueue_sample``: on the device now, and on the host when the device is done."""

    token_ids: Tensor
    """The tokens, int64 [num_reqs], on the logits' device."""
    logprobs: tuple[_Logprobs, ...]

    def read_logprobs(self, token_ids: Sequence[int]) -> list[TokenLogprob | None]:
        """Return the logprobs of each row, None where they are not asked for. ``token_ids``: the tokens, on
        the host.

        On a GPU, call this when the stream has passed ``enqueue_sample``.
        """
        results: list[TokenLogprob | None] = [None] * len(token_ids)
        for part in self.logprobs:
            ids, values = part.token_ids.tolist(), part.values.tolist()
            for row, row_ids, (chosen, *best) in zip(part.rows, ids, values, strict=True):
                results[row] = TokenLogprob(token_ids[row], chosen, tuple(zip(row_ids, best, strict=True)))
        return results


@dataclass(frozen=True)
class _Logprobs:
    """Logprobs of the rows that want equally many, on the host once the stream has passed their copy."""

    rows: Sequence[int]
    token_ids: Tensor
    """The likeliest tokens, of equally likely ones the lowest ids first: int64 [num_rows, num_logprobs]."""
    values: Tensor
    """Logprobs of the drawn token, then of the likeliest ones: float32 [num_rows, 1 + num_logprobs]."""


def enqueue_sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    num_generated: Sequence[int],
    eos_token_ids: Sequence[int],
    *,
    counts: CountedRows | None = None,
    masks: Tensor | None = None,
) -> Sampled:
    """Draw a token for each row, and compute the logprobs that rows want, on the logits' device and current
    stream, without waiting.

    ``logits``: float32 [num_reqs, vocab_size], not changed. ``num_generated``: how many output tokens each
    request has drawn on this node. The output index of the token that is drawn now is this number plus
    ``num_resumed_tokens``, the tokens of a resumed stream that another node drew. ``counts``: needed where
    params change logits. ``masks``: int32 [num_reqs, num_words], bits of the tokens that may be drawn
    (``kernels.bit_masks``); None: all. Where a mask allows only tokens that end the request, one of them is
    drawn, whatever min_new_tokens is. Logprobs are those of the given logits: unscaled, unmasked, without
    penalties and biases.
    """
    if not len(params) == len(num_generated) == logits.shape[0]:
        raise ValueError(
            f"enqueue_sample: {logits.shape[0]} rows of logits, {len(params)} params, "
            f"{len(num_generated)} output lengths"
        )
    changed = logits if counts is None else counts.change(logits, params)
    masked = changed if masks is None else allowed_logits(changed, masks)
    masked = _forbid_early_stop(masked, params, num_generated, eos_token_ids, a_mask_wins=masks is not None)
    token_ids = masked.argmax(dim=-1)
    rows_by_cut: dict[bool, list[int]] = defaultdict(list)  # rows without top_k and top_p need no sort
    for row, param in enumerate(params):
        if param.temperature > 0:
            is_cut = 0 < param.top_k < logits.shape[1] or param.top_p < 1
            rows_by_cut[is_cut].append(row)
    for is_cut, rows in rows_by_cut.items():
        rows_dev = to_device(rows, logits.device)
        token_ids[rows_dev] = _draw(
            masked[rows_dev], [params[row] for row in rows], [num_generated[row] for row in rows], is_cut
        )
    return Sampled(token_ids, _enqueue_logprobs(logits, params, token_ids))


def finish_reason(
    token_id: int, num_output: int, params: SamplingParams, eos_token_ids: Sequence[int]
) -> tuple[FinishReason | None, int | None]:
    """Return why a request ends with ``token_id`` as the ``num_output``-th output token that it has drawn on
    this node, and the stop token if one ends it."""
    # With a grammar eos ends a request even if it is ignored: the grammar then allows it only where no other
    # token is allowed (``Matcher``), so that nothing could follow.
    is_eos = token_id in eos_token_ids and (not params.ignore_eos or bool(params.grammar))
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
    *,
    a_mask_wins: bool,
) -> Tensor:
    """Return ``logits`` with -inf for tokens that would end a request before its min_new_tokens.

    ``a_mask_wins``: a row in which a mask allows no other token stays as it is.
    """
    rows: list[int] = []
    forbidden: list[int] = []
    for row, (param, generated) in enumerate(zip(params, num_generated, strict=True)):
        if generated >= param.min_new_tokens:
            continue
        # An ignored eos ends nothing without a grammar. With one it does (``finish_reason``), but the grammar
        # allows it only where it allows nothing else, so there it is drawn in any case.
        ending = set(param.stop_token_ids) | (set() if param.ignore_eos else set(eos_token_ids))
        # Ids outside the vocabulary can never be drawn.
        ending = {token_id for token_id in ending if 0 <= token_id < logits.shape[1]}
        rows += [row] * len(ending)
        forbidden += sorted(ending)
    if not rows:
        return logits
    where = (to_device(rows, logits.device), to_device(forbidden, logits.device))
    allowed = logits.index_put(where, logits.new_full((), float("-inf")))
    if not a_mask_wins:
        return allowed
    return torch.where(allowed.amax(dim=1, keepdim=True) > float("-inf"), allowed, logits)


def _draw(
    logits: Tensor, params: Sequence[SamplingParams], num_generated: Sequence[int], is_cut: bool
) -> Tensor:
    """Draw from softmax(logits / temperature) by inverting its cumulative sum. Returns int64 [num_rows].

    ``is_cut``: whether top_k or top_p leaves tokens out, in all of these rows or in none. top_k is applied
    first, then top_p, then min_p. Of equal logits the lower id comes first.
    """
    device, vocab_size = logits.device, logits.shape[1]

    def column(values: Sequence[float]) -> Tensor:
        return to_device(values, device, torch.float64)[:, None]

    scaled = logits.double()
    # The largest logit is subtracted before the division, so that a tiny temperature cannot overflow.
    scaled = (scaled - scaled.amax(dim=1, keepdim=True)) / column([param.temperature for param in params])
    # A place is an index into a row of ``scaled``; ``candidates`` has the token at each place of sorted rows.
    candidates = None
    place = torch.arange(vocab_size, device=device)
    if is_cut:
        scaled, candidates = scaled.sort(dim=1, descending=True, stable=True)
        top_k = column([param.top_k if param.top_k > 0 else vocab_size for param in params])
        scaled = scaled.masked_fill(place >= top_k, float("-inf"))
    probs = torch.softmax(scaled, dim=1)
    if is_cut:
        # A token is kept if those before it sum to less than top_p; the likeliest is always kept.
        is_kept = (cumulate(probs) - probs < column([param.top_p for param in params])) | (place == 0)
        probs = probs * is_kept
    if any(param.min_p > 0 for param in params):
        probs = probs * (probs >= column([param.min_p for param in params]) * probs.amax(1, keepdim=True))
    cumulative = cumulate(probs)
    uniform = column(
        [
            uniform_number(param.seed, param.num_resumed_tokens + generated)
            for param, generated in zip(params, num_generated, strict=True)
        ]
    )
    drawn_place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    # Rounding may put the threshold beyond the last token of non-zero probability.
    last_place = torch.where(probs > 0, place, 0).amax(dim=1, keepdim=True)
    drawn_place = torch.minimum(drawn_place, last_place)
    return (drawn_place if candidates is None else candidates.gather(1, drawn_place))[:, 0]


def uniform_number(seed: int | None, output_index: int) -> float:
    """Return a number in [0, 1): a function of seed and output index, or without a seed of the OS's
    entropy."""
    if seed is None:
        return secrets.randbits(_DRAW_BITS) / (1 << _DRAW_BITS)
    digest = hashlib.blake2b(f"{seed}:{output_index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def _enqueue_logprobs(
    logits: Tensor, params: Sequence[SamplingParams], token_ids: Tensor
) -> tuple[_Logprobs, ...]:
    """Compute the logprobs of rows that want them, those of equally many in one go."""
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, param in enumerate(params):
        if param.num_logprobs is not None:
            rows_of[min(param.num_logprobs, logits.shape[1])].append(row)
    parts = []
    for num_logprobs, rows in rows_of.items():
        rows_dev = to_device(rows, logits.device)
        logprobs = torch.log_softmax(logits[rows_dev], dim=-1)
        best, best_ids = ranked_topk(logprobs, num_logprobs)
        values = torch.cat((logprobs.gather(1, token_ids[rows_dev, None]), best), dim=1)
        parts.append(_Logprobs(rows, _to_host(best_ids), _to_host(values)))
    return tuple(parts)


def _to_host(values: Tensor) -> Tensor:
    """Return a copy in main memory, which is complete when the current stream has passed this point."""
    if values.device.type == "cpu":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
