"""Logprobs of a prompt's own tokens: the probability of each one, given those before it.

The prefill node calls ``score_rows`` after a forward's layers. Rows are computed in slices, so that at most
``SLICE_BYTES`` of float32 logits exist at a time. Temporary tensors take a dozen times as much: less than the
layers' activations, which are gone by then. The values are those of the unscaled logits, as the output's
logprobs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.kernels.selection import ranked_topk

SLICE_BYTES = 32 << 20
"""Bytes of a slice's logits; 64 rows of a vocabulary of 129,280 tokens."""


@dataclass(frozen=True)
class ScoredRows:
    """Scores on the host, complete once the stream has passed ``score_rows``.

    ``logprobs``, float32 [n], and ``ranks``, int32 [n]: of the prompt's token behind each row; rank 1 is the
    best token of the vocabulary. ``top_ids``, int32 [n, num_top], and ``top_logprobs``, float32 [n, num_top]:
    the best tokens. Better tokens come first, of equal ones the lowest id.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def score_rows(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, token_ids: Tensor, num_top: int, vocab_size: int
) -> ScoredRows:
    """Enqueue the scores of rows, without waiting for the device.

    ``logits_of``: returns the logits, float32 [_, vocab_size], of rows of ``hidden`` [n, hidden_size];
    ``token_ids``: int64 [n] on the same device, the token behind each row; ``num_top``: how many of the best
    tokens, at most the whole vocabulary.
    """
    num_rows, num_top = hidden.shape[0], min(num_top, vocab_size)
    scored = ScoredRows(
        _host(torch.float32, hidden.device, num_rows),
        _host(torch.int32, hidden.device, num_rows),
        _host(torch.int32, hidden.device, num_rows, num_top),
        _host(torch.float32, hidden.device, num_rows, num_top),
    )
    slice_rows = max(1, SLICE_BYTES // (4 * vocab_size))
    all_ids = torch.arange(vocab_size, device=hidden.device)
    for start in range(0, num_rows, slice_rows):
        rows = slice(start, start + slice_rows)
        next_ids = token_ids[rows, None]
        logprobs = torch.log_softmax(logits_of(hidden[rows]), dim=-1)
        next_logprobs = logprobs.gather(1, next_ids)
        is_before = (logprobs > next_logprobs) | ((logprobs == next_logprobs) & (all_ids < next_ids))
        scored.logprobs[rows].copy_(next_logprobs[:, 0], non_blocking=True)
        scored.ranks[rows].copy_((is_before.sum(1) + 1).int(), non_blocking=True)
        if num_top:
            best, best_ids = ranked_topk(logprobs, num_top)
            scored.top_ids[rows].copy_(best_ids.int(), non_blocking=True)
            scored.top_logprobs[rows].copy_(best, non_blocking=True)
    return scored


def _host(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Return an empty tensor in main memory, which is pinned if ``device`` is a GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
