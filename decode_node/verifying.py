"""Steps of the graph runner that verify drafts: two graphs, with the draws between them. And what steps
without drafts leave for the draft layer.

The first is the model over all new positions. The second is what follows from the draws: acceptance, backup
and the next drafts. What the step after needs of them stays on the device too (``DeviceRows``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode_node.device_rows import DeviceRows
from decode_node.device_step import DeviceStep
from decode_node.draft_chain import draft_chain
from decode_node.hot_buffers import HotBuffers
from decode_node.request import Request
from decode_node.row_counts import RowCounts
from decode_node.step_buffers import StepBuffers, StepInputs
from decode_node.step_masks import has_grammar, masks_of
from decode_node.steps import StepResult, check_drawn, is_plain_greedy, next_index, step_result
from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.model.dsa import DsaModel
from hisparse_pd.model.sampling import Sampled, enqueue_sample
from hisparse_pd.model.token_counts import CountedRows
from hisparse_pd.vocabulary import TokenLogprob


class Verifier:
    """The device work of these steps, of the requests in ``inputs``, and what it goes through."""

    def __init__(
        self,
        model: DsaModel,
        hot_buffers: HotBuffers,
        kernels: AttentionKernels,
        inputs: StepInputs,
        rows: DeviceRows,
        counts: RowCounts,
        *,
        max_reqs: int,
    ) -> None:
        self._model = model
        self._hot_buffers = hot_buffers
        self._kernels = kernels
        self._inputs = inputs
        self._rows = rows
        self._counts = counts
        self._max_new = hot_buffers.state.max_new
        self._drawn = _Drawn.create(model, max_reqs * self._max_new)
        self._graphs: dict[int, dict[int, _Graphs]] = {}
        """By positions of a request, then by number of requests, smallest first."""
        self._writes: dict[int, torch.cuda.CUDAGraph] = {}
        """``write_draft_kv`` by number of requests."""

    def launch(
        self,
        batch: Sequence[Request],
        drafts: list[list[int]],
        most_drafts: list[int],
        num_reqs: int,
        num_new: int,
        buffers: StepBuffers,
    ) -> Verified:
        """The model's part; the draws, and what follows from them, are to come.

        ``drafts``: those that the host knows; ``most_drafts``: of each request. ``num_reqs``: of the rank
        that has most.
        """
        graphs = self._graphs.get(num_new, {})
        size = next((size for size in graphs if size >= num_reqs), None)
        if size is None:
            forward = self._forward(num_reqs, num_new)
            finish: Callable[[], Tensor] = partial(self._accept_and_draft, num_reqs, num_new, forward)
        else:
            graphs[size].forward.replay()
            finish = graphs[size].finish
        sample = None
        if not all(map(is_plain_greedy, batch)):
            indices = [next_index(request) for request in batch]
            rows = [(req, row) for req, of_req in enumerate(drafts) for row in range(1 + len(of_req))]
            counts = self._counts.of(
                [batch[req] for req, _ in rows], [drafts[req][:row] for req, row in rows]
            )
            sample = partial(self._sample, batch, indices, drafts, rows, counts, num_new, buffers)
        return Verified(batch, buffers, most_drafts, num_new, sample, finish)

    def keep_hidden(self, hidden: Tensor) -> None:
        """Of a step without drafts, until ``write_draft_kv``."""
        self._drawn.hidden[: len(hidden)] = hidden

    def write_draft_kv(self, num_reqs: int) -> None:
        """Behind the draws of a step without drafts. Without this the next guesses, made from what the draft
        layer knows, would be worse for each such step before them."""
        if num_reqs in self._writes:
            self._writes[num_reqs].replay()
        else:
            self._write_draft_kv(num_reqs)

    def _write_draft_kv(self, num_reqs: int) -> None:
        inputs = self._inputs
        req_rows = inputs.req_rows[:num_reqs]
        seq_lens = self._rows.lengths(inputs, num_reqs)
        access = DeviceStep(self._hot_buffers, self._kernels, seq_lens, req_rows, inputs.num_real_reqs)
        access.write_draft_kv(self._model, self._rows.tokens[req_rows], self._drawn.hidden[:num_reqs])

    def warm_up(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._write_draft_kv(size)
            for num_new in range(self._max_new, 1, -1):
                self._accept_and_draft(size, num_new, self._forward(size, num_new))

    def capture(self, sizes: Sequence[int], pool: Any, stream: torch.cuda.Stream) -> None:
        """``sizes``: largest first, so that the graphs can share memory of ``pool``."""
        for num_new in range(self._max_new, 1, -1):
            graphs = [(size, self._capture(size, num_new, pool, stream)) for size in sizes]
            self._graphs[num_new] = dict(reversed(graphs))
        for size in sizes:
            self._writes[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._writes[size], pool=pool, stream=stream):
                self._write_draft_kv(size)

    def _capture(self, num_reqs: int, num_new: int, pool: Any, stream: torch.cuda.Stream) -> _Graphs:
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool, stream=stream):
            forward = self._forward(num_reqs, num_new)
        with torch.cuda.graph(second, pool=pool, stream=stream):
            results = self._accept_and_draft(num_reqs, num_new, forward)
        return _Graphs(first, second, forward, results)

    def _forward(self, num_reqs: int, num_new: int) -> _Forward:
        """The model over ``num_new`` positions of each request, into ``_drawn``."""
        inputs = self._inputs
        req_rows = inputs.req_rows[:num_reqs]
        num_rows = num_reqs * num_new
        seq_lens = self._rows.lengths(inputs, num_reqs)
        drafts, num_drafts = self._rows.drafts_to_verify(inputs, seq_lens, num_new)
        newest = self._rows.newest_tokens(inputs.tokens[:num_rows:num_new], req_rows)
        token_ids = torch.cat((newest[:, None], drafts.clamp(min=0)), dim=1).flatten()
        access = DeviceStep(
            self._hot_buffers,
            self._kernels,
            seq_lens + num_new - 1,
            req_rows,
            inputs.num_real_reqs,
            num_new=num_new,
            ends=seq_lens + num_drafts,
        )
        rows = torch.arange(num_rows, device=token_ids.device)
        logits, hidden = self._model.forward_with_hidden(token_ids, access.positions, access, rows)
        self._drawn.logits[:num_rows] = logits
        self._drawn.hidden[:num_rows] = hidden
        self._drawn.token_ids[:num_rows] = logits.argmax(dim=-1)
        return _Forward(access, seq_lens, drafts, num_drafts)

    def _sample(
        self,
        batch: Sequence[Request],
        indices: Sequence[int],
        drafts: list[list[int]],
        rows: Sequence[tuple[int, int]],
        counts: CountedRows | None,
        num_new: int,
        buffers: StepBuffers,
    ) -> Sampled:
        """Put what the requests ask for in the likeliest tokens' place, at the positions that can count:
        ``rows``, of each the request's number in the batch and its own in the request."""
        drawn = self._drawn
        rows_host = torch.tensor([req * num_new + row for req, row in rows])
        if drawn.logits.is_cuda:
            rows_host = rows_host.pin_memory()
        rows_dev = rows_host.to(drawn.logits.device, non_blocking=True)
        masks = None
        if has_grammar(batch):
            masks = masks_of(batch, drafts, buffers.masks).to(drawn.logits.device, non_blocking=True)
        sampled = enqueue_sample(
            drawn.logits[rows_dev],
            [batch[req].sampling for req, _ in rows],
            [indices[req] + row for req, row in rows],
            self._model.spec.eos_token_ids,
            counts=counts,
            masks=masks,
        )
        drawn.token_ids[rows_dev] = sampled.token_ids
        return sampled

    def _accept_and_draft(self, num_reqs: int, num_new: int, forward: _Forward) -> Tensor:
        """What follows from ``_drawn``: int64 [num_reqs, num_columns] as ``Verified`` reads it."""
        inputs, drawn, access = self._inputs, self._drawn, forward.access
        req_rows = inputs.req_rows[:num_reqs]
        num_rows = num_reqs * num_new
        flat_ids = drawn.token_ids[:num_rows]
        token_ids = flat_ids.view(num_reqs, num_new)
        accepted = (forward.drafts == token_ids[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        reqs = torch.arange(num_reqs, device=accepted.device)
        newest_rows = reqs * num_new + accepted
        logits, hidden = self._model.draft(
            flat_ids, drawn.hidden[:num_rows], access.positions, access, newest_rows
        )
        seq_lens = forward.seq_lens + accepted
        access.back_up(seq_lens, (accepted + 1).to(torch.int32))

        def step_of(number: int) -> DeviceStep:
            return DeviceStep(
                self._hot_buffers,
                self._kernels,
                seq_lens + number,
                req_rows,
                inputs.num_real_reqs,
                num_new=number,
                first_row=number - 1,
                ends=inputs.slot_ends[:num_reqs],
            )

        made = draft_chain(self._model, access, newest_rows, logits, hidden, seq_lens, num_new - 1, step_of)
        self._rows.put(inputs, flat_ids[newest_rows], seq_lens + 1, made)
        counts = torch.stack((forward.num_drafts, accepted), dim=1)
        return torch.cat((self._hot_buffers.row_results(req_rows), counts, token_ids, made), dim=1)


@dataclass(frozen=True)
class _Forward:
    """What the first graph of a step makes and the second reads, beside ``_Drawn``."""

    access: DeviceStep
    seq_lens: Tensor
    """int64 [num_reqs]: before the step, the newest token included."""
    drafts: Tensor
    """int64 [num_reqs, num_new - 1]: verified ones, and NO_DRAFT."""
    num_drafts: Tensor


@dataclass(frozen=True)
class _Graphs:
    forward: torch.cuda.CUDAGraph
    accept_and_draft: torch.cuda.CUDAGraph
    between: _Forward
    results: Tensor

    def finish(self) -> Tensor:
        self.accept_and_draft.replay()
        return self.results


@dataclass(frozen=True)
class _Drawn:
    """Between the two graphs of a step, whatever its size: a row for each position of each request."""

    logits: Tensor
    """float32 [max_rows, vocab_size]"""
    hidden: Tensor
    """[max_rows, hidden_size]"""
    token_ids: Tensor
    """int64 [max_rows]"""

    @classmethod
    def create(cls, model: DsaModel, max_rows: int) -> _Drawn:
        device = model.device
        return cls(
            torch.zeros((max_rows, model.spec.vocab_size), dtype=torch.float32, device=device),
            torch.zeros((max_rows, model.hidden_size), dtype=model.spec.dtype, device=device),
            torch.zeros(max_rows, dtype=torch.int64, device=device),
        )


@dataclass
class Verified:
    """A step that verifies drafts."""

    batch: Sequence[Request]
    buffers: StepBuffers
    most_drafts: list[int]
    num_new: int
    sample: Callable[[], Sampled] | None
    """Of the positions that can count; None when all tokens are just the likeliest: only then nothing of the
    next step depends on what is read of this one."""
    finish: Callable[[], Tensor]
    """What follows from the draws; returns what is read."""
    sampled: Sampled | None = field(default=None, init=False)
    is_drawn: bool = field(default=False, init=False)

    @property
    def feeds_next(self) -> bool:
        return self.sample is None

    @torch.inference_mode()
    def draw(self) -> None:
        if self.is_drawn:
            return
        with self.buffers.marked():
            if self.sample is not None:
                self.sampled = self.sample()
            self.buffers.take(self.finish()[: len(self.batch)])
        self.is_drawn = True

    def wait(self) -> None:
        self.buffers.wait()

    def result(self) -> StepResult:
        check_drawn(self.is_drawn)
        num_columns = 5 + 2 * self.num_new
        rows = self.buffers.read(len(self.batch), num_columns)
        num_drafted = [row[4] for row in rows]
        kept = [1 + row[5] for row in rows]
        drawn = [row[6 : 7 + count] for row, count in zip(rows, num_drafted, strict=True)]
        logprobs: list[list[TokenLogprob | None]] = [[None] * len(of_req) for of_req in drawn]
        if self.sampled is not None:
            of_rows = iter(self.sampled.read_logprobs([one for of_req in drawn for one in of_req]))
            logprobs = [[next(of_rows) for _ in of_req] for of_req in drawn]
        return step_result(
            [of_req[:count] for of_req, count in zip(drawn, kept, strict=True)],
            [of_req[:count] for of_req, count in zip(logprobs, kept, strict=True)],
            [row[:4] for row in rows],
            num_drafted,
            [row[6 + self.num_new :] for row in rows],
        )
