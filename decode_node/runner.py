"""Runs decode steps: fills their inputs, launches their device work, draws their tokens and reads them.

On a GPU a step's input tokens, and after a step with drafts the lengths, may still be on the device: those of
the last step, which nobody has read yet. The host reads tokens, counters and error flags in one copy. What a
grammar lets a request draw depends on the last step's tokens: the forward is launched before they are read,
and the draws are enqueued when they have been. On a CPU each step is read before the next.

A batch with many hisparse requests is split, and then has no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hisparse_pd.base.settings import DecodeSettings
from hisparse_pd.base.vocabulary import Mode, TokenLogprob
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.sampling import Sampled, enqueue_sample
from hisparse_pd.core.model.token_counts import CountedRows, to_device
from hisparse_pd.decode_node.attention_parts import NUM_PARTS
from hisparse_pd.decode_node.forwards import Forward, Forwards
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.row_counts import RowCounts
from hisparse_pd.decode_node.step_buffers import DeviceRows, StepBuffers, StepInputs
from hisparse_pd.decode_node.step_masks import has_grammar, masks_of
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.kernels.hot_state import HotBufferError


def make_runner(settings: DecodeSettings, model: DsaModel, tables: RequestTables) -> DeviceRunner:
    """The runner for the device and the formats. Raises AttentionBackendError."""
    max_reqs = settings.max_running_requests
    scratch_tokens = max_reqs * tables.state.max_new
    is_gpu = tables.device.type == "cuda"
    return DeviceRunner(
        model,
        tables,
        AttentionKernels.choose(
            model,
            settings.attention_backend,
            scratch_tokens=scratch_tokens,
            split_slots=settings.attention_split_tile_size,
        ),
        max_reqs=max_reqs,
        graph_batches=settings.graph_batches if is_gpu else (),
        min_split_reqs=settings.micro_batch_min_bs if is_gpu else 0,
        is_behind=is_gpu,
    )


class DeviceRunner:
    """Steps in CUDA graphs of ``graph_batches`` requests; larger batches go without.

    A batch with at least ``min_split_reqs`` hisparse requests is split; 0: none is; None: from where that is
    faster, which is measured where graphs are captured, and for which pools have to be empty.
    ``is_behind``: the next step may be launched before the last one is read.
    """

    def __init__(
        self,
        model: DsaModel,
        tables: RequestTables,
        kernels: AttentionKernels,
        *,
        max_reqs: int,
        graph_batches: Sequence[int],
        min_split_reqs: int | None,
        is_behind: bool,
    ) -> None:
        self._spec = model.spec
        self._tables = tables
        self._is_behind = is_behind
        if min_split_reqs is not None or not graph_batches:
            min_split_reqs = max(min_split_reqs, NUM_PARTS) if min_split_reqs else max_reqs + 1
        device, max_new = tables.device, tables.state.max_new
        self._inputs = StepInputs.create(max_reqs, max_new, device)
        self._rows = DeviceRows.create(tables.state.num_rows, max_new, device)
        self._counts = RowCounts(tables.state.num_rows, model.spec.vocab_size, device)
        self._forwards = Forwards(
            model,
            tables,
            kernels,
            self._inputs,
            self._rows,
            max_reqs=max_reqs,
            min_split_reqs=min_split_reqs,
        )
        is_pinned = device.type == "cuda"
        self._buffers = [
            StepBuffers.create(max_reqs, max_new, model.spec.vocab_size, is_pinned, model.ranks)
            for _ in range(2)
        ]
        self._num_launched = 0
        self._has_verified = False
        """The last step verified drafts: it says on the device what its requests go on with."""
        if graph_batches:
            self._fill((), [], [], [], max_new)
            self._forwards.capture(sorted(graph_batches, reverse=True))

    def would_split(self, batch: Sequence[Request]) -> bool:
        """Whether the batch is split. Where one rank's does, all ranks' do."""
        return sum(request.mode is Mode.HISPARSE for request in batch) >= self._forwards.min_split_reqs

    @torch.inference_mode()  # as the capture, whose results are written to
    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        """Enqueue one step, a token for each request; another rank may have more of these. Raises what the
        model raises."""
        num_new = step.num_new
        for request in batch:
            if not request.has_slots_for_next:
                raise RuntimeError(
                    f"room {request.room}: no slot for position {request.next_seq_len - 1}, it has "
                    f"{request.reserved_tokens}"
                )
        self._counts.count(batch, self._rows.tokens)
        drafts: list[list[int]] = []
        most_drafts: list[int] = []
        unread = [request.num_in_flight > 0 and self._has_verified for request in batch]
        for request, is_unread in zip(batch, unread, strict=True):  # whose drafts are still on the device
            most = self._tables.max_verifiable(request, num_new - 1) if num_new > 1 else 0
            drafts.append(request.take_drafts(0 if is_unread else most))
            most_drafts.append(most if is_unread else len(drafts[-1]))
        buffers = self._fill(batch, drafts, most_drafts, unread, num_new)
        self._has_verified = num_new > 1
        forward = self._forwards.launch(step.num_tokens, num_new, is_split=step.is_split)
        sample = None
        if not all(request.is_plain_greedy for request in batch):
            rows = [(req, row) for req, of_req in enumerate(drafts) for row in range(1 + len(of_req))]
            indices = [batch[req].next_index + row for req, row in rows]
            before = [drafts[req][:row] for req, row in rows] if any(drafts) else ()
            counts = self._counts.of([batch[req] for req, _ in rows], before)
            sample = partial(self._sample, batch, drafts, rows, indices, counts, forward, buffers)
        feeds_next = self._is_behind and (num_new == 1 or sample is None)
        finish = partial(self._forwards.follow, forward)
        launched = Launched(batch, buffers, most_drafts, num_new, feeds_next, sample, finish)
        if has_grammar(batch):
            buffers.mark()
        else:
            launched.draw()
        return launched

    def _fill(
        self,
        batch: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        most_drafts: Sequence[int],
        unread: Sequence[bool],
        num_new: int,
    ) -> StepBuffers:
        """The inputs of the next step."""
        buffers = self._buffers[self._num_launched % 2]
        self._num_launched += 1
        buffers.fill(batch, drafts, most_drafts, unread, num_new, self._spec.context_length)
        self._inputs.values.copy_(buffers.inputs.values, non_blocking=True)
        return buffers

    def _sample(
        self,
        batch: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[tuple[int, int]],
        indices: Sequence[int],
        counts: CountedRows | None,
        forward: Forward,
        buffers: StepBuffers,
    ) -> Sampled:
        """Put what the requests ask for in the likeliest tokens' place, at the positions that can count:
        ``rows``, of each the request's number in the batch and its own in the request. How many are drawn,
        and how, changes from step to step: so this is behind the graph and not in it."""
        device, num_new = forward.logits.device, forward.num_new
        where: slice | Tensor = slice(len(batch))
        if num_new > 1:
            where = to_device([req * num_new + row for req, row in rows], device)
        masks = None
        if has_grammar(batch):
            masks = masks_of(batch, drafts, buffers.masks).to(device, non_blocking=True)
        sampled = enqueue_sample(
            forward.logits[where],
            [batch[req].sampling for req, _ in rows],
            indices,
            self._spec.eos_token_ids,
            counts=counts,
            masks=masks,
        )
        forward.token_ids[where] = sampled.token_ids
        if num_new == 1:
            self._rows.tokens[self._inputs.req_rows[where]] = sampled.token_ids
        return sampled


@dataclass(frozen=True)
class StepResult:
    """Of one request."""

    token_ids: list[int]
    """What it goes on with: the accepted drafts, and one token more."""
    logprobs: list[TokenLogprob | None]
    """Of each of these tokens."""
    error: str
    """Empty where the kernels found nothing."""
    has_wrong_row: bool
    """Whether an item that was read for it is not what was written: ``token_ids`` may be anything."""
    counters: tuple[int, int, int]
    """Hits, misses and evictions of its row so far."""
    num_drafted: int
    """Drafts that were verified."""
    drafts: list[int]
    """What the draft layer guesses to follow; nothing after a step without drafts."""


@dataclass
class Launched:
    """A step that was enqueued."""

    batch: Sequence[Request]
    buffers: StepBuffers
    most_drafts: list[int]
    """Of each request, how many drafts it verifies at most: as long as it is in flight, nobody knows how many
    of them count."""
    num_new: int
    """As of ``NodeStep``."""
    feeds_next: bool
    """Whether the next step may be launched before this one's result was taken."""
    sample: Callable[[], Sampled] | None
    """Of the positions that can count. None when all tokens are just the likeliest: with drafts, only then
    nothing of the next step depends on what is read of this one."""
    finish: Callable[[], Tensor]
    """What follows from the draws; returns what is read."""
    sampled: Sampled | None = field(default=None, init=False)
    is_drawn: bool = field(default=False, init=False)

    @torch.inference_mode()
    def draw(self) -> None:
        """Enqueue the draws, and what follows from them, unless that was done at the launch, as it is where
        nobody has a grammar. Raises what sampling raises."""
        if self.is_drawn:
            return
        try:
            if self.sample is not None:
                self.sampled = self.sample()
            self.buffers.take(self.finish()[: len(self.batch)])
        finally:  # what was enqueued before an error is waited for, too
            self.buffers.mark()
        self.is_drawn = True

    def wait(self) -> None:
        """Until no memory of the step's requests is read or written by it any more. What ``draw`` is still to
        enqueue touches none, unless the step verifies drafts."""
        self.buffers.wait()

    def result(self) -> list[StepResult]:
        """Of each request. Waits. To be taken once, before the step after the next is launched."""
        if not self.is_drawn:  # what is in its memory until then is that of an earlier step
            raise RuntimeError("the step's tokens were not drawn")
        has_drafts = self.num_new > 1
        rows = self.buffers.read(len(self.batch), 5 + 2 * self.num_new if has_drafts else 5)
        if not has_drafts:
            rows = [[*row_results, 0, 0, token_id] for *row_results, token_id in rows]
        drawn = [row[6 : 7 + row[4]] for row in rows]
        logprobs: list[TokenLogprob | None] = [None] * sum(map(len, drawn))
        if self.sampled is not None:
            logprobs = self.sampled.read_logprobs([one for of_req in drawn for one in of_req])
        results: list[StepResult] = []
        first = 0
        for (flags, hits, misses, evictions, num_drafted, accepted, *ids), token_ids in zip(
            rows, drawn, strict=True
        ):
            count = 1 + accepted
            results.append(
                StepResult(
                    token_ids[:count],
                    logprobs[first : first + count],
                    str(HotBufferError(flags).name) if flags else "",
                    bool(flags & HotBufferError.WRONG_ROW),
                    (hits, misses, evictions),
                    num_drafted,
                    drafts=ids[self.num_new :],
                )
            )
            first += len(token_ids)
        return results
