"""The results of a step: one tensor with a row for each request, which the host reads in one copy.

The forward makes it on the device (``kernels.step_tokens.plain_results``, ``join_verified``), and the runner
turns its rows into ``StepResult`` (``read_results``). Its columns: error flags, hits, misses and evictions of
the row, then

- the token, after a step without drafts;
- the number of drafts, the number of accepted ones, ``num_new`` drawn tokens and ``num_new - 1`` next drafts,
  after a step that verified drafts.

Example, after a step that verified up to two drafts of each request (``num_new`` 3), of which this one had
two, 50 and 51, and the first was right: ``flags hits misses evictions  2 1  50 60 9  70 71``. Its new tokens
are 50 and 60; 9 was drawn behind the wrong draft.

While the prompt goes on, its own tokens take the places of drafts (``StepEntry``). If both of this row's are
the prompt's and a third prompt token follows, ``num_known`` is 3, and no drawn token counts. If the second is
the prompt's last one, ``num_known`` is 2, and the token drawn behind it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.core.model.sampling import Sampled
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.step_tokens import TOKEN_COLUMN


def num_columns(num_new: int) -> int:
    """Return the number of columns for a step with ``num_new`` positions of each request, which is 1 in a
    step without drafts."""
    return TOKEN_COLUMN + (1 if num_new == 1 else 2 + num_new + num_new - 1)


def join_verified(
    row_results: Tensor, num_drafts: Tensor, num_accepted: Tensor, token_ids: Tensor, next_drafts: Tensor
) -> Tensor:
    """Join the results of a step that verified drafts. ``row_results``: int64 [num_reqs, 4], of
    ``RequestTables.row_results``; ``num_drafts``, ``num_accepted``: int64 [num_reqs];
    ``token_ids``: int64 [num_reqs, num_new]; ``next_drafts``: int64 [num_reqs, num_new - 1]."""
    counts = torch.stack((num_drafts, num_accepted), dim=1)
    return torch.cat((row_results, counts, token_ids, next_drafts), dim=1)


@dataclass(frozen=True)
class StepResult:
    """The result of a step for one request."""

    token_ids: list[int]
    """Its new tokens: the accepted drafts, and one token more; none while the prompt goes on."""
    logprobs: list[TokenLogprob | None]
    """One for each of these tokens; None where none were wanted."""
    error: str
    """The fault that the kernels found; empty for none."""
    has_wrong_row: bool
    """Whether a row check failed for an item that was read for it; then ``token_ids`` may be wrong."""
    counters: SwapCounts
    """Counts of its row so far."""
    num_drafted: int
    """Drafts that were verified."""
    drafts: list[int]
    """Guesses of the draft layer for the next step; empty after a step without drafts, and while the prompt
    goes on."""
    num_known: int = 0
    """Positions of the step whose next token is the prompt's own, so that none was drawn behind them
    (``StepEntry.known``)."""


class _Row(NamedTuple):
    """One parsed row of the results."""

    flags: int
    counters: SwapCounts
    num_drafted: int
    num_accepted: int
    token_ids: list[int]
    """The tokens drawn behind the newest token and behind each draft; none while the prompt goes on. Those
    behind the first wrong draft do not count."""
    next_drafts: list[int]
    num_known: int

    @classmethod
    def parse(cls, values: list[int], num_new: int, num_known: int) -> _Row:
        (flags, hits, misses, evictions), rest = values[:TOKEN_COLUMN], values[TOKEN_COLUMN:]
        counters = SwapCounts(hits, misses, evictions)
        if num_new == 1:
            return cls(flags, counters, 0, 0, rest[num_known:], next_drafts=[], num_known=num_known)
        num_drafted, num_accepted, *ids = rest
        drawn, next_drafts = ids[num_known : 1 + num_drafted], ids[num_new:]
        if num_known:  # the drafts were tokens of the prompt
            num_drafted = num_accepted = 0
        if not drawn:  # the prompt goes on, so that guesses are not what comes next
            next_drafts = []
        return cls(flags, counters, num_drafted, num_accepted, drawn, next_drafts, num_known)


def read_results(
    values: Sequence[list[int]], num_new: int, num_known: Sequence[int], sampled: Sampled | None
) -> list[StepResult]:
    """Return the results of a step's requests.

    ``values``: rows of ``num_columns(num_new)``. ``num_known``: the length of each ``StepEntry.known``.
    ``sampled``: what was drawn, a row for each position that can count; None where all tokens are just the
    likeliest.
    """
    rows = [
        _Row.parse(of_request, num_new, known) for of_request, known in zip(values, num_known, strict=True)
    ]
    drawn = [token_id for row in rows for token_id in row.token_ids]
    logprobs: list[TokenLogprob | None] = [None] * len(drawn)
    if sampled is not None:
        logprobs = sampled.read_logprobs(drawn)
    results: list[StepResult] = []
    first = 0
    for row in rows:
        token_ids = row.token_ids[: 1 + row.num_accepted]
        results.append(
            StepResult(
                token_ids=token_ids,
                logprobs=logprobs[first : first + len(token_ids)],
                error=str(HotBufferError(row.flags).name) if row.flags else "",
                has_wrong_row=bool(row.flags & HotBufferError.WRONG_ROW),
                counters=row.counters,
                num_drafted=row.num_drafted,
                drafts=row.next_drafts,
                num_known=row.num_known,
            )
        )
        first += len(row.token_ids)
    return results
