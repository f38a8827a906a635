"""What a step gets from the host and gives back, at fixed addresses on both sides; and what each row goes on
with after its last step, written on the device, where the next step may have it before the host has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.decode_node.drafting import NO_DRAFT
from hisparse_pd.decode_node.request import Request

FROM_DEVICE = -1
"""In place of a newest token or a length: what the row's last step, which nobody has read, made of it."""


@dataclass(frozen=True)
class StepInputs:
    """What a step gets from the host: views of one int64 tensor, ``values``."""

    values: Tensor
    tokens: Tensor
    """[max_reqs * max_new]: of each request the newest token, or FROM_DEVICE, and drafts, or NO_DRAFT."""
    seq_lens: Tensor
    """[max_reqs], and so the others: with the newest token; or FROM_DEVICE, and then the drafts too."""
    req_rows: Tensor
    most_drafts: Tensor
    """That may be verified of a request's drafts."""
    slot_ends: Tensor
    """Where the positions end that have slots and may be needed."""
    num_real: Tensor
    """[1] requests that are real."""

    @classmethod
    def create(
        cls, max_reqs: int, max_new: int, device: torch.device | str, *, pin_memory: bool = False
    ) -> StepInputs:
        sizes = [max_reqs * max_new, max_reqs, max_reqs, max_reqs, max_reqs, 1]
        values = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pin_memory)
        return cls(values, *torch.split(values, sizes))

    @property
    def num_real_reqs(self) -> Tensor:
        """int32 [1]: the low half of ``num_real``, in its place."""
        return self.num_real.view(torch.int32)[:1]


@dataclass(frozen=True)
class StepBuffers:
    """The host's side of every other step: what goes to the device, and what comes back."""

    inputs: StepInputs
    masks: Tensor
    """int32 [max_reqs * max_new, num_words]: bits of the tokens that the step's rows may draw."""
    results: Tensor
    """int64 [max_reqs * (5 + 2 * max_new)]: rows of each request, as long as the step has them."""
    done: torch.cuda.Event | None
    ranks: RankGroup | None

    @classmethod
    def create(
        cls, max_reqs: int, max_new: int, vocab_size: int, is_pinned: bool, ranks: RankGroup | None
    ) -> StepBuffers:
        num_words = -(-vocab_size // 32)
        return cls(
            StepInputs.create(max_reqs, max_new, "cpu", pin_memory=is_pinned),
            torch.zeros((max_reqs * max_new, num_words), dtype=torch.int32, pin_memory=is_pinned),
            torch.zeros(max_reqs * (5 + 2 * max_new), dtype=torch.int64, pin_memory=is_pinned),
            torch.cuda.Event() if is_pinned else None,  # type: ignore[no-untyped-call]
            ranks,
        )

    def fill(
        self,
        batch: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        most_drafts: Sequence[int],
        unread: Sequence[bool],
        num_new: int,
        max_context: int,
    ) -> None:
        """``drafts``: of each request, fewer than ``num_new``. ``unread``: whose length and drafts are still
        to be read."""
        inputs = self.inputs
        num_padding = inputs.seq_lens.shape[0] - len(batch)
        tokens: list[int] = []
        for request, of_req in zip(batch, drafts, strict=True):
            tokens.append(FROM_DEVICE if request.num_in_flight else request.newest_token_id)
            tokens += (*of_req, *[NO_DRAFT] * (num_new - 1 - len(of_req)))
        lens = [
            FROM_DEVICE if is_unread else request.next_seq_len
            for request, is_unread in zip(batch, unread, strict=True)
        ]
        slot_ends = [min(each.reserved_tokens, max_context, each.life_tokens) for each in batch]
        inputs.tokens.numpy()[:] = tokens + [0] * (inputs.tokens.shape[0] - len(tokens))
        for values, of_reqs, of_padding in (
            (inputs.seq_lens, lens, 1),
            (inputs.req_rows, [request.req_row for request in batch], 0),
            (inputs.most_drafts, list(most_drafts), 0),
            (inputs.slot_ends, slot_ends, 1),
        ):
            values.numpy()[:] = of_reqs + [of_padding] * num_padding
        inputs.num_real.numpy()[0] = len(batch)

    def take(self, results: Tensor) -> None:
        """Let ``results`` [num_reqs, num_columns] come, without waiting: to memory that is contiguous."""
        self.results[: results.numel()].view_as(results).copy_(results, non_blocking=True)

    def mark(self) -> None:
        """``wait`` is for what has been enqueued until now."""
        if self.done is not None:
            self.done.record()

    def read(self, num_reqs: int, num_columns: int) -> list[list[int]]:
        """What ``take`` was given. Waits."""
        self.wait()
        rows: list[list[int]] = self.results[: num_reqs * num_columns].view(num_reqs, num_columns).tolist()
        return rows

    def wait(self) -> None:
        if self.done is not None:
            with self.ranks.bounded_wait() if self.ranks else nullcontext():
                self.done.synchronize()


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
