"""Makes the drafts of the next step: the draft layer's first guess for each request, and further ones, each
from the one before.

``StepHalves`` calls ``draft_chain`` at the end of a step, after the draft layer's pass over the step's
positions.

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
    """The ``KvAccess`` of later drafts that share the selection of the first guess. Their KV is not written,
    and the items that they attend to are where the first guess had them."""

    def __init__(self, first: DeviceStep, newest_rows: Tensor) -> None:
        """``first``: the access of the pass whose rows ``newest_rows``, int64 [num_reqs], made the first
        guesses."""
        self._first = first
        self.selected = first.device_slots[newest_rows]
        """int32 [num_reqs, index_topk]: device slots of the selected positions. ``attend`` gets them as its
        positions."""

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        """Write nothing. ``KvAccess`` describes this method and the next ones."""

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
    """Return the draft layer's guesses, int64 [num_reqs, num_drafts], each made from the one before.

    ``first``, ``logits`` [num_reqs, vocab_size] and ``hidden`` [num_rows, hidden_size] are those of the
    layer's pass over the step's positions. Its rows ``newest_rows`` (int64 [num_reqs]) guessed the first
    drafts. ``seq_lens``: int64 [num_reqs], one more than the positions of these rows. ``step_of(number)``
    returns the KV access of the draft behind ``number`` others, for layers in which each draft selects for
    itself.
    """
    drafts, hidden = [logits.argmax(dim=-1)], hidden[newest_rows]
    reqs = torch.arange(len(newest_rows), device=newest_rows.device)
    shared = None
    if model.spec.shares_draft_selection and num_drafts > 1:
        shared = SharedSelection(first, newest_rows)
    for number in range(1, num_drafts):
        kv: KvAccess = shared or step_of(number)
        # A row at position i takes the token of i + 1, the latest draft, and guesses that of i + 2.
        positions, selected = seq_lens + (number - 1), shared.selected if shared else None
        logits, hidden = model.draft(drafts[-1], hidden, positions, kv, reqs, selected=selected)
        drafts.append(logits.argmax(dim=-1))
    return torch.stack(drafts, dim=1)
