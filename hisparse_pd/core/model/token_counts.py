"""Counts the tokens of requests on the device, and applies penalties and biases to logits.

A decode engine has one ``TokenCounts``. ``decode_node/row_counts.py`` calls ``start`` when a request with
penalties or biases begins, and before each step ``add`` with the tokens drawn since. ``sampling.py`` calls
``CountedRows.change`` before each draw. Each request has a row on the device with a count for each token of
the vocabulary, so that a step's tokens are counted before the host has read them. Rows do not count drafts:
``change`` adds the drafts before a position to a copy of the row.

Every logit changes in float32, independently of the others in its row and of other rows, so that a request
gets the same tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse_pd.base.vocabulary import MAX_LOGIT_BIAS, SamplingParams

_IN_PROMPT = 1 << 30
"""Added to the count of a token in the prompt; greater than any count of output tokens."""
_LEAST_REPETITION = 2.0**-100
"""Smallest repetition penalty that logits are divided by; repeated tokens win with it as with a smaller one.
A smaller one, in float32 perhaps 0, would make logits infinite, which have no probabilities."""
ROWS_AT_A_TIME = 64
"""Rows of logits that are changed at once, so that temporary copies do not grow with the batch."""


@dataclass(frozen=True)
class TokenCounts:
    """The counts and biases of ``num_rows`` requests. A row is undefined until it is started.

    Methods enqueue on the current stream and do not wait.
    """

    counts: Tensor
    """How often the output has a token, plus _IN_PROMPT if the prompt has it: int32 [num_rows,
    vocab_size]."""
    bias_ids: Tensor
    """Tokens with a bias, padded with zeros: int64 [num_rows, MAX_LOGIT_BIAS]."""
    biases: Tensor
    """The biases of these tokens, padded with zeros: float32 [num_rows, MAX_LOGIT_BIAS]."""

    @classmethod
    def create(cls, num_rows: int, vocab_size: int, device: torch.device) -> TokenCounts:
        return cls(
            torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device),
            torch.zeros((num_rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device),
            torch.zeros((num_rows, MAX_LOGIT_BIAS), dtype=torch.float32, device=device),
        )

    @staticmethod
    def num_bytes(num_rows: int, vocab_size: int) -> int:
        return num_rows * (4 * vocab_size + (8 + 4) * MAX_LOGIT_BIAS)

    def start(self, row: int, params: SamplingParams, prompt: NDArray[np.int32] | None) -> None:
        """Give a row to a request that has generated nothing here.

        ``prompt``: token ids, used if ``params`` need them; resumed ones among them count as output.
        """
        device = self.counts.device
        counts = self.counts[row].zero_()
        if params.needs_prompt and prompt is not None:
            prompt_dev = to_device(prompt, device)
            counts.index_fill_(0, prompt_dev, _IN_PROMPT)
            if params.num_resumed_tokens:
                _add_one(counts, prompt_dev[-params.num_resumed_tokens :])
        bias_ids = np.zeros(MAX_LOGIT_BIAS, np.int64)
        biases = np.zeros(MAX_LOGIT_BIAS, np.float32)
        num_biases = _num_biases(params)  # ``logit_bias`` has so many ids, and behind them as many biases
        bias_ids[:num_biases] = np.frombuffer(params.logit_bias, "<i4", num_biases)
        biases[:num_biases] = np.frombuffer(params.logit_bias, "<f4")[num_biases:]
        self.bias_ids[row] = to_device(bias_ids, device)
        self.biases[row] = to_device(biases, device, torch.float32)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count an output token for each of ``rows``, which may repeat; both are int64 [n]."""
        _add_one(self.counts, rows * self.counts.shape[1] + token_ids)


@dataclass(frozen=True)
class CountedRows:
    """The counts and drafts that belong to the rows of logits of one draw."""

    table: TokenCounts
    rows: Sequence[int]
    """The row of ``table`` for each row of logits; ignored for rows without penalties and biases."""
    drafts: Sequence[Sequence[int]] = ()
    """The drafts before the position of each row of logits; () when there are no drafts."""

    def change(self, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """Return ``logits``, float32 [num_rows, vocab_size], with penalties and biases. The argument is not
        changed; it is returned itself if no row has any."""
        changing = [row for row, param in enumerate(params) if param.changes_logits]
        if not changing:
            return logits
        changed = logits.clone()
        for start in range(0, len(changing), ROWS_AT_A_TIME):
            self._change_rows(changed, changing[start : start + ROWS_AT_A_TIME], params)
        return changed

    def _change_rows(self, logits: Tensor, rows: list[int], params: Sequence[SamplingParams]) -> None:
        """Apply penalties and biases to ``rows`` of ``logits``, in place."""
        device = logits.device
        logits_rows, table_rows = to_device([rows, [self.rows[row] for row in rows]], device)
        values = logits[logits_rows]
        if any(_penalties(params[row]) != _NO_PENALTIES for row in rows):
            counts = self.table.counts[table_rows]
            if self.drafts:
                vocab_size = logits.shape[1]
                drafts = [
                    place * vocab_size + token_id
                    for place, row in enumerate(rows)
                    for token_id in self.drafts[row]
                ]
                _add_one(counts, to_device(drafts, device))
            penalties = to_device([_penalties(params[row]) for row in rows], device, torch.float32)
            repetition, frequency, presence = penalties.T[:, :, None]
            repeated = torch.where(values > 0, values / repetition, values * repetition)
            values = torch.where(counts > 0, repeated, values)
            counts &= _IN_PROMPT - 1  # only the repetition penalty counts the prompt
            values -= frequency * counts
            values -= presence * (counts > 0)
        if num_biases := max(_num_biases(params[row]) for row in rows):
            # The padding adds zeros to token 0, whose sum is the same in any order.
            bias_ids, biases = (
                of_all[table_rows, :num_biases] for of_all in (self.table.bias_ids, self.table.biases)
            )
            values.scatter_add_(1, bias_ids, biases)
        logits[logits_rows] = values


_NO_PENALTIES = (1.0, 0.0, 0.0)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    """Return the penalties of repetition, frequency and presence."""
    repetition = max(params.repetition_penalty, _LEAST_REPETITION)
    return repetition, params.frequency_penalty, params.presence_penalty


def _num_biases(params: SamplingParams) -> int:
    return len(params.logit_bias) // 8  # ``pack_logit_bias``: ids in int32, biases in float32


def _add_one(counts: Tensor, places: Tensor) -> None:
    """Add 1 to the flattened int32 ``counts`` at each of ``places``, int64 [n], which may repeat."""
    ones = torch.ones(places.shape, dtype=torch.int32, device=places.device)
    counts.view(-1).scatter_add_(0, places, ones)


def to_device(
    values: Sequence[object] | NDArray[np.generic], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return ``values`` on ``device``, copied from pinned memory: other copies wait for the device."""
    tensor = torch.tensor(values, dtype=dtype)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
