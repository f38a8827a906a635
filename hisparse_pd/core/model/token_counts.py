"""Which tokens requests have already, counted on the device; and what penalties and biases make of logits.

The counts are a row of the vocabulary for each request, so that what a step drew can be counted there before
the host has read it. Drafts are not counted: each position of a step has those before it on top.

Every logit changes by itself, in float32: not by the others of its row, nor by other rows. So a request has
the same tokens wherever and with whomever it is drawn.
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
"""Above any count of output tokens."""
_ROWS_AT_A_TIME = 64
"""Whose logits are changed together, so that copies of them on the way do not grow with the batch."""


@dataclass(frozen=True)
class TokenCounts:
    """Of ``num_rows`` requests, with their biases. Filled when a row is started, and only then read.

    Methods enqueue on the current stream and wait for nothing.
    """

    counts: Tensor
    """int32 [num_rows, vocab_size]: how often the output has the token; _IN_PROMPT more if the prompt has."""
    bias_ids: Tensor
    """int64 [num_rows, MAX_LOGIT_BIAS]: tokens, with zeros behind the last."""
    biases: Tensor
    """float32 [num_rows, MAX_LOGIT_BIAS]: what is added to their logits, with zeros behind the last."""

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
        """Give a row to a request that has generated nothing here. ``prompt``: token ids, used if ``params``
        need them; the resumed ones among them count as output."""
        device = self.counts.device
        counts = self.counts[row].zero_()
        if params.needs_prompt and prompt is not None:
            prompt_dev = to_device(prompt, device)
            counts.index_fill_(0, prompt_dev, _IN_PROMPT)
            if params.num_resumed_tokens:
                _add_one(counts, prompt_dev[-params.num_resumed_tokens :])
        bias_ids = np.zeros(MAX_LOGIT_BIAS, np.int64)
        biases = np.zeros(MAX_LOGIT_BIAS, np.float32)
        num_biases = _num_biases(params)
        bias_ids[:num_biases] = np.frombuffer(params.logit_bias, "<i4", num_biases)
        biases[:num_biases] = np.frombuffer(params.logit_bias, "<f4")[num_biases:]
        self.bias_ids[row] = to_device(bias_ids, device)
        self.biases[row] = to_device(biases, device, torch.float32)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count an output token of each of ``rows``, of which some may be the same; int64 [n], both."""
        _add_one(self.counts, rows * self.counts.shape[1] + token_ids)


@dataclass(frozen=True)
class CountedRows:
    """What the rows of logits of one draw have behind them."""

    table: TokenCounts
    rows: Sequence[int]
    """Of ``table``, one for each row of logits; any for one without penalties and biases."""
    drafts: Sequence[Sequence[int]] = ()
    """For each row of logits, the drafts before its position; () when there are none at all."""

    def change(self, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """float32 [num_rows, vocab_size] ``logits`` behind penalties and biases; they stay as they are."""
        changing = [row for row, param in enumerate(params) if param.changes_logits]
        if not changing:
            return logits
        changed = logits.clone()
        for start in range(0, len(changing), _ROWS_AT_A_TIME):
            self._change_some(changed, changing[start : start + _ROWS_AT_A_TIME], params)
        return changed

    def _change_some(self, logits: Tensor, some: list[int], params: Sequence[SamplingParams]) -> None:
        device = logits.device
        at, of_table = to_device([some, [self.rows[row] for row in some]], device)
        values = logits[at]
        if any(_penalties(params[row]) != _NO_PENALTIES for row in some):
            counts = self.table.counts[of_table]
            if self.drafts:
                vocab_size = logits.shape[1]
                drafts = [
                    place * vocab_size + token_id
                    for place, row in enumerate(some)
                    for token_id in self.drafts[row]
                ]
                _add_one(counts, to_device(drafts, device))
            penalties = to_device([_penalties(params[row]) for row in some], device, torch.float32)
            repetition, frequency, presence = penalties.T[:, :, None]
            repeated = torch.where(values > 0, values / repetition, values * repetition)
            values = torch.where(counts > 0, repeated, values)
            counts &= _IN_PROMPT - 1
            values -= frequency * counts
            values -= presence * (counts > 0)
        if num_biases := max(_num_biases(params[row]) for row in some):
            # Behind the last bias of a row nothing is added to token 0: its sum is the same in any order.
            bias_ids, biases = (
                of_all[of_table, :num_biases] for of_all in (self.table.bias_ids, self.table.biases)
            )
            values.scatter_add_(1, bias_ids, biases)
        logits[at] = values


_NO_PENALTIES = (1.0, 0.0, 0.0)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _num_biases(params: SamplingParams) -> int:
    return len(params.logit_bias) // 8


def _add_one(counts: Tensor, places: Tensor) -> None:
    """To int32 ``counts`` at int64 [n] ``places`` of all, any number of times each."""
    ones = torch.ones(places.shape, dtype=torch.int32, device=places.device)
    counts.view(-1).scatter_add_(0, places, ones)


def to_device(
    values: Sequence[object] | NDArray[np.generic], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """``values`` on ``device``. From pinned memory: other copies wait for what the device is at."""
    tensor = torch.tensor(values, dtype=dtype)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
