"""Runs decode steps on a GPU, one step behind.

A step is a CUDA graph of the next larger batch size, its input tokens may still be on the device (the last
step's, which nobody has read yet), and the host reads tokens, counters and error flags in one copy.

A batch with many hisparse requests runs as micro-batches.

A step that verifies drafts is two graphs, with the draws between them: the model over all new positions; then
what follows from the draws, which is acceptance, backup and the next drafts. The next step is launched when
the host has read what was accepted, and micro-batches have no drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode_node.device_step import DeviceStep
from decode_node.drafting import num_accepted
from decode_node.hot_buffers import HotBuffers
from decode_node.micro_batches import NUM_MICRO_BATCHES, MicroBatches
from decode_node.request import Request
from decode_node.step_buffers import FROM_DEVICE, StepBuffers, StepInputs
from decode_node.steps import Launched, StepResult, check_slots, next_index, step_result, take_drafts
from model.attention_kernels import AttentionKernels
from model.dsa import DsaModel
from model.sampling import Sampled, enqueue_sample
from service.lockstep import NodeStep
from vocabulary import Mode, SamplingParams, TokenLogprob

log = logging.getLogger(__name__)


class GraphRunner:
    """Steps on a GPU, in CUDA graphs of ``graph_batches`` requests; larger batches go without.

    A batch with at least ``min_split_reqs`` hisparse requests runs as micro-batches; 0: none does.
    """

    def __init__(
        self,
        model: DsaModel,
        hot_buffers: HotBuffers,
        kernels: AttentionKernels,
        *,
        max_reqs: int,
        graph_batches: Sequence[int],
        min_split_reqs: int,
    ) -> None:
        self._model = model
        self._hot_buffers = hot_buffers
        self._kernels = kernels
        self._max_reqs = max_reqs
        self._max_new = hot_buffers.state.max_new
        device = hot_buffers.device
        self._backup_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._inputs = StepInputs.create(max_reqs, self._max_new, device)
        self._last_tokens = torch.zeros(hot_buffers.state.num_rows + 1, dtype=torch.int64, device=device)
        """What each row sampled last; the last entry is of padding."""
        self._drawn: _Drawn | None = None
        if self._max_new > 1:
            self._drawn = _Drawn.create(model, max_reqs * self._max_new)
        is_pinned = device.type == "cuda"
        self._buffers = [
            StepBuffers.create(max_reqs, self._max_new, is_pinned, model.ranks) for _ in range(2)
        ]
        self._num_launched = 0
        self._min_split_reqs = max(min_split_reqs, NUM_MICRO_BATCHES) if min_split_reqs else max_reqs + 1
        self._micro_batches: MicroBatches | None = None
        if self._min_split_reqs <= max_reqs:
            self._micro_batches = MicroBatches(model, hot_buffers, kernels, max_reqs, self._backup_stream)
        self._graphs: dict[bool, dict[int, tuple[torch.cuda.CUDAGraph, _Outputs]]] = {False: {}, True: {}}
        """By whether a batch runs as micro-batches, then by its size, smallest first."""
        self._verify_graphs: dict[int, dict[int, _VerifyGraphs]] = {}
        """By positions of a request, then as above."""
        if graph_batches and device.type == "cuda":
            self._capture(sorted(graph_batches, reverse=True))

    def would_split(self, batch: Sequence[Request]) -> bool:
        return sum(request.mode is Mode.HISPARSE for request in batch) >= self._min_split_reqs

    @torch.inference_mode()  # as the capture, whose results are written to
    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        check_slots(batch)
        buffers = self._buffers[self._num_launched % 2]
        self._num_launched += 1
        drafts = take_drafts(batch, step.num_new, self._hot_buffers)
        buffers.fill(batch, drafts, step.num_new, self._model.spec.context_length)
        self._inputs.values.copy_(buffers.inputs.values, non_blocking=True)
        if step.num_new > 1 and self._drawn is not None:
            return self._verify(batch, drafts, step, buffers, self._drawn)
        graphs, num_reqs = self._graphs[step.is_split], len(batch)
        size = next((size for size in graphs if size >= step.num_tokens), None)
        if size is None:
            outputs = self._forward(step.num_tokens, step.is_split)
        else:
            graph, outputs = graphs[size]
            graph.replay()
        sampled = self._sample(batch, outputs)
        buffers.take(outputs.results[:num_reqs])
        return _OnDevice(batch, buffers, sampled)

    def _verify(
        self,
        batch: Sequence[Request],
        drafts: list[list[int]],
        step: NodeStep,
        buffers: StepBuffers,
        drawn: _Drawn,
    ) -> Launched:
        num_new, num_reqs = step.num_new, len(batch)
        graphs = self._verify_graphs.get(num_new, {})
        size = next((size for size in graphs if size >= step.num_tokens), None)
        if size is None:
            access = self._forward_new(step.num_tokens, num_new, drawn)
            sampled = self._sample_new(batch, drafts, num_new, drawn)
            results = self._accept_and_draft(step.num_tokens, num_new, drawn, access)
        else:
            graphs[size].forward.replay()
            sampled = self._sample_new(batch, drafts, num_new, drawn)
            graphs[size].accept_and_draft.replay()
            results = graphs[size].results
        buffers.take(results[:num_reqs])
        return _Verified(batch, buffers, drafts, num_new, sampled)

    def _sample_new(
        self, batch: Sequence[Request], drafts: list[list[int]], num_new: int, drawn: _Drawn
    ) -> Sampled | None:
        """``_sample`` for the positions of each request that can count, one after the other."""
        if all(_is_plain_greedy(request.sampling, next_index(request)) for request in batch):
            return None
        rows = [(req, row) for req, of_req in enumerate(drafts) for row in range(1 + len(of_req))]
        rows_host = torch.tensor([req * num_new + row for req, row in rows])
        if drawn.logits.is_cuda:
            rows_host = rows_host.pin_memory()
        rows_dev = rows_host.to(drawn.logits.device, non_blocking=True)
        sampled = enqueue_sample(
            drawn.logits[rows_dev],
            [batch[req].sampling for req, _ in rows],
            [next_index(batch[req]) + row for req, row in rows],
            self._model.spec.eos_token_ids,
        )
        drawn.token_ids[rows_dev] = sampled.token_ids
        return sampled

    def _forward_new(self, num_reqs: int, num_new: int, drawn: _Drawn) -> DeviceStep:
        """The model over ``num_new`` positions of each request in ``_inputs``, into ``drawn``."""
        inputs = self._inputs
        req_rows = inputs.req_rows[:num_reqs]
        num_rows = num_reqs * num_new
        given = inputs.tokens[:num_rows].view(num_reqs, num_new)
        newest = torch.where(given[:, 0] == FROM_DEVICE, self._last_tokens[req_rows], given[:, 0])
        token_ids = torch.cat((newest[:, None], given[:, 1:].clamp(min=0)), dim=1).flatten()
        access = DeviceStep(
            self._hot_buffers,
            self._kernels,
            inputs.seq_lens[:num_reqs],
            req_rows,
            inputs.num_real_reqs,
            num_new=num_new,
            ends=inputs.ends[:num_reqs],
        )
        rows = torch.arange(num_rows, device=token_ids.device)
        logits, hidden = self._model.forward_with_hidden(token_ids, access.positions, access, rows)
        drawn.logits[:num_rows] = logits
        drawn.hidden[:num_rows] = hidden
        drawn.token_ids[:num_rows] = logits.argmax(dim=-1)
        return access

    def _accept_and_draft(self, num_reqs: int, num_new: int, drawn: _Drawn, access: DeviceStep) -> Tensor:
        """What follows from ``drawn``: int64 [num_reqs, ...] as ``_Verified`` reads it."""
        inputs = self._inputs
        num_real_reqs, req_rows = inputs.num_real_reqs, inputs.req_rows[:num_reqs]
        num_rows = num_reqs * num_new
        drafts = inputs.tokens[:num_rows].view(num_reqs, num_new)[:, 1:]
        flat_ids = drawn.token_ids[:num_rows]
        token_ids = flat_ids.view(num_reqs, num_new)
        accepted = (drafts == token_ids[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        reqs = torch.arange(num_reqs, device=accepted.device)
        newest_rows = reqs * num_new + accepted
        last = self._last_tokens.shape[0] - 1
        self._last_tokens[torch.where(reqs < num_real_reqs, req_rows, last)] = flat_ids[newest_rows]
        logits, hidden = self._model.draft(
            flat_ids, drawn.hidden[:num_rows], access.positions, access, newest_rows
        )
        seq_lens = inputs.seq_lens[:num_reqs] - (num_new - 1) + accepted
        access.back_up(seq_lens, (accepted + 1).to(torch.int32))
        new_drafts = [logits.argmax(dim=-1)]
        hidden = hidden[newest_rows]
        for number in range(1, num_new - 1):
            access = DeviceStep(
                self._hot_buffers,
                self._kernels,
                seq_lens + number,
                req_rows,
                num_real_reqs,
                num_new=number,
                first_row=number - 1,
                ends=inputs.slot_ends[:num_reqs],
            )
            logits, hidden = self._model.draft(new_drafts[-1], hidden, access.positions, access, reqs)
            new_drafts.append(logits.argmax(dim=-1))
        row_results = self._hot_buffers.row_results(req_rows)
        return torch.cat((row_results, token_ids, torch.stack(new_drafts, dim=1)), dim=1)

    def _sample(self, batch: Sequence[Request], outputs: _Outputs) -> Sampled | None:
        """Put what the requests ask for in the likeliest tokens' place; None when these are all they want.

        Behind the graph and not in it: how many rows are drawn, and how, changes from step to step.
        """
        if all(_is_plain_greedy(request.sampling, next_index(request)) for request in batch):
            return None
        num_reqs = len(batch)
        sampled = enqueue_sample(
            outputs.logits[:num_reqs],
            [request.sampling for request in batch],
            [next_index(request) for request in batch],
            self._model.spec.eos_token_ids,
        )
        outputs.results[:num_reqs, 0] = sampled.token_ids
        self._last_tokens[self._inputs.req_rows[:num_reqs]] = sampled.token_ids
        return sampled

    def _forward(self, num_reqs: int, is_split: bool) -> _Outputs:
        """The device work of one step, of the requests in ``_inputs``."""
        inputs = self._inputs
        given, seq_lens, req_rows = (
            of_all[:num_reqs] for of_all in (inputs.tokens, inputs.seq_lens, inputs.req_rows)
        )
        num_real_reqs = inputs.num_real_reqs
        token_ids = torch.where(given == FROM_DEVICE, self._last_tokens[req_rows], given)
        rows = torch.arange(num_reqs, device=token_ids.device)
        if is_split and self._micro_batches is not None:
            logits = self._micro_batches.forward(token_ids, seq_lens, req_rows, num_real_reqs)
        else:
            step = DeviceStep(
                self._hot_buffers, self._kernels, seq_lens, req_rows, num_real_reqs, self._backup_stream
            )
            logits = self._model.forward(token_ids, step.positions, step, rows)
            step.finish()
        sampled = logits.argmax(dim=-1)
        last = self._last_tokens.shape[0] - 1
        self._last_tokens[torch.where(rows < num_real_reqs, req_rows, last)] = sampled
        row_results = self._hot_buffers.row_results(req_rows)
        return _Outputs(logits, torch.cat((sampled[:, None], row_results), dim=1))

    @torch.inference_mode()
    def _capture(self, sizes: Sequence[int]) -> None:
        """Capture a graph of each size, largest first, so that they can share their memory.

        All requests are padding meanwhile. Each is run once before, for what kernels allocate or compile on
        their first launch.
        """
        started = time.monotonic()
        self._buffers[0].fill((), [], self._max_new, self._model.spec.context_length)
        self._inputs.values.copy_(self._buffers[0].inputs.values)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        kinds = [
            (size, is_split)
            for size in sizes
            for is_split in (False, True)
            if size >= self._min_split_reqs or not is_split
        ]
        with torch.cuda.stream(stream):
            for size, is_split in kinds:
                self._forward(size, is_split)
            if self._drawn is not None:
                for size in sizes:
                    for num_new in range(self._max_new, 1, -1):
                        access = self._forward_new(size, num_new, self._drawn)
                        self._accept_and_draft(size, num_new, self._drawn, access)
        stream.synchronize()
        pool = None
        for size, is_split in kinds:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self._forward(size, is_split)
            pool = graph.pool()
            self._graphs[is_split][size] = graph, outputs
        if self._drawn is not None:
            for num_new in range(self._max_new, 1, -1):
                graphs = [
                    (size, _VerifyGraphs.capture(self, size, num_new, self._drawn, pool, stream))
                    for size in sizes
                ]
                self._verify_graphs[num_new] = dict(reversed(graphs))
        self._graphs = {is_split: dict(sorted(graphs.items())) for is_split, graphs in self._graphs.items()}
        log.info(
            "captured CUDA graphs of %s requests, with up to %d drafts, as micro-batches from %d hisparse "
            "ones on, in %.1f s",
            list(self._graphs[False]),
            self._max_new - 1,
            self._min_split_reqs,
            time.monotonic() - started,
        )


@dataclass(frozen=True)
class _Outputs:
    logits: Tensor
    """float32 [num_reqs, vocab_size]"""
    results: Tensor
    """int64 [num_reqs, 5]: sampled token, error flags, hits, misses, evictions."""


@dataclass(frozen=True)
class _VerifyGraphs:
    """A step that verifies drafts: what comes before the draws, and what behind them."""

    forward: torch.cuda.CUDAGraph
    accept_and_draft: torch.cuda.CUDAGraph
    access: DeviceStep
    """Its tensors are made by the first graph and read by the second."""
    results: Tensor

    @classmethod
    def capture(
        cls,
        runner: GraphRunner,
        num_reqs: int,
        num_new: int,
        drawn: _Drawn,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> _VerifyGraphs:
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool, stream=stream):
            access = runner._forward_new(num_reqs, num_new, drawn)
        with torch.cuda.graph(second, pool=pool, stream=stream):
            results = runner._accept_and_draft(num_reqs, num_new, drawn, access)
        return cls(first, second, access, results)


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


@dataclass(frozen=True)
class _OnDevice:
    """A step that a GPU works on. ``sampled``: None when all tokens are just the likeliest."""

    batch: Sequence[Request]
    buffers: StepBuffers
    sampled: Sampled | None
    feeds_next: bool = True

    def wait(self) -> None:
        self.buffers.wait()

    def result(self) -> StepResult:
        rows = self.buffers.read(len(self.batch), 5)
        token_ids = [row[0] for row in rows]
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        if self.sampled is not None:
            logprobs = self.sampled.read_logprobs(token_ids)
        return step_result(
            [[one] for one in token_ids], [[one] for one in logprobs], [row[1:] for row in rows]
        )


@dataclass(frozen=True)
class _Verified:
    """A step that verifies ``drafts``. ``sampled``: of the positions that can count; None as above."""

    batch: Sequence[Request]
    buffers: StepBuffers
    drafts: list[list[int]]
    num_new: int
    sampled: Sampled | None
    feeds_next: bool = False

    def wait(self) -> None:
        self.buffers.wait()

    def result(self) -> StepResult:
        rows = self.buffers.read(len(self.batch), 3 + 2 * self.num_new)
        drawn = [row[4 : 5 + len(drafts)] for row, drafts in zip(rows, self.drafts, strict=True)]
        logprobs: list[list[TokenLogprob | None]] = [[None] * len(of_req) for of_req in drawn]
        if self.sampled is not None:
            of_rows = iter(self.sampled.read_logprobs([one for of_req in drawn for one in of_req]))
            logprobs = [[next(of_rows) for _ in of_req] for of_req in drawn]
        kept = [1 + num_accepted(*each) for each in zip(self.drafts, drawn, strict=True)]
        return step_result(
            [of_req[:count] for of_req, count in zip(drawn, kept, strict=True)],
            [of_req[:count] for of_req, count in zip(logprobs, kept, strict=True)],
            [row[:4] for row in rows],
            [len(drafts) for drafts in self.drafts],
            [row[4 + self.num_new :] for row in rows],
        )


def _is_plain_greedy(params: SamplingParams, num_generated: int) -> bool:
    """Whether the largest logit is the token, and nobody asks for more than that."""
    return params.temperature == 0 and params.num_logprobs is None and num_generated >= params.min_new_tokens
