"""The results that the first half of a decode step, the model's forward, leaves on the device
(``step_halves.py``).

The draws read them, and so does the second half, which accepts drafts, backs up KV and makes the next drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.decode_node.device_step import DeviceStep
from hisparse_pd.decode_node.row_outcomes import DraftsToVerify


@dataclass(frozen=True)
class Forward:
    """The results of a step's first half, for the draws and for ``Forwards.follow``."""

    num_reqs: int
    num_new: int
    """New positions of each request: 1 without drafts."""
    logits: Tensor
    """float32 [num_reqs * num_new, vocab_size]: a request's new positions are next to each other."""
    token_ids: Tensor
    """int64 [num_reqs * num_new]: the likeliest tokens, which draws may overwrite; where steps compute a
    prompt's tail, the prompt's own next tokens."""
    results: Tensor | None = None
    """The rows that the host reads after a step without drafts, int64 [num_reqs, columns of
    ``step_results.py``]; ``token_ids`` is its last column. None in steps that verify drafts."""
    verified: Verified | None = None
    """The tensors that the acceptance of drafts needs; None in steps without drafts."""


@dataclass(frozen=True)
class Verified:
    """The tensors of a forward with drafts that their acceptance needs."""

    access: DeviceStep
    """The pools as the forward saw them."""
    seq_lens: Tensor
    """int64 [num_reqs]: lengths before the step, the newest token included."""
    drafts: DraftsToVerify


@dataclass(frozen=True)
class KeptResults:
    """Copies of a forward's results, one row for each new position of each request.

    They are at the same addresses in steps of all sizes, so that a captured second half finds them, whichever
    first half has run. Only nodes that draft have them.
    """

    logits: Tensor
    """float32 [max_rows, vocab_size]"""
    hidden: Tensor
    """[max_rows, hidden_size]"""
    token_ids: Tensor
    """int64 [max_rows]"""

    @classmethod
    def create(cls, model: DsaModel, max_rows: int) -> KeptResults:
        device = model.device
        return cls(
            torch.zeros((max_rows, model.spec.vocab_size), dtype=torch.float32, device=device),
            torch.zeros((max_rows, model.spec.hidden_size), dtype=model.spec.dtype, device=device),
            torch.zeros(max_rows, dtype=torch.int64, device=device),
        )
