"""Runs decode steps: a batch in, its tokens out, at once on the CPU and one step later on a GPU.

``launch`` enqueues a step and returns; ``Launched.result`` waits for its tokens. On a GPU a step is a CUDA
graph of the next larger batch size, its input tokens may still be on the device (the last step's, which
nobody has read yet), and the host reads tokens, counters and error flags in one copy.

A batch with many hisparse requests runs as micro-batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode_node.device_step import DeviceStep, HostStep
from decode_node.drafting import num_accepted
from decode_node.hot_buffers import HotBuffers
from decode_node.micro_batches import NUM_MICRO_BATCHES, MicroBatches
from decode_node.request import Request
from kernels.hot_state import HotBufferError
from kernels.kv_format import FP8_E4M3
from model.attention_kernels import AttentionKernels
from model.dsa import DsaModel
from model.rank_group import RankGroup
from model.sampling import Sampled, enqueue_sample, sample
from service.lockstep import NodeStep
from service.settings import DecodeSettings
from vocabulary import Mode, SamplingParams, TokenLogprob

log = logging.getLogger(__name__)

FROM_DEVICE = -1
"""In place of an input token: the one that the row's last step sampled."""


@dataclass(frozen=True)
class StepResult:
    """A value for each request of the step's batch. ``errors``: empty where the kernels found nothing."""

    token_ids: list[list[int]]
    """What the request goes on with: the accepted drafts, and one token more."""
    logprobs: list[list[TokenLogprob | None]]
    """Of each of these tokens."""
    errors: list[str]
    counters: list[tuple[int, int, int]]
    num_drafted: list[int]
    """Drafts that were verified."""
    drafts: list[list[int]]
    """What the draft layer guesses to follow; nothing after a step without drafts."""


class Launched(Protocol):
    """A step that was enqueued."""

    @property
    def batch(self) -> Sequence[Request]: ...

    @property
    def feeds_next(self) -> bool:
        """Whether the next step may be launched before this one's result was taken, or is over already."""

    def wait(self) -> None:
        """Until no memory of the step's requests is read or written by it any more."""

    def result(self) -> StepResult:
        """Waits. To be taken once, before the step after the next is launched."""


class Runner(Protocol):
    def would_split(self, batch: Sequence[Request]) -> bool:
        """Whether the batch runs as micro-batches. Where one rank's does, all ranks' do."""

    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        """Enqueue one step, a token for each request, of which another rank may have more.

        Raises what the model raises.
        """


@dataclass(frozen=True)
class _Done:
    """A step that was over when ``launch`` returned."""

    batch: Sequence[Request]
    step_result: StepResult
    feeds_next: bool = False

    def wait(self) -> None:
        pass

    def result(self) -> StepResult:
        return self.step_result


class HostRunner:
    """Steps on the CPU, which are done when they are launched."""

    def __init__(self, model: DsaModel, hot_buffers: HotBuffers, kernels: AttentionKernels) -> None:
        self._model = model
        self._hot_buffers = hot_buffers
        self._kernels = kernels

    def would_split(self, batch: Sequence[Request]) -> bool:
        return False

    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        if not batch:
            self._model.forward_of_others()
            return _Done(batch, _step_result([], [], []))
        _check_slots(batch)
        if step.num_new > 1:
            return _Done(batch, self._verify(batch, step.num_new))
        for request in batch:
            request.take_drafts(0)
        access = HostStep(self._hot_buffers, self._kernels, batch)
        newest = torch.tensor([request.output_token_ids[-1] for request in batch])
        logits = self._model.forward(newest, access.positions, access, torch.arange(len(batch)))
        access.finish()
        token_ids, logprobs = sample(
            logits,
            [request.sampling for request in batch],
            [_next_index(request) for request in batch],
            self._model.spec.eos_token_ids,
        )
        rows = self._row_results(batch)
        return _Done(batch, _step_result([[one] for one in token_ids], [[one] for one in logprobs], rows))

    def _verify(self, batch: Sequence[Request], num_new: int) -> StepResult:
        """One step in which each request's drafts follow its newest token."""
        model, num_reqs = self._model, len(batch)
        drafts = _take_drafts(batch, num_new, self._hot_buffers)
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
            [_next_index(batch[req]) + row for req, row in rows],
            model.spec.eos_token_ids,
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
        new_drafts = [logits.argmax(dim=-1)]
        hidden = hidden[newest_rows]
        ends = [min(request.reserved_tokens, model.spec.context_length) for request in batch]
        for number in range(1, num_new - 1):
            last = [seq_len + number for seq_len in lens]
            access = HostStep(
                self._hot_buffers, self._kernels, batch, last, ends, num_new=number, first_row=number - 1
            )
            logits, hidden = model.draft(
                new_drafts[-1], hidden, access.positions, access, torch.arange(num_reqs)
            )
            new_drafts.append(logits.argmax(dim=-1))
        return _step_result(
            [of_req[: count + 1] for of_req, count in zip(drawn, accepted, strict=True)],
            [of_req[: count + 1] for of_req, count in zip(of_drawn, accepted, strict=True)],
            self._row_results(batch),
            [len(of_req) for of_req in drafts],
            torch.stack(new_drafts, dim=1).tolist(),
        )

    def _row_results(self, batch: Sequence[Request]) -> list[list[int]]:
        rows: list[list[int]] = self._hot_buffers.row_results(
            torch.tensor([request.req_row for request in batch])
        ).tolist()
        return rows


def make_runner(settings: DecodeSettings, model: DsaModel, hot_buffers: HotBuffers) -> Runner:
    """The runner for the device and the formats. Raises AttentionBackendError."""
    max_reqs = settings.max_running_requests
    kernels = AttentionKernels.choose(model, settings.attention_backend, scratch_tokens=max_reqs)
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
        device = hot_buffers.device
        self._backup_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._inputs = torch.zeros(3 * max_reqs + 1, dtype=torch.int64, device=device)
        """Tokens, lengths and rows, each [max_reqs], and the number of requests that are real."""
        self._last_tokens = torch.zeros(hot_buffers.state.num_rows + 1, dtype=torch.int64, device=device)
        """What each row sampled last; the last entry is of padding."""
        is_pinned = device.type == "cuda"
        self._buffers = [_StepBuffers.create(max_reqs, is_pinned, model.ranks) for _ in range(2)]
        self._num_launched = 0
        self._min_split_reqs = max(min_split_reqs, NUM_MICRO_BATCHES) if min_split_reqs else max_reqs + 1
        self._micro_batches: MicroBatches | None = None
        if self._min_split_reqs <= max_reqs:
            self._micro_batches = MicroBatches(model, hot_buffers, kernels, max_reqs, self._backup_stream)
        self._graphs: dict[bool, dict[int, tuple[torch.cuda.CUDAGraph, _Outputs]]] = {False: {}, True: {}}
        """By whether a batch runs as micro-batches, then by its size, smallest first."""
        if graph_batches and device.type == "cuda":
            self._capture(sorted(graph_batches, reverse=True))

    def would_split(self, batch: Sequence[Request]) -> bool:
        return sum(request.mode is Mode.HISPARSE for request in batch) >= self._min_split_reqs

    @torch.inference_mode()  # as the capture, whose results are written to
    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        _check_slots(batch)
        buffers = self._buffers[self._num_launched % 2]
        self._num_launched += 1
        buffers.fill(batch, self._max_reqs)
        self._inputs.copy_(buffers.inputs, non_blocking=True)
        graphs, num_reqs = self._graphs[step.is_split], len(batch)
        size = next((size for size in graphs if size >= step.num_tokens), None)
        if size is None:
            outputs = self._forward(step.num_tokens, step.is_split)
        else:
            graph, outputs = graphs[size]
            graph.replay()
        sampled = self._sample(batch, outputs)
        buffers.results[:num_reqs].copy_(outputs.results[:num_reqs], non_blocking=True)
        buffers.record()
        return _OnDevice(batch, buffers, sampled)

    def _sample(self, batch: Sequence[Request], outputs: _Outputs) -> Sampled | None:
        """Put what the requests ask for in the likeliest tokens' place; None when these are all they want.

        Behind the graph and not in it: how many rows are drawn, and how, changes from step to step.
        """
        if all(_is_plain_greedy(request.sampling, _next_index(request)) for request in batch):
            return None
        num_reqs = len(batch)
        sampled = enqueue_sample(
            outputs.logits[:num_reqs],
            [request.sampling for request in batch],
            [_next_index(request) for request in batch],
            self._model.spec.eos_token_ids,
        )
        outputs.results[:num_reqs, 0] = sampled.token_ids
        req_rows = self._inputs[2 * self._max_reqs :][:num_reqs]
        self._last_tokens[req_rows] = sampled.token_ids
        return sampled

    def _forward(self, num_reqs: int, is_split: bool) -> _Outputs:
        """The device work of one step, of the requests in ``_inputs``."""
        inputs, most = self._inputs, self._max_reqs
        given, seq_lens, req_rows = (inputs[i * most : i * most + num_reqs] for i in range(3))
        num_real_reqs = inputs[3 * most :].to(torch.int32)
        token_ids = torch.where(given == FROM_DEVICE, self._last_tokens[req_rows], given)
        rows = torch.arange(num_reqs, device=inputs.device)
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
        self._buffers[0].fill((), self._max_reqs)
        self._inputs.copy_(self._buffers[0].inputs)
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
        stream.synchronize()
        pool = None
        for size, is_split in kinds:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self._forward(size, is_split)
            pool = graph.pool()
            self._graphs[is_split][size] = graph, outputs
        self._graphs = {is_split: dict(sorted(graphs.items())) for is_split, graphs in self._graphs.items()}
        log.info(
            "captured CUDA graphs of %s requests, as micro-batches from %d hisparse ones on, in %.1f s",
            list(self._graphs[False]),
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
class _StepBuffers:
    """The host's side of every other step: what goes to the device, and what comes back."""

    inputs: Tensor
    """int64 [3 * max_reqs + 1], as ``GraphRunner._inputs``."""
    results: Tensor
    """int64 [max_reqs, 5]"""
    done: torch.cuda.Event | None
    ranks: RankGroup | None

    @classmethod
    def create(cls, max_reqs: int, is_pinned: bool, ranks: RankGroup | None) -> _StepBuffers:
        return cls(
            torch.zeros(3 * max_reqs + 1, dtype=torch.int64, pin_memory=is_pinned),
            torch.zeros((max_reqs, 5), dtype=torch.int64, pin_memory=is_pinned),
            torch.cuda.Event() if is_pinned else None,  # type: ignore[no-untyped-call]
            ranks,
        )

    def fill(self, batch: Sequence[Request], max_reqs: int) -> None:
        num_padding = max_reqs - len(batch)
        values = self.inputs.numpy()
        values[:max_reqs] = [
            *(FROM_DEVICE if r.num_in_flight else r.output_token_ids[-1] for r in batch),
            *[0] * num_padding,
        ]
        values[max_reqs : 2 * max_reqs] = [*(r.next_seq_len for r in batch), *[1] * num_padding]
        values[2 * max_reqs : 3 * max_reqs] = [*(r.req_row for r in batch), *[0] * num_padding]
        values[3 * max_reqs] = len(batch)

    def record(self) -> None:
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        if self.done is not None:
            with self.ranks.bounded_wait() if self.ranks else nullcontext():
                self.done.synchronize()


@dataclass(frozen=True)
class _OnDevice:
    """A step that a GPU works on. ``sampled``: None when all tokens are just the likeliest."""

    batch: Sequence[Request]
    buffers: _StepBuffers
    sampled: Sampled | None
    feeds_next: bool = True

    def wait(self) -> None:
        self.buffers.wait()

    def result(self) -> StepResult:
        self.buffers.wait()
        rows: list[list[int]] = self.buffers.results[: len(self.batch)].tolist()
        token_ids = [row[0] for row in rows]
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        if self.sampled is not None:
            logprobs = self.sampled.read_logprobs(token_ids)
        return _step_result(
            [[one] for one in token_ids], [[one] for one in logprobs], [row[1:] for row in rows]
        )


def _take_drafts(batch: Sequence[Request], num_new: int, hot_buffers: HotBuffers) -> list[list[int]]:
    """What each request's next step of ``num_new`` positions verifies."""
    return [request.take_drafts(hot_buffers.max_verifiable(request, num_new - 1)) for request in batch]


def _step_result(
    token_ids: list[list[int]],
    logprobs: list[list[TokenLogprob | None]],
    row_results: list[list[int]],
    num_drafted: list[int] | None = None,
    drafts: list[list[int]] | None = None,
) -> StepResult:
    """``row_results``: as ``HotBuffers.row_results``. Without the last two there were no drafts."""
    return StepResult(
        token_ids,
        logprobs,
        [str(HotBufferError(flags).name) if flags else "" for flags, *_ in row_results],
        [(hits, misses, evictions) for _, hits, misses, evictions in row_results],
        [0] * len(token_ids) if num_drafted is None else num_drafted,
        [[] for _ in token_ids] if drafts is None else drafts,
    )


def _check_slots(batch: Sequence[Request]) -> None:
    """Raises RuntimeError when the newest token of a request has no slot."""
    for request in batch:
        if not request.has_slots_for_next:
            raise RuntimeError(
                f"room {request.room}: no slot for position {request.next_seq_len - 1}, it has "
                f"{request.reserved_tokens}"
            )


def _next_index(request: Request) -> int:
    """Output tokens before the one that the next step samples."""
    return len(request.output_token_ids) + request.num_in_flight


def _is_plain_greedy(params: SamplingParams, num_generated: int) -> bool:
    """Whether the largest logit is the token, and nobody asks for more than that."""
    return params.temperature == 0 and params.num_logprobs is None and num_generated >= params.min_new_tokens
