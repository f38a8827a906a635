"""Runs decode steps: a batch in, its tokens out, at once on the CPU and one step later on a GPU.

``launch`` enqueues a step and returns; ``Launched.result`` waits for its tokens. On a GPU a step is a CUDA
graph of the next larger batch size, its input tokens may still be on the device (the last step's, which
nobody has read yet), and the host reads tokens, counters and error flags in one copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode_node.device_step import DeviceStep, HostStep
from decode_node.hot_buffers import HotBuffers
from decode_node.request import Request
from kernels.hot_state import HotBufferError
from kernels.kv_format import FP8_E4M3
from model.attention_kernels import AttentionKernels
from model.dsa import DsaModel
from model.sampling import sample
from protocol.engine_messages import Mode, SamplingParams, TokenLogprob
from protocol.settings import DecodeSettings

log = logging.getLogger(__name__)

FROM_DEVICE = -1
"""In place of an input token: the one that the row's last step sampled."""


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
        """Whether the next step may be launched before this one's result was taken."""

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
        _check_device_slots(batch)
        step = HostStep(self._hot_buffers, self._kernels, batch)
        newest = torch.tensor([request.output_token_ids[-1] for request in batch])
        logits = self._model.forward(newest, step.positions, step, torch.arange(len(batch)))
        step.finish()
        token_ids, logprobs = _sample(logits, batch, self._model.spec.eos_token_ids)
        return _Done(batch, _step_result(token_ids, logprobs, step.row_results().tolist()))


def make_runner(settings: DecodeSettings, model: DsaModel, hot_buffers: HotBuffers) -> Runner:
    """The runner for the device and the formats. Raises AttentionBackendError."""
    max_reqs = settings.max_running_requests
    kernels = AttentionKernels.choose(model, settings.attention_backend, scratch_tokens=max_reqs)
    if model.device.type == "cpu" and kernels.index_format.name != FP8_E4M3:
        return HostRunner(model, hot_buffers, kernels)
    return GraphRunner(
        model, hot_buffers, kernels, max_reqs=max_reqs, max_graph_reqs=settings.max_graph_batch
    )


class GraphRunner:
    """Steps on a GPU, in CUDA graphs of up to ``max_graph_reqs`` requests; larger ones go without."""

    def __init__(
        self,
        model: DsaModel,
        hot_buffers: HotBuffers,
        kernels: AttentionKernels,
        *,
        max_reqs: int,
        max_graph_reqs: int,
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
        self._turns = [_Turn.create(max_reqs, is_pinned=device.type == "cuda") for _ in range(2)]
        self._num_launched = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, _Outputs]] = {}
        if max_graph_reqs > 0 and device.type == "cuda":
            self._capture(graph_sizes(min(max_graph_reqs, max_reqs)))

    def launch(self, batch: Sequence[Request]) -> Launched:
        _check_device_slots(batch)
        turn = self._turns[self._num_launched % 2]
        self._num_launched += 1
        turn.fill(batch, self._max_reqs)
        self._inputs.copy_(turn.inputs, non_blocking=True)
        size = next((size for size in self._graphs if size >= len(batch)), None)
        if size is None:
            outputs = self._forward(len(batch))
        else:
            graph, outputs = self._graphs[size]
            graph.replay()
        num_reqs = len(batch)
        turn.results[:num_reqs].copy_(outputs.results[:num_reqs], non_blocking=True)
        turn.record()
        is_greedy = all(_is_plain_greedy(r.sampling, _next_index(r)) for r in batch)
        logits = None if is_greedy else outputs.logits[:num_reqs]
        return _OnDevice(batch, turn, logits, self._model.spec.eos_token_ids)

    def _forward(self, num_reqs: int) -> _Outputs:
        """The device work of one step, of the requests in ``_inputs``."""
        inputs, most = self._inputs, self._max_reqs
        given, seq_lens, req_rows = (inputs[i * most : i * most + num_reqs] for i in range(3))
        num_real_reqs = inputs[3 * most :].to(torch.int32)
        token_ids = torch.where(given == FROM_DEVICE, self._last_tokens[req_rows], given)
        step = DeviceStep(
            self._hot_buffers, self._kernels, seq_lens, req_rows, num_real_reqs, self._backup_stream
        )
        rows = torch.arange(num_reqs, device=inputs.device)
        logits = self._model.forward(token_ids, step.positions, step, rows)
        step.finish()
        sampled = logits.argmax(dim=-1)
        last = self._last_tokens.shape[0] - 1
        self._last_tokens[torch.where(step.is_real, req_rows, last)] = sampled
        return _Outputs(logits, torch.cat((sampled[:, None], step.row_results()), dim=1))

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
        with torch.cuda.stream(stream):
            for size in sizes:
                self._forward(size)
        stream.synchronize()
        pool = None
        graphs: dict[int, tuple[torch.cuda.CUDAGraph, _Outputs]] = {}
        for size in sizes:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self._forward(size)
            pool = graph.pool()
            graphs[size] = graph, outputs
        self._graphs = dict(sorted(graphs.items()))
        log.info(
            "captured CUDA graphs of %s requests in %.1f s", list(self._graphs), time.monotonic() - started
        )


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that graphs are captured of, largest first: 1, 2, 4, then every 8, 16 and 32."""
    sizes = {1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, most + 1, 32), most}
    return sorted((size for size in sizes if size <= most), reverse=True)


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
    """A step that a GPU works on. ``logits``: when a request of it is not sampled greedily."""

    batch: Sequence[Request]
    turn: _Turn
    logits: Tensor | None
    eos_token_ids: tuple[int, ...]

    @property
    def feeds_next(self) -> bool:
        return self.logits is None

    def wait(self) -> None:
        self.turn.wait()

    def result(self) -> StepResult:
        self.turn.wait()
        rows: list[list[int]] = self.turn.results[: len(self.batch)].tolist()
        token_ids, logprobs = [row[0] for row in rows], [None] * len(rows)
        if self.logits is not None:
            token_ids, logprobs = _sample(self.logits, self.batch, self.eos_token_ids)  # type: ignore[assignment]
        return _step_result(token_ids, list(logprobs), [row[1:] for row in rows])


def _step_result(
    token_ids: list[int], logprobs: list[TokenLogprob | None], row_results: list[list[int]]
) -> StepResult:
    """``row_results``: as ``DeviceStep.row_results``."""
    return StepResult(
        token_ids,
        logprobs,
        [str(HotBufferError(flags).name) if flags else "" for flags, *_ in row_results],
        [(hits, misses, evictions) for _, hits, misses, evictions in row_results],
    )


def _check_device_slots(batch: Sequence[Request]) -> None:
    """Raises RuntimeError when the newest token of a dense request has no page."""
    for request in batch:
        if request.mode is Mode.DENSE and request.next_seq_len > request.num_device_slots:
            raise RuntimeError(
                f"room {request.room}: no device slot for position {request.next_seq_len - 1}, it has "
                f"{request.num_device_slots}"
            )


def _sample(
    logits: Tensor, batch: Sequence[Request], eos_token_ids: Sequence[int]
) -> tuple[list[int], list[TokenLogprob | None]]:
    return sample(
        logits,
        [request.sampling for request in batch],
        [len(request.output_token_ids) for request in batch],
        eos_token_ids,
    )


def _next_index(request: Request) -> int:
    """Output tokens before the one that the next step samples."""
    return len(request.output_token_ids) + request.num_in_flight


def _is_plain_greedy(params: SamplingParams, num_generated: int) -> bool:
    """Whether the largest logit is the token, and nobody asks for more than that."""
    return params.temperature == 0 and params.num_logprobs is None and num_generated >= params.min_new_tokens
