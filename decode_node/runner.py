"""Runs decode steps on the CPU, where they are done when they are launched, and chooses who runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_node.device_step import HostStep
from decode_node.draft_chain import draft_chain
from decode_node.drafting import num_accepted
from decode_node.graph_runner import GraphRunner
from decode_node.hot_buffers import HotBuffers
from decode_node.request import Request
from decode_node.row_counts import RowCounts
from decode_node.step_masks import has_grammar, masks_of
from decode_node.steps import (
    Done,
    Launched,
    Runner,
    StepResult,
    check_slots,
    next_index,
    step_result,
    take_drafts,
)
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.model.dsa import DsaModel
from hisparse_pd.model.sampling import sample
from hisparse_pd.settings import DecodeSettings
from hisparse_pd.vocabulary import TokenLogprob
from kernels.kv_format import FP8_E4M3


class HostRunner:
    """Steps on the CPU, which are done when they are launched."""

    def __init__(self, model: DsaModel, hot_buffers: HotBuffers, kernels: AttentionKernels) -> None:
        self._model = model
        self._hot_buffers = hot_buffers
        self._kernels = kernels
        self._counts = RowCounts(hot_buffers.state.num_rows, model.spec.vocab_size, hot_buffers.device)

    def would_split(self, batch: Sequence[Request]) -> bool:
        return False

    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        if not batch:
            return Done(batch, self._take_part(step))
        check_slots(batch)
        self._counts.count(batch)
        if step.num_new > 1:
            return Done(batch, self._verify(batch, step))
        take_drafts(batch, 1, self._hot_buffers)
        access = HostStep(self._hot_buffers, self._kernels, batch)
        newest = torch.tensor([request.output_token_ids[-1] for request in batch])
        inputs = newest, access.positions, access, torch.arange(len(batch))
        hidden: Tensor | None = None
        if self._hot_buffers.state.max_new == 1:
            logits = self._model.forward(*inputs)
        else:
            logits, hidden = self._model.forward_with_hidden(*inputs)
        access.finish()
        token_ids, logprobs = sample(
            logits,
            [request.sampling for request in batch],
            [next_index(request) for request in batch],
            self._model.spec.eos_token_ids,
            counts=self._counts.of(batch),
            masks=self._masks(batch, [()] * len(batch)),
        )
        if hidden is not None:
            access.write_draft_kv(self._model, torch.tensor(token_ids), hidden)
        rows = self._row_results(batch)
        return Done(batch, step_result([[one] for one in token_ids], [[one] for one in logprobs], rows))

    def _take_part(self, step: NodeStep) -> StepResult:
        """In a step in which this rank has nobody, and others have."""
        self._model.expect_tokens(step.num_tokens * step.num_new)
        self._model.forward_of_others()
        for number in range(step.num_new - 1):
            if number == 1:
                self._model.expect_tokens(step.num_tokens)
            self._model.draft_of_others()
        return step_result([], [], [])

    def _verify(self, batch: Sequence[Request], step: NodeStep) -> StepResult:
        """One step in which each request's drafts follow its newest token."""
        model, num_reqs, num_new = self._model, len(batch), step.num_new
        model.expect_tokens(step.num_tokens * num_new)
        drafts, _ = take_drafts(batch, num_new, self._hot_buffers)
        lens = [request.next_seq_len for request in batch]
        ends = [seq_len + len(of_req) for seq_len, of_req in zip(lens, drafts, strict=True)]
        last = [seq_len + num_new - 1 for seq_len in lens]
        access = HostStep(self._hot_buffers, self._kernels, batch, last, ends, num_new=num_new)
        tokens = torch.zeros((num_reqs, num_new), dtype=torch.int64)
        for req, (request, of_req) in enumerate(zip(batch, drafts, strict=True)):
            tokens[req, : 1 + len(of_req)] = torch.tensor([request.output_token_ids[-1], *of_req])
        rows = [(req, row) for req, of_req in enumerate(drafts) for row in range(1 + len(of_req))]
        logit_rows = torch.tensor([req * num_new + row for req, row in rows])
        logits, hidden = model.forward_with_hidden(tokens.flatten(), access.positions, access, logit_rows)
        token_ids, logprobs = sample(
            logits,
            [batch[req].sampling for req, _ in rows],
            [next_index(batch[req]) + row for req, row in rows],
            model.spec.eos_token_ids,
            counts=self._counts.of([batch[req] for req, _ in rows], [drafts[req][:row] for req, row in rows]),
            masks=self._masks(batch, drafts),
        )
        drawn: list[list[int]] = [[] for _ in batch]
        of_drawn: list[list[TokenLogprob | None]] = [[] for _ in batch]
        for (req, _), token_id, logprob in zip(rows, token_ids, logprobs, strict=True):
            drawn[req].append(token_id)
            of_drawn[req].append(logprob)
        accepted = [num_accepted(*each) for each in zip(drafts, drawn, strict=True)]
        # The draft layer has each position with the token that was drawn behind it.
        tokens.zero_()
        for req, of_req in enumerate(drawn):
            tokens[req, : len(of_req)] = torch.tensor(of_req)
        newest_rows = torch.tensor([req * num_new + count for req, count in enumerate(accepted)])
        logits, hidden = model.draft(tokens.flatten(), hidden, access.positions, access, newest_rows)
        lens = [seq_len + count for seq_len, count in zip(lens, accepted, strict=True)]
        access.back_up(torch.tensor(lens), torch.tensor(accepted, dtype=torch.int32) + 1)
        ends = [min(request.reserved_tokens, model.spec.context_length) for request in batch]
        model.expect_tokens(step.num_tokens)

        def step_of(number: int) -> HostStep:
            last = [seq_len + number for seq_len in lens]
            return HostStep(
                self._hot_buffers, self._kernels, batch, last, ends, num_new=number, first_row=number - 1
            )

        made = draft_chain(
            model, access, newest_rows, logits, hidden, torch.tensor(lens), num_new - 1, step_of
        )
        return step_result(
            [of_req[: count + 1] for of_req, count in zip(drawn, accepted, strict=True)],
            [of_req[: count + 1] for of_req, count in zip(of_drawn, accepted, strict=True)],
            self._row_results(batch),
            [len(of_req) for of_req in drafts],
            made.tolist(),
        )

    def _masks(self, batch: Sequence[Request], drafts: Sequence[Sequence[int]]) -> Tensor | None:
        if not has_grammar(batch):
            return None
        num_rows = len(batch) + sum(map(len, drafts))
        num_words = -(-self._model.spec.vocab_size // 32)
        return masks_of(batch, drafts, torch.empty((num_rows, num_words), dtype=torch.int32))

    def _row_results(self, batch: Sequence[Request]) -> list[list[int]]:
        rows: list[list[int]] = self._hot_buffers.row_results(
            torch.tensor([request.req_row for request in batch])
        ).tolist()
        return rows


def make_runner(settings: DecodeSettings, model: DsaModel, hot_buffers: HotBuffers) -> Runner:
    """The runner for the device and the formats. Raises AttentionBackendError."""
    max_reqs = settings.max_running_requests
    scratch_tokens = max_reqs * hot_buffers.state.max_new
    kernels = AttentionKernels.choose(model, settings.attention_backend, scratch_tokens=scratch_tokens)
    if model.device.type == "cpu" and kernels.index_format.name != FP8_E4M3:
        return HostRunner(model, hot_buffers, kernels)
    return GraphRunner(
        model,
        hot_buffers,
        kernels,
        max_reqs=max_reqs,
        graph_batches=settings.graph_batches,
        min_split_reqs=settings.micro_batch_min_bs,
    )
