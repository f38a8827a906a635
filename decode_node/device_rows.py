"""What each row goes on with after its last step: written on the device, where the next step may have it from
before the host has read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decode_node.drafting import NO_DRAFT
from decode_node.step_buffers import FROM_DEVICE, StepInputs


@dataclass(frozen=True)
class DeviceRows:
    """int64, by req_row; the last entry is of padding."""

    tokens: Tensor
    """[num_rows + 1]: what the row's last step sampled last."""
    seq_lens: Tensor
    """[num_rows + 1]: the sequence's length with that token. Of rows whose last step verified drafts, like
    the drafts: other steps yield one token, which the host can count."""
    drafts: Tensor
    """[num_rows + 1, max_new - 1]: what the draft layer guesses to follow, or NO_DRAFT."""

    @classmethod
    def create(cls, num_rows: int, max_new: int, device: torch.device) -> DeviceRows:
        def of_rows(*shape: int) -> Tensor:
            return torch.zeros((num_rows + 1, *shape), dtype=torch.int64, device=device)

        return cls(of_rows(), of_rows(), of_rows(max_new - 1))

    def newest_tokens(self, given: Tensor, req_rows: Tensor) -> Tensor:
        """[num_reqs]: ``given`` ones, or the row's."""
        return torch.where(given == FROM_DEVICE, self.tokens[req_rows], given)

    def lengths(self, inputs: StepInputs, num_reqs: int) -> Tensor:
        """[num_reqs]: of the sequences, the newest token included."""
        given = inputs.seq_lens[:num_reqs]
        if not self.drafts.shape[1]:
            return given  # no step verifies drafts
        return torch.where(given == FROM_DEVICE, self.seq_lens[inputs.req_rows[:num_reqs]], given)

    def drafts_to_verify(self, inputs: StepInputs, seq_lens: Tensor, num_new: int) -> tuple[Tensor, Tensor]:
        """[num_reqs, num_new - 1], NO_DRAFT behind those of each request, whose numbers are [num_reqs].

        As many as there are, the host allows, and have slots. ``seq_lens``: as of ``lengths``.
        """
        num_reqs, num_drafts = seq_lens.shape[0], num_new - 1
        given = inputs.tokens[: num_reqs * num_new].view(num_reqs, num_new)[:, 1:]
        of_rows = self.drafts[inputs.req_rows[:num_reqs], :num_drafts]
        is_unread = inputs.seq_lens[:num_reqs] == FROM_DEVICE
        drafts = torch.where(is_unread[:, None], of_rows, given)
        counts = (drafts != NO_DRAFT).long().cumprod(dim=1).sum(dim=1)
        counts = counts.minimum(inputs.most_drafts[:num_reqs])
        counts = counts.minimum(inputs.slot_ends[:num_reqs] - seq_lens)
        places = torch.arange(num_drafts, device=drafts.device)
        return torch.where(places < counts[:, None], drafts, NO_DRAFT), counts

    def put(
        self,
        inputs: StepInputs,
        tokens: Tensor,
        seq_lens: Tensor | None = None,
        drafts: Tensor | None = None,
    ) -> None:
        """What follows for the step's real requests: [num_reqs], and [num_reqs, num_drafts] ``drafts``."""
        num_reqs = tokens.shape[0]
        is_real = torch.arange(num_reqs, device=tokens.device) < inputs.num_real_reqs
        rows = torch.where(is_real, inputs.req_rows[:num_reqs], self.tokens.shape[0] - 1)
        self.tokens[rows] = tokens
        if seq_lens is not None and drafts is not None:
            self.seq_lens[rows] = seq_lens
            missing = self.drafts.shape[1] - drafts.shape[1]
            self.drafts[rows] = torch.nn.functional.pad(drafts, (0, missing), value=NO_DRAFT)
