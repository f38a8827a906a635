"""Owns the counts of tokens, by req_row, from which penalties and biases are computed.

The runner calls ``count`` before it launches a step. It brings the rows of the step's requests up to their
newest tokens: those that the host has read, and from the device a token that is still in flight. A row whose
request has changed since its last step is noticed here and starts anew. ``StepDraws.plan`` then asks ``of``
for the counts at the places where the step draws tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse_pd.core.model.token_counts import CountedRows, TokenCounts, to_device
from hisparse_pd.decode_node.request import Request


class _Counted(NamedTuple):
    """A request whose tokens a row counts, and how many of its output tokens are counted."""

    request_id: str
    num_tokens: int


class RowCounts:
    """Counts of ``num_rows`` requests; those whose settings leave logits alone are never counted."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._table = TokenCounts.create(num_rows, vocab_size, device)
        self._counted: dict[int, _Counted] = {}
        """By req_row, what was counted there last."""

    def count(self, batch: Sequence[Request], in_flight: Tensor) -> None:
        """Bring the rows of a step's requests up to date, before the step is launched.

        ``in_flight``: int64 by req_row, the token that each row's last step sampled; read for rows whose step
        the host has not read. No step in flight may verify drafts of a counted request, because the number of
        tokens that it yields is not known yet. Enqueues on the current stream.
        """
        rows: list[int] = []
        token_ids: list[int] = []
        rows_in_flight: list[int] = []
        for request in batch:
            if not request.changes_logits:
                continue
            row = request.req_row
            counted = self._counted.get(row)
            if counted is not None and counted.request_id == request.request_id:
                num_counted = counted.num_tokens
            else:
                num_counted = 0
                self._table.start(row, request.sampling, request.prompt_token_ids)
            known = request.output_token_ids[num_counted:]
            rows += [row] * len(known)
            token_ids += known
            num_in_flight = request.num_outputs_in_flight  # 0 or 1: at most one step is unread here
            rows_in_flight += [row] * num_in_flight
            self._counted[row] = _Counted(request.request_id, num_counted + len(known) + num_in_flight)
        if rows:
            self._table.add(*to_device([rows, token_ids], self._device))
        if rows_in_flight:
            rows_dev = to_device(rows_in_flight, self._device)
            self._table.add(rows_dev, in_flight[rows_dev])

    def of(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]] = ()) -> CountedRows | None:
        """Return the counts behind each row of logits, for ``model.sampling``; None when no request is
        counted.

        ``requests``: one for each row. ``drafts``: those before each row's position; () when there are none.
        """
        if not any(request.changes_logits for request in requests):
            return None
        return CountedRows(self._table, [request.req_row for request in requests], drafts)
