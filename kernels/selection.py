"""Selection of the largest values with one rule for ties: among equal values the lowest positions win.

Indexer (``select_topk``), experts' choice and logprobs (``ranked_topk``) select by it in torch; kernels have
the same rule. ``torch.topk`` promises nothing about ties: on a CPU the length of the row decides them, so
that a query's selection would depend on where a chunk ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

ABSENT = -1

_INT32_MAX = 0x7FFFFFFF
_LOW_WORD = 0xFFFFFFFF


def ranked_topk(values: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` largest values of each row and their positions, largest first; among equal values
    the lowest position comes first.

    ``values``: float32 [num_rows, n] on any device, n below 2**31, not changed; ``top_k``: at most n. Returns
    float32 and int64 [num_rows, top_k]. This never waits for a device. 0.0 and -0.0 are equal; NaN is above
    all numbers.
    """
    n = values.shape[1]
    # Integers that order as the values do, with the position in the low bits: no two are equal. Adding 0.0
    # makes 0.0 of -0.0, and the bits of a negative number are inverted but for the sign.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _INT32_MAX)
    places = torch.arange(n - 1, -1, -1, device=values.device)
    best = ((ordered.long() << 32) | places).topk(top_k, dim=1).values
    positions = (n - 1) - (best & _LOW_WORD)
    return values.gather(1, positions), positions


def select_topk(scores: Tensor, num_seen: Tensor, top_k: int) -> Tensor:
    """Return int32 [num_tokens, top_k]: ascending positions of the best scores, then -1. Among equal scores
    the lowest positions are chosen.

    ``scores``: float32 [num_tokens, seq_len], overwritten from ``num_seen`` on; ``num_seen``: integer
    [num_tokens], the number of positions that each query may choose from. A query that sees at most ``top_k``
    gets all of them. NaN counts as -inf, which is chosen when there are too few numbers.

    This is nearly as fast as ``torch.topk``: one more value tells which rows have a tie at the boundary, and
    only these are selected again.
    """
    seq_len = scores.shape[1]
    first_positions = torch.arange(top_k, dtype=torch.int32, device=scores.device)
    everything = torch.where(first_positions < num_seen[:, None], first_positions, ABSENT)
    if seq_len <= top_k or len(scores) == 0:
        return everything
    first_unseen = min(int(num_seen.min()), seq_len)  # all queries see the positions before this one
    positions = torch.arange(first_unseen, seq_len, device=scores.device)
    scores[:, first_unseen:].masked_fill_(positions >= num_seen[:, None], float("-inf"))
    best = scores.topk(top_k + 1, dim=1)  # the last value is the best of those that are not chosen
    if bool(best.values[:, 0].isnan().any()):  # torch puts NaN above all numbers
        scores = scores.masked_fill(scores.isnan(), float("-inf"))
        best = scores.topk(top_k + 1, dim=1)
    chosen = best.indices[:, :top_k].int()
    sees_more = num_seen > top_k
    is_tied = (best.values[:, -2] == best.values[:, -1]) & sees_more
    if bool(is_tied.any()):
        chosen[is_tied] = _lowest_of_equals(scores[is_tied], best.values[is_tied, -1:], top_k)
    # An unseen position, -inf, is never chosen: it may equal seen ones of -inf, but these have lower
    # positions, and a row that sees more than top_k has enough of them.
    return torch.where(sees_more[:, None], chosen.sort(dim=1).values, everything)


def _lowest_of_equals(scores: Tensor, threshold: Tensor, top_k: int) -> Tensor:
    """Return int32 [num_rows, top_k]: positions above ``threshold`` [num_rows, 1], and the lowest equal
    ones."""
    is_above, is_equal = scores > threshold, scores == threshold
    num_equal_chosen = top_k - is_above.sum(1, keepdim=True)
    is_chosen = is_above | (is_equal & (is_equal.cumsum(1) <= num_equal_chosen))
    return is_chosen.nonzero()[:, 1].view(-1, top_k).int()
