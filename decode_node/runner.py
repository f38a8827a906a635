"""Runs decode steps: a batch in, its tokens out, at once on the CPU and one step later on a GPU.

``launch`` enqueues a step and returns; ``Launched.result`` waits for its tokens. On a GPU a step is a CUDA
graph of the next larger batch size, its input tokens may still be on the device (the last step's, which
nobody has read yet), and the host reads tokens, counters and error flags in one copy.

A large hisparse batch is bound by PCIe. Its step runs as micro-batches, each in a stream of its own: while
one copies its misses of a layer, the others compute theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode_node.device_step import DeviceStep, HostStep, MicroBatchTurns
from decode_node.hot_buffers import HotBuffers
from decode_node.request import Request
from kernels.hot_state import HotBufferError
from kernels.kv_format import FP8_E4M3
from kernels.miss_plan import MissPlan
from model.attention_kernels import AttentionKernels
from model.dsa import DsaModel
from model.sampling import Sampled, enqueue_sample, sample
from service.settings import DecodeSettings
from vocabulary import Mode, SamplingParams, TokenLogprob

log = logging.getLogger(__name__)

FROM_DEVICE = -1
"""In place of an input token: the one that the row's last step sampled."""

NUM_MICRO_BATCHES = 2
COPY_BLOCKS = 12
"""Multiprocessors that the copies of a micro-batch take from the computing of the others."""
TAKEN_SMS = 16
"""Multiprocessors that the computing does without: kernels that fill a GPU would begin twice otherwise."""


@dataclass(frozen=True)
class StepResult:
    """A value for each request of the step's batch. ``errors``: empty where the kernels found nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    errors: list[str]
    counters: list[tuple[int, int, int]]


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
    def launch(self, batch: Sequence[Request]) -> Launched:
        """Enqueue one step, a token for each request. Raises what the model raises."""


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

    def launch(self, batch: Sequence[Request]) -> Launched:
        _check_slots(batch)
        step = HostStep(self._hot_buffers, self._kernels, batch)
        newest = torch.tensor([request.output_token_ids[-1] for request in batch])
        logits = self._model.forward(newest, step.positions, step, torch.arange(len(batch)))
        step.finish()
        token_ids, logprobs = sample(
            logits,
            [request.sampling for request in batch],
            [_next_index(request) for request in batch],
            self._model.spec.eos_token_ids,
        )
        rows = self._hot_buffers.row_results(step.req_rows).tolist()
        return _Done(batch, _step_result(token_ids, logprobs, rows))


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
        # Copies come first: one that waits for a multiprocessor leaves PCIe idle.
        self._copy_stream = (
            torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )
        self._inputs = torch.zeros(3 * max_reqs + 1, dtype=torch.int64, device=device)
        """Tokens, lengths and rows, each [max_reqs], and the number of requests that are real."""
        self._last_tokens = torch.zeros(hot_buffers.state.num_rows + 1, dtype=torch.int64, device=device)
        """What each row sampled last; the last entry is of padding."""
        self._turns = [_Turn.create(max_reqs, is_pinned=device.type == "cuda") for _ in range(2)]
        self._num_launched = 0
        self._min_split_reqs = max(min_split_reqs, NUM_MICRO_BATCHES) if min_split_reqs else max_reqs + 1
        self._micro_batches: list[_MicroBatch] = []
        if self._min_split_reqs <= max_reqs:
            room = -(-max_reqs // NUM_MICRO_BATCHES)
            self._micro_batches = [
                _MicroBatch(
                    own_kernels,
                    MissPlan.create(room, model.spec.index_topk, device),
                    torch.cuda.Stream(device) if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
                )
                for own_kernels in kernels.split(NUM_MICRO_BATCHES, TAKEN_SMS)
            ]
        self._graphs: dict[bool, dict[int, tuple[torch.cuda.CUDAGraph, _Outputs]]] = {False: {}, True: {}}
        """By whether a batch runs as micro-batches, then by its size, smallest first."""
        if graph_batches and device.type == "cuda":
            self._capture(sorted(graph_batches, reverse=True))

    @torch.inference_mode()  # as the capture, whose results are written to
    def launch(self, batch: Sequence[Request]) -> Launched:
        _check_slots(batch)
        turn = self._turns[self._num_launched % 2]
        self._num_launched += 1
        turn.fill(batch, self._max_reqs)
        self._inputs.copy_(turn.inputs, non_blocking=True)
        is_split = sum(request.mode is Mode.HISPARSE for request in batch) >= self._min_split_reqs
        num_reqs = len(batch)
        size = next((size for size in self._graphs[is_split] if size >= num_reqs), None)
        if size is None:
            outputs = self._forward(num_reqs, is_split)
        else:
            graph, outputs = self._graphs[is_split][size]
            graph.replay()
        sampled = self._sample(batch, outputs)
        turn.results[:num_reqs].copy_(outputs.results[:num_reqs], non_blocking=True)
        turn.record()
        return _OnDevice(batch, turn, sampled)

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
        if is_split:
            with matmuls_without(TAKEN_SMS):
                logits = self._forward_split(token_ids, seq_lens, req_rows, num_real_reqs)
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

    def _forward_split(
        self, token_ids: Tensor, seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor
    ) -> Tensor:
        """float32 [num_reqs, vocab_size]. Requests go to the micro-batches in turn, and so does padding."""
        num_parts = len(self._micro_batches)
        turns = MicroBatchTurns(token_ids.device, COPY_BLOCKS, self._copy_stream)
        forwards = []
        for number, part in enumerate(self._micro_batches):
            with part.after_current_stream():
                of_part = slice(number, None, num_parts)
                step = DeviceStep(
                    self._hot_buffers,
                    part.kernels,
                    seq_lens[of_part].contiguous(),
                    req_rows[of_part].contiguous(),
                    (num_real_reqs + (num_parts - 1 - number)) // num_parts,
                    self._backup_stream,
                    miss_plan=part.miss_plan,
                    turns=turns,
                )
                rows = torch.arange(step.positions.shape[0], device=token_ids.device)
                forwards.append(self._model.forward_by_layer(token_ids[of_part], step.positions, step, rows))
        logits = token_ids.new_empty((len(token_ids), self._model.spec.vocab_size), dtype=torch.float32)
        running = list(range(num_parts))
        while running:
            for number in list(running):
                with torch.cuda.stream(self._micro_batches[number].stream):
                    try:
                        next(forwards[number])
                    except StopIteration as end:
                        logits[number::num_parts] = end.value
                        running.remove(number)
        for part in self._micro_batches:
            part.join_current_stream()
        step.finish()  # of any: their backups share a stream
        return logits

    @torch.inference_mode()
    def _capture(self, sizes: Sequence[int]) -> None:
        """Capture a graph of each size, largest first, so that they can share their memory.

        All requests are padding meanwhile. Each is run once before, for what kernels allocate or compile on
        their first launch.
        """
        started = time.monotonic()
        self._turns[0].fill((), self._max_reqs)
        self._inputs.copy_(self._turns[0].inputs)
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


@contextmanager
def matmuls_without(num_sms: int) -> Iterator[None]:
    """Products of matrices that are launched meanwhile are spread over so many multiprocessors less.

    torch warns in the log that this setting may go some day; without it steps are some 3% longer.
    """
    set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", lambda num_sms: None)
    set_carveout(num_sms)
    try:
        yield
    finally:
        set_carveout(None)


@dataclass(frozen=True)
class _MicroBatch:
    """What the part of a batch has to itself that runs beside the others. ``stream``: None on a CPU."""

    kernels: AttentionKernels
    miss_plan: MissPlan
    stream: torch.cuda.Stream | None

    def after_current_stream(self) -> torch.cuda.StreamContext:
        """The context in which work goes to ``stream``, behind what the current stream has."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def join_current_stream(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


@dataclass(frozen=True)
class _Outputs:
    logits: Tensor
    """float32 [num_reqs, vocab_size]"""
    results: Tensor
    """int64 [num_reqs, 5]: sampled token, error flags, hits, misses, evictions."""


@dataclass(frozen=True)
class _Turn:
    """The host's side of every other step: what goes to the device, and what comes back."""

    inputs: Tensor
    """int64 [3 * max_reqs + 1], as ``GraphRunner._inputs``."""
    results: Tensor
    """int64 [max_reqs, 5]"""
    done: torch.cuda.Event | None

    @classmethod
    def create(cls, max_reqs: int, is_pinned: bool) -> _Turn:
        return cls(
            torch.zeros(3 * max_reqs + 1, dtype=torch.int64, pin_memory=is_pinned),
            torch.zeros((max_reqs, 5), dtype=torch.int64, pin_memory=is_pinned),
            torch.cuda.Event() if is_pinned else None,  # type: ignore[no-untyped-call]
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
            self.done.synchronize()


@dataclass(frozen=True)
class _OnDevice:
    """A step that a GPU works on. ``sampled``: None when all tokens are just the likeliest."""

    batch: Sequence[Request]
    turn: _Turn
    sampled: Sampled | None
    feeds_next: bool = True

    def wait(self) -> None:
        self.turn.wait()

    def result(self) -> StepResult:
        self.turn.wait()
        rows: list[list[int]] = self.turn.results[: len(self.batch)].tolist()
        token_ids = [row[0] for row in rows]
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        if self.sampled is not None:
            logprobs = self.sampled.read_logprobs(token_ids)
        return _step_result(token_ids, logprobs, [row[1:] for row in rows])


def _step_result(
    token_ids: list[int], logprobs: list[TokenLogprob | None], row_results: list[list[int]]
) -> StepResult:
    """``row_results``: as ``HotBuffers.row_results``."""
    return StepResult(
        token_ids,
        logprobs,
        [str(HotBufferError(flags).name) if flags else "" for flags, *_ in row_results],
        [(hits, misses, evictions) for _, hits, misses, evictions in row_results],
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
