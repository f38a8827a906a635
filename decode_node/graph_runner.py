"""Runs decode steps on a GPU, one step behind.

A step is a CUDA graph of the next larger batch size, its input tokens may still be on the device (the last
step's, which nobody has read yet), and the host reads tokens, counters and error flags in one copy.

What a grammar lets a request draw depends on the last step's tokens: the graph is launched before they are
read, and the draws are enqueued when they have been, while the device works on the graph.

A batch with many hisparse requests runs as micro-batches.

Steps that verify drafts are ``verifying.py``'s. How long a sequence is after one, the next step has from the
device like the newest token, if it is launched before the host has read it. Micro-batches have no drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from decode_node.device_rows import DeviceRows
from decode_node.device_step import DeviceStep
from decode_node.hot_buffers import HotBuffers
from decode_node.micro_batches import NUM_MICRO_BATCHES, MicroBatches
from decode_node.request import Request
from decode_node.row_counts import RowCounts
from decode_node.step_buffers import StepBuffers, StepInputs
from decode_node.step_masks import has_grammar, masks_of
from decode_node.steps import (
    Launched,
    StepResult,
    check_drawn,
    check_slots,
    is_plain_greedy,
    next_index,
    step_result,
    take_drafts,
)
from decode_node.verifying import Verified, Verifier
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.model.dsa import DsaModel
from hisparse_pd.model.sampling import Sampled, enqueue_sample
from hisparse_pd.model.token_counts import CountedRows
from hisparse_pd.vocabulary import Mode, TokenLogprob

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
        self._rows = DeviceRows.create(hot_buffers.state.num_rows, self._max_new, device)
        self._counts = RowCounts(hot_buffers.state.num_rows, model.spec.vocab_size, device)
        self._verifier: Verifier | None = None
        if self._max_new > 1:
            self._verifier = Verifier(
                model, hot_buffers, kernels, self._inputs, self._rows, self._counts, max_reqs=max_reqs
            )
        is_pinned = device.type == "cuda"
        self._buffers = [
            StepBuffers.create(max_reqs, self._max_new, model.spec.vocab_size, is_pinned, model.ranks)
            for _ in range(2)
        ]
        self._num_launched = 0
        self._has_verified = False
        """The last step verified drafts: it says on the device what its requests go on with."""
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
        check_slots(batch)
        self._counts.count(batch, self._rows.tokens)
        buffers = self._buffers[self._num_launched % 2]
        self._num_launched += 1
        unread = [request.num_in_flight > 0 and self._has_verified for request in batch]
        drafts, most_drafts = take_drafts(batch, step.num_new, self._hot_buffers, unread)
        buffers.fill(batch, drafts, most_drafts, unread, step.num_new, self._model.spec.context_length)
        self._inputs.values.copy_(buffers.inputs.values, non_blocking=True)
        self._has_verified = step.num_new > 1
        launched: _OnDevice | Verified
        if self._has_verified and self._verifier is not None:
            launched = self._verifier.launch(
                batch, drafts, most_drafts, step.num_tokens, step.num_new, buffers
            )
        else:
            launched = self._launch_plain(batch, step, buffers)
        if has_grammar(batch):
            buffers.mark()
        else:
            launched.draw()
        return launched

    def _launch_plain(self, batch: Sequence[Request], step: NodeStep, buffers: StepBuffers) -> _OnDevice:
        """Without drafts, and with its draws to come."""
        graphs, num_reqs = self._graphs[step.is_split], len(batch)
        size = next((size for size in graphs if size >= step.num_tokens), None)
        if size is None:
            outputs = self._forward(step.num_tokens, step.is_split)
        else:
            graph, outputs = graphs[size]
            graph.replay()
        finish = None
        if self._verifier is not None:
            finish = partial(self._verifier.write_draft_kv, size or step.num_tokens)
        sample = None
        if not all(map(is_plain_greedy, batch)):
            indices = [next_index(request) for request in batch]
            sample = partial(self._sample, batch, indices, self._counts.of(batch), outputs, buffers)
        return _OnDevice(batch, buffers, outputs.results[:num_reqs], sample, finish)

    def _sample(
        self,
        batch: Sequence[Request],
        indices: Sequence[int],
        counts: CountedRows | None,
        outputs: _Outputs,
        buffers: StepBuffers,
    ) -> Sampled:
        """Put what the requests ask for in the likeliest tokens' place.

        Behind the graph and not in it: how many rows are drawn, and how, changes from step to step.
        """
        num_reqs = len(batch)
        masks = None
        if has_grammar(batch):
            masks = masks_of(batch, [()] * num_reqs, buffers.masks)
            masks = masks.to(outputs.logits.device, non_blocking=True)
        sampled = enqueue_sample(
            outputs.logits[:num_reqs],
            [request.sampling for request in batch],
            indices,
            self._model.spec.eos_token_ids,
            counts=counts,
            masks=masks,
        )
        outputs.results[:num_reqs, 0] = sampled.token_ids
        self._rows.tokens[self._inputs.req_rows[:num_reqs]] = sampled.token_ids
        return sampled

    def _forward(self, num_reqs: int, is_split: bool) -> _Outputs:
        """The device work of one step, of the requests in ``_inputs``."""
        inputs = self._inputs
        req_rows, num_real_reqs = inputs.req_rows[:num_reqs], inputs.num_real_reqs
        token_ids = self._rows.newest_tokens(inputs.tokens[:num_reqs], req_rows)
        seq_lens = self._rows.lengths(inputs, num_reqs)
        rows = torch.arange(num_reqs, device=token_ids.device)
        hidden: Tensor | None = None
        if is_split and self._micro_batches is not None:
            logits, hidden = self._micro_batches.forward(token_ids, seq_lens, req_rows, num_real_reqs)
        else:
            step = DeviceStep(
                self._hot_buffers, self._kernels, seq_lens, req_rows, num_real_reqs, self._backup_stream
            )
            if self._verifier is None:
                logits = self._model.forward(token_ids, step.positions, step, rows)
            else:
                logits, hidden = self._model.forward_with_hidden(token_ids, step.positions, step, rows)
            step.finish()
        if self._verifier is not None and hidden is not None:
            self._verifier.keep_hidden(hidden)
        sampled = logits.argmax(dim=-1)
        self._rows.put(inputs, sampled)
        row_results = self._hot_buffers.row_results(req_rows)
        return _Outputs(logits, torch.cat((sampled[:, None], row_results), dim=1))

    @torch.inference_mode()
    def _capture(self, sizes: Sequence[int]) -> None:
        """Capture a graph of each size, largest first, so that they can share their memory.

        All requests are padding meanwhile. Each is run once before, for what kernels allocate or compile on
        their first launch.
        """
        started = time.monotonic()
        self._buffers[0].fill((), [], [], [], self._max_new, self._model.spec.context_length)
        self._inputs.values.copy_(self._buffers[0].inputs.values)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        kinds = [
            (size, is_split)
            for size in sizes
            for is_split in (False, True)
            if size >= self._min_split_reqs or not is_split
        ]
        ranks = self._model.ranks
        with torch.cuda.stream(stream):
            if ranks is not None:  # which compile for unlike times, longer than they may wait for each other
                with ranks.rehearsal():
                    self._warm_up(kinds, sizes)
            self._warm_up(kinds, sizes)
        stream.synchronize()
        pool = None
        for size, is_split in kinds:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self._forward(size, is_split)
            pool = graph.pool()
            self._graphs[is_split][size] = graph, outputs
        if self._verifier is not None:
            self._verifier.capture(sizes, pool, stream)
        self._graphs = {is_split: dict(sorted(graphs.items())) for is_split, graphs in self._graphs.items()}
        log.info(
            "captured CUDA graphs of %s requests, with up to %d drafts, as micro-batches from %d hisparse "
            "ones on, in %.1f s",
            list(self._graphs[False]),
            self._max_new - 1,
            self._min_split_reqs,
            time.monotonic() - started,
        )

    def _warm_up(self, kinds: Sequence[tuple[int, bool]], sizes: Sequence[int]) -> None:
        for size, is_split in kinds:
            self._forward(size, is_split)
        if self._verifier is not None:
            self._verifier.warm_up(sizes)


@dataclass(frozen=True)
class _Outputs:
    logits: Tensor
    """float32 [num_reqs, vocab_size]"""
    results: Tensor
    """int64 [num_reqs, 5]: sampled token, error flags, hits, misses, evictions."""


@dataclass
class _OnDevice:
    """A step that a GPU works on."""

    batch: Sequence[Request]
    buffers: StepBuffers
    results: Tensor
    sample: Callable[[], Sampled] | None
    """None when all tokens are just the likeliest."""
    finish: Callable[[], None] | None = None
    """What follows from the draws, if anything does."""
    feeds_next: bool = True
    num_new: int = 1
    sampled: Sampled | None = field(default=None, init=False)
    is_drawn: bool = field(default=False, init=False)

    @property
    def most_drafts(self) -> list[int]:
        return [0] * len(self.batch)

    @torch.inference_mode()
    def draw(self) -> None:
        if self.is_drawn:
            return
        with self.buffers.marked():
            if self.sample is not None:
                self.sampled = self.sample()
            if self.finish is not None:
                self.finish()
            self.buffers.take(self.results)
        self.is_drawn = True

    def wait(self) -> None:
        self.buffers.wait()

    def result(self) -> StepResult:
        check_drawn(self.is_drawn)
        rows = self.buffers.read(len(self.batch), 5)
        token_ids = [row[0] for row in rows]
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        if self.sampled is not None:
            logprobs = self.sampled.read_logprobs(token_ids)
        return step_result(
            [[one] for one in token_ids], [[one] for one in logprobs], [row[1:] for row in rows]
        )
