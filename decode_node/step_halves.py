"""The device work of a decode step in two halves: the model's forward, and what follows the draws.

A step without drafts has one new position for each request; its second half writes the draft layer's KV, if
there is a draft layer. A step that verifies drafts has more positions; its second half accepts drafts, backs
up KV and makes the next drafts. What the following step needs also stays on the device (``RowOutcomes``).

A step without drafts may be split, so that the copies of some requests hide behind the computing of others:
in parts within each layer, or in micro-batches that run through all layers. ``Forwards`` calls ``forward``
and ``follow``, at once or while it captures them in CUDA graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.decode_node.attention_parts import AttentionParts, MissCopies, StepInParts
from hisparse_pd.decode_node.device_step import DeviceStep, NewPositions
from hisparse_pd.decode_node.draft_chain import draft_chain
from hisparse_pd.decode_node.forward_results import Forward, KeptResults, Verified
from hisparse_pd.decode_node.micro_batches import MicroBatches
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.row_outcomes import RowOutcomes
from hisparse_pd.decode_node.split_choice import Split
from hisparse_pd.decode_node.step_buffers import StepInputs
from hisparse_pd.decode_node.step_results import join_verified
from hisparse_pd.kernels.step_tokens import TOKEN_COLUMN, likeliest_tokens, plain_results


class FirstHalf(NamedTuple):
    """One first half that can be run or captured."""

    num_reqs: int
    num_new: int
    """New positions of each request; a step with more than one is never split."""
    split: Split


class StepHalves:
    """Computes both halves of steps, for the requests in ``inputs``. ``may_split``: batches may be split."""

    def __init__(
        self,
        model: DsaModel,
        tables: RequestTables,
        kernels: AttentionKernels,
        inputs: StepInputs,
        outcomes: RowOutcomes,
        *,
        max_reqs: int,
        may_split: bool,
    ) -> None:
        self._model = model
        self._tables = tables
        self._kernels = kernels
        self._inputs = inputs
        self._outcomes = outcomes
        self._backup = SideStream(tables.device)
        self._parts: AttentionParts | None = None
        self._micro_batches: MicroBatches | None = None
        if may_split:
            copies = MissCopies(tables, max_reqs)
            self._parts = AttentionParts(kernels, copies)
            self._micro_batches = MicroBatches(model, tables, kernels, copies, self._backup)
        max_new = tables.state.max_new
        self._kept = KeptResults.create(model, max_reqs * max_new) if max_new > 1 else None
        """Results of a first half that the second half reads; None in a node without a draft layer."""

    def forward(self, half: FirstHalf) -> Forward:
        """Compute a first half."""
        if half.num_new > 1:
            return self._verify(half.num_reqs, half.num_new)
        return self._plain(half.num_reqs, half.split)

    def follow(self, forward: Forward) -> Tensor:
        """Compute the second half of a step, after the draws. Returns the tensor that the host reads
        (``step_results.py``)."""
        if forward.results is None:
            return self._accept_and_draft(forward)
        if self._kept is not None:
            self._write_draft_kv(forward.num_reqs, self._kept.hidden)
        return forward.results

    def _plain(self, num_reqs: int, split: Split) -> Forward:
        """Run the model over the newest position of each request, and back this position up (I4)."""
        inputs = self._inputs
        req_rows = inputs.req_rows[:num_reqs]
        token_ids = self._outcomes.newest_tokens(inputs.tokens[:num_reqs], req_rows)
        new = NewPositions(self._outcomes.lengths(inputs, num_reqs), req_rows, inputs.num_real_reqs)
        logits, hidden = self._run_model(token_ids, new, split)
        if self._kept is not None and hidden is not None:
            self._kept.hidden[:num_reqs] = hidden
        state = self._tables.state
        results = plain_results(
            logits,
            inputs.known_next[:num_reqs],
            req_rows,
            inputs.num_real_reqs,
            state.error_flags,
            state.counters,
            self._outcomes.tokens,
        )
        # Draws replace the likeliest tokens in place: the column is a view of ``results``.
        return Forward(num_reqs, 1, logits, results[:, TOKEN_COLUMN], results)

    def _run_model(self, token_ids: Tensor, new: NewPositions, split: Split) -> tuple[Tensor, Tensor | None]:
        """Run the model over one position of each request, and back this position up. Returns logits, and
        hidden states if there is a draft layer."""
        if split is Split.MICRO_BATCHES and self._micro_batches is not None:
            return self._micro_batches.forward(token_ids, new)
        if split is Split.PARTS and self._parts is not None:
            step: DeviceStep = StepInParts(self._tables, self._kernels, new, self._parts, backup=self._backup)
        else:
            step = DeviceStep(self._tables, self._kernels, new, backup=self._backup)
        hidden: Tensor | None = None
        if self._kept is None:
            logits = self._model.forward(token_ids, step.positions, step, None)
        else:
            logits, hidden = self._model.forward_with_hidden(token_ids, step.positions, step, None)
        self._backup.join()
        return logits, hidden

    def _write_draft_kv(self, num_reqs: int, hidden: Tensor) -> None:
        """Write the draft layer's KV for a step without drafts: a position without it would make the next
        guesses worse."""
        inputs = self._inputs
        req_rows = inputs.req_rows[:num_reqs]
        new = NewPositions(self._outcomes.lengths(inputs, num_reqs), req_rows, inputs.num_real_reqs)
        access = DeviceStep(self._tables, self._kernels, new)
        access.write_draft_kv(self._model, self._outcomes.tokens[req_rows], hidden[:num_reqs])

    def _verify(self, num_reqs: int, num_new: int) -> Forward:
        """Run the model over the newest token of each request and ``num_new - 1`` drafts behind it. The
        results are put into ``_kept``."""
        kept, inputs = self._kept, self._inputs
        assert kept is not None
        req_rows = inputs.req_rows[:num_reqs]
        num_rows = num_reqs * num_new
        seq_lens = self._outcomes.lengths(inputs, num_reqs)
        drafts = self._outcomes.drafts_to_verify(inputs, seq_lens, num_new)
        newest = self._outcomes.newest_tokens(inputs.tokens[:num_rows:num_new], req_rows)
        token_ids = torch.cat((newest[:, None], drafts.token_ids.clamp(min=0)), dim=1).flatten()
        new = NewPositions(
            seq_lens + num_new - 1,
            req_rows,
            inputs.num_real_reqs,
            num_new=num_new,
            ends=seq_lens + drafts.counts,
        )
        access = DeviceStep(self._tables, self._kernels, new)
        logits, hidden = self._model.forward_with_hidden(token_ids, access.positions, access, None)

        kept.logits[:num_rows] = logits
        kept.hidden[:num_rows] = hidden
        kept.token_ids[:num_rows] = likeliest_tokens(logits, inputs.known_next[:num_rows])
        verified = Verified(access, seq_lens, drafts)
        return Forward(
            num_reqs, num_new, kept.logits[:num_rows], kept.token_ids[:num_rows], verified=verified
        )

    def _accept_and_draft(self, forward: Forward) -> Tensor:
        """Accept drafts up to the first one that differs from the drawn token, back up the accepted
        positions, and make the next drafts.

        Returns the tensor that the host reads (``join_verified``).
        """
        kept, verified, inputs = self._kept, forward.verified, self._inputs
        assert kept is not None
        assert verified is not None
        num_reqs, num_new, access = forward.num_reqs, forward.num_new, verified.access
        req_rows = inputs.req_rows[:num_reqs]
        token_ids = forward.token_ids.view(num_reqs, num_new)
        is_right = verified.drafts.token_ids == token_ids[:, :-1]
        accepted = is_right.long().cumprod(dim=1).sum(dim=1)  # the number before the first wrong one
        reqs = torch.arange(num_reqs, device=accepted.device)
        newest_rows = reqs * num_new + accepted

        # The draft layer's KV must be there before the backup, which copies all layers.
        logits, hidden = self._model.draft(
            forward.token_ids, kept.hidden[: num_reqs * num_new], access.positions, access, newest_rows
        )
        seq_lens = verified.seq_lens + accepted
        access.back_up(seq_lens, (accepted + 1).to(torch.int32))

        def step_of(number: int) -> DeviceStep:
            """Return the KV access of the forward that makes a draft behind ``number`` others of this step.

            It has one row for each request: the last of the positions of these drafts. The forwards before
            have written the others.
            """
            new = NewPositions(
                seq_lens + number,
                req_rows,
                inputs.num_real_reqs,
                num_new=number,
                first_row=number - 1,
                ends=inputs.slot_ends[:num_reqs],
            )
            return DeviceStep(self._tables, self._kernels, new)

        next_drafts = draft_chain(
            self._model, access, newest_rows, logits, hidden, seq_lens, num_new - 1, step_of
        )
        newest_tokens = forward.token_ids[newest_rows]
        self._outcomes.put_verified(inputs, newest_tokens, seq_lens + 1, next_drafts)
        row_results = self._tables.row_results(req_rows)
        return join_verified(row_results, verified.drafts.counts, accepted, token_ids, next_drafts)
