"""The device's memory of what each request's last step came to: newest token, length and next drafts.

``StepHalves`` writes it at the end of a step and reads it at the start of the next one, so that the next step
can be launched before the host has read the last. Where the host has read a value, ``StepInputs`` has it
instead of FROM_DEVICE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse_pd.decode_node.drafting import NO_DRAFT
from hisparse_pd.decode_node.step_buffers import FROM_DEVICE, StepInputs
from hisparse_pd.kernels.step_tokens import newest_tokens


class DraftsToVerify(NamedTuple):
    """The drafts of a step."""

    token_ids: Tensor
    """int64 [num_reqs, num_new - 1]: each request's drafts, and NO_DRAFT behind them. ``num_new``: the places
    of a request's tokens in the step, one for its newest token and the others for drafts."""
    counts: Tensor
    """int64 [num_reqs]: how many drafts each request has."""


@dataclass(frozen=True)
class RowOutcomes:
    """The outcomes of all rows: int64 tensors, by req_row. The last entry takes what padding writes."""

    tokens: Tensor
    """[num_rows + 1]: the newest token."""
    seq_lens: Tensor
    """[num_rows + 1]: the sequence's length with that token. Steps without drafts do not write it, nor
    ``drafts``: they yield one token, which the host can count."""
    drafts: Tensor
    """[num_rows + 1, max_new - 1]: what the draft layer guesses to follow, or NO_DRAFT. ``max_new``: the most
    that ``num_new`` can be."""

    @classmethod
    def create(cls, num_rows: int, max_new: int, device: torch.device) -> RowOutcomes:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros((num_rows + 1, *shape), dtype=torch.int64, device=device)

        return cls(tokens=zeros(), seq_lens=zeros(), drafts=zeros(max_new - 1))

    def newest_tokens(self, given: Tensor, req_rows: Tensor) -> Tensor:
        """Return the newest tokens, [num_reqs]: those that the host has ``given``, else the rows' own."""
        return newest_tokens(given, self.tokens, req_rows)

    def lengths(self, inputs: StepInputs, num_reqs: int) -> Tensor:
        """Return the lengths of the sequences, the newest token included: [num_reqs]."""
        given = inputs.seq_lens[:num_reqs]
        if not self.drafts.shape[1]:
            return given  # no step verifies drafts
        return torch.where(given == FROM_DEVICE, self.seq_lens[inputs.req_rows[:num_reqs]], given)

    def drafts_to_verify(self, inputs: StepInputs, seq_lens: Tensor, num_new: int) -> DraftsToVerify:
        """Return each request's first drafts: no more than the host allows, and none without a slot.

        ``seq_lens``: as ``lengths`` returns them.
        """
        num_reqs, num_drafts = seq_lens.shape[0], num_new - 1
        # A request's tokens are its newest one, then its drafts.
        from_host = inputs.tokens[: num_reqs * num_new].view(num_reqs, num_new)[:, 1:]
        from_device = self.drafts[inputs.req_rows[:num_reqs], :num_drafts]
        # The host reads a step's length and drafts together, so an unread length means unread drafts.
        is_unread = inputs.seq_lens[:num_reqs] == FROM_DEVICE
        drafts = torch.where(is_unread[:, None], from_device, from_host)
        counts = (drafts != NO_DRAFT).long().cumprod(dim=1).sum(dim=1)  # those before the first NO_DRAFT
        counts = counts.minimum(inputs.most_drafts[:num_reqs])
        counts = counts.minimum(inputs.slot_ends[:num_reqs] - seq_lens)
        places = torch.arange(num_drafts, device=drafts.device)
        return DraftsToVerify(torch.where(places < counts[:, None], drafts, NO_DRAFT), counts)

    def put_verified(self, inputs: StepInputs, tokens: Tensor, seq_lens: Tensor, drafts: Tensor) -> None:
        """Write the outcomes of a step that verified drafts: ``tokens`` and ``seq_lens`` [num_reqs], and next
        ``drafts`` [num_reqs, num_drafts]."""
        rows = self._rows_of(inputs, tokens.shape[0])
        self.tokens[rows] = tokens
        self.seq_lens[rows] = seq_lens
        missing = self.drafts.shape[1] - drafts.shape[1]
        self.drafts[rows] = torch.nn.functional.pad(drafts, (0, missing), value=NO_DRAFT)

    def _rows_of(self, inputs: StepInputs, num_reqs: int) -> Tensor:
        """Return the rows of the step's requests, and the last entry for padding: int64 [num_reqs]."""
        is_real = torch.arange(num_reqs, device=self.tokens.device) < inputs.num_real_reqs
        return torch.where(is_real, inputs.req_rows[:num_reqs], self.tokens.shape[0] - 1)
