"""The memory through which host and device exchange a step's inputs and results.

``StepInputs`` are the inputs, on either side; ``StepBuffers`` is the host's memory of one step, with its
inputs, grammar masks and results. The runner fills and sends the inputs at a step's launch, and reads the
results a step later. All addresses are fixed, because CUDA graphs and copies under way have them.
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
from hisparse_pd.decode_node.step_results import num_columns

FROM_DEVICE = -1
"""Stands for a newest token or a length that the host has not read: the device takes it from
``RowOutcomes``."""


@dataclass(frozen=True)
class StepEntry:
    """A request's part in one step.

    While its steps compute a short tail of the prompt, tokens of the prompt take the place of drafts, and all
    of them are accepted: they follow whatever is drawn.

    Example: the newest token is at position 96 of a prompt of 100. With up to two drafts, ``drafts`` has the
    tokens of 97 and 98, and ``known`` those of 97, 98 and 99, which follow the positions 96, 97 and 98. With
    up to four, ``drafts`` has that of 99, too: behind it, and nowhere else, a token is drawn.
    """

    request: Request
    drafts: Sequence[int]
    """Drafts to verify, or tokens of the prompt in their place; empty where only the device has them."""
    most_drafts: int
    """The most drafts that the step verifies."""
    is_unread: bool
    """Whether length and drafts are outcomes of a step that the host has not read yet."""
    known: Sequence[int] = ()
    """Tokens of the prompt that follow the first new positions, one for each. Nothing is drawn there."""

    @property
    def num_sure(self) -> int:
        """The number of positions that the step is sure to compute."""
        return 1 + len(self.drafts) if self.known else 1

    @property
    def num_unsure(self) -> int:
        """The most positions behind the sure ones that it computes, if all drafts are right."""
        return 0 if self.known else self.most_drafts

    @property
    def drawn_at(self) -> range:
        """The numbers, from 0, of its new positions at which an output token is drawn."""
        return range(len(self.known), 1 + len(self.drafts))


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step: views of one int64 tensor, ``values``, so that one copy sends them all."""

    values: Tensor
    tokens: Tensor
    """[max_reqs * max_new]: for each request its newest token, or FROM_DEVICE, and drafts, or NO_DRAFT."""
    known_next: Tensor
    """[max_reqs * max_new]: for each request the prompt's tokens that follow its first new positions, or
    NO_DRAFT."""
    seq_lens: Tensor
    """[max_reqs]: lengths with the newest token, or FROM_DEVICE; then the device has the drafts, too."""
    req_rows: Tensor
    """[max_reqs]"""
    most_drafts: Tensor
    """[max_reqs]: the most drafts that are verified."""
    slot_ends: Tensor
    """[max_reqs]: the end of the positions that have slots and that the request may come to need."""
    num_real: Tensor
    """[1]: requests that are not padding."""

    @classmethod
    def create(
        cls, max_reqs: int, max_new: int, device: torch.device | str, *, pin_memory: bool = False
    ) -> StepInputs:
        sizes = {
            "tokens": max_reqs * max_new,
            "known_next": max_reqs * max_new,
            "seq_lens": max_reqs,
            "req_rows": max_reqs,
            "most_drafts": max_reqs,
            "slot_ends": max_reqs,
            "num_real": 1,
        }
        values = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device, pin_memory=pin_memory)
        views = torch.split(values, list(sizes.values()))
        return cls(values=values, **dict(zip(sizes, views, strict=True)))

    @property
    def num_real_reqs(self) -> Tensor:
        """int32 [1], as kernels take it: the low half of ``num_real``, in its place."""
        return self.num_real.view(torch.int32)[:1]


@dataclass(frozen=True)
class StepBuffers:
    """The host's memory of one step, until that is read: its inputs, its masks and its results."""

    inputs: StepInputs
    masks: Tensor
    """int32 [max_reqs * max_new, num_words]: bits of the tokens that may be drawn for each row of logits."""
    results: Tensor
    """int64 [max_reqs * columns]: rows of ``step_results.py``, next to each other."""
    end: torch.cuda.Event | None
    """Where ``mark_end`` was last called in the stream: ``wait`` waits for all before that. None on a CPU."""
    ranks: RankGroup | None

    @classmethod
    def create(
        cls, max_reqs: int, max_new: int, vocab_size: int, is_pinned: bool, ranks: RankGroup | None
    ) -> StepBuffers:
        num_words = -(-vocab_size // 32)
        return cls(
            inputs=StepInputs.create(max_reqs, max_new, "cpu", pin_memory=is_pinned),
            masks=torch.zeros((max_reqs * max_new, num_words), dtype=torch.int32, pin_memory=is_pinned),
            results=torch.zeros(max_reqs * num_columns(max_new), dtype=torch.int64, pin_memory=is_pinned),
            end=torch.cuda.Event() if is_pinned else None,
            ranks=ranks,
        )

    def send(self, entries: Sequence[StepEntry], num_new: int, max_context: int, to: StepInputs) -> None:
        """Enqueue the copy of a step's inputs to the device. ``num_new``: positions of each request."""
        self._fill(entries, num_new, max_context)
        to.values.copy_(self.inputs.values, non_blocking=True)

    def _fill(self, entries: Sequence[StepEntry], num_new: int, max_context: int) -> None:
        """Write the inputs of ``entries``, and padding behind them: row 0 with a length of 1."""
        inputs = self.inputs
        requests = [entry.request for entry in entries]
        num_padding = inputs.seq_lens.shape[0] - len(entries)
        tokens: list[int] = []
        for request, entry in zip(requests, entries, strict=True):
            # The newest token is an output in flight, which the device has, or is known here.
            tokens.append(FROM_DEVICE if request.num_outputs_in_flight else request.newest_token_id)
            tokens += (*entry.drafts, *[NO_DRAFT] * (num_new - 1 - len(entry.drafts)))
        inputs.tokens.numpy()[:] = tokens + [0] * (inputs.tokens.shape[0] - len(tokens))
        known_next = inputs.known_next.numpy()
        known_next[:] = NO_DRAFT
        for number, entry in enumerate(entries):
            if entry.known:
                known_next[number * num_new : number * num_new + len(entry.known)] = entry.known
        seq_lens = [FROM_DEVICE if entry.is_unread else entry.request.next_seq_len for entry in entries]
        slot_ends = [min(each.reserved_tokens, max_context, each.life_tokens) for each in requests]
        for values, of_requests, of_padding in (
            (inputs.seq_lens, seq_lens, 1),
            (inputs.req_rows, [request.req_row for request in requests], 0),
            (inputs.most_drafts, [entry.most_drafts for entry in entries], 0),
            (inputs.slot_ends, slot_ends, 1),
        ):
            values.numpy()[:] = of_requests + [of_padding] * num_padding
        inputs.num_real.numpy()[0] = len(entries)

    def receive(self, results: Tensor) -> None:
        """Enqueue the copy of ``results`` [num_reqs, columns] to contiguous memory of the host."""
        self.results[: results.numel()].view_as(results).copy_(results, non_blocking=True)

    def mark_end(self) -> None:
        """Make ``wait`` wait for everything that has been enqueued by now."""
        if self.end is not None:
            self.end.record()

    def read(self, num_reqs: int, columns: int) -> list[list[int]]:
        """Wait for the step's end, and return the rows that ``receive`` copied."""
        self.wait()
        rows: list[list[int]] = self.results[: num_reqs * columns].view(num_reqs, columns).tolist()
        return rows

    def wait(self) -> None:
        if self.end is not None:
            with self.ranks.bounded_wait() if self.ranks else nullcontext():
                self.end.synchronize()
