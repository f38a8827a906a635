"""The drafts of a step: the draft layer's first guess for each request, and those that follow from it.

Some draft layers were trained to share (``index_share_for_mtp_iteration``, GLM-5.2): a request's later drafts
attend to what its first guess selected, and to nothing that drafts have made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse_pd.core.model.attention import KvAccess
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.decode_node.device_step import DeviceStep


class SharedSelection:
    """The ``KvAccess`` of drafts behind the first ones, where they share their selection: none of their KV is
    written, and what they attend to is where the first guess had it."""

    def __init__(self, first: DeviceStep, newest_rows: Tensor) -> None:
        """``first``: of the pass whose rows ``newest_rows``, int64 [num_reqs], made the first guesses."""
        self._first = first
        self.selected = first.device_slots[newest_rows]
        """int32 [num_reqs, index_topk]: not positions but their device slots."""

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        """See ``hisparse_pd.core.model.attention.KvAccess``; so below."""

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        return self.selected

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        return self._first.attend_at(layer, q, positions, scale)


def draft_chain(
    model: DsaModel,
    first: DeviceStep,
    newest_rows: Tensor,
    logits: Tensor,
    hidden: Tensor,
    seq_lens: Tensor,
    num_drafts: int,
    step_of: Callable[[int], DeviceStep],
) -> Tensor:
    """int64 [num_reqs, num_drafts]: what the draft layer guesses to follow, each draft from the one before.

    ``first``, ``logits`` [num_reqs, vocab_size] and ``hidden`` [num_rows, hidden_size]: of the layer's pass
    over the step's positions, whose rows ``newest_rows`` (int64 [num_reqs]) guessed the first drafts.
    ``seq_lens``: int64 [num_reqs], up to the positions of these rows. ``step_of(number)``: the KV access of
    the draft behind ``number`` others, where each selects for itself.
    """
    drafts, hidden = [logits.argmax(dim=-1)], hidden[newest_rows]
    reqs = torch.arange(len(newest_rows), device=newest_rows.device)
    shared = None
    if model.spec.shares_draft_selection and num_drafts > 1:
        shared = SharedSelection(first, newest_rows)
    for number in range(1, num_drafts):
        kv: KvAccess = shared or step_of(number)
        positions, selected = seq_lens + (number - 1), shared.selected if shared else None
        logits, hidden = model.draft(drafts[-1], hidden, positions, kv, reqs, selected=selected)
        drafts.append(logits.argmax(dim=-1))
    return torch.stack(drafts, dim=1)
