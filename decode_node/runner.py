"""Runs the steps that ``StepLine`` launches: their inputs, device work, draws and results.

On a GPU a step may be launched before the host has read the last one. The device then takes the input tokens,
and after a step with drafts the lengths, from its own memory (``RowOutcomes``). The host reads tokens,
counters and error flags of a step in one copy. What a grammar lets a request draw depends on the last step's
tokens: the forward is launched before these are read, and the draws are enqueued afterwards. On a CPU each
step is read before the next.

A step without drafts and with many hisparse requests is split, so that copies hide behind computing
(``split_choice.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.sampling import Sampled
from hisparse_pd.decode_node.attention_parts import NUM_PARTS
from hisparse_pd.decode_node.forward_results import Forward
from hisparse_pd.decode_node.forwards import Forwards
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.row_counts import RowCounts
from hisparse_pd.decode_node.row_outcomes import RowOutcomes
from hisparse_pd.decode_node.step_buffers import StepBuffers, StepEntry, StepInputs
from hisparse_pd.decode_node.step_draws import StepDraws
from hisparse_pd.decode_node.step_masks import has_grammar
from hisparse_pd.decode_node.step_results import StepResult, num_columns, read_results
from hisparse_pd.engine.lockstep import NodeStep


def make_runner(settings: DecodeSettings, model: DsaModel, tables: RequestTables) -> DeviceRunner:
    """Make the runner for the device and the formats. Raises AttentionBackendError."""
    max_reqs = settings.max_running_requests
    is_gpu = tables.device.type == "cuda"
    kernels = AttentionKernels.choose(
        model,
        settings.attention_backend,
        scratch_tokens=max_reqs * tables.state.max_new,
        split_slots=settings.attention_split_tile_size,
    )
    return DeviceRunner(
        model,
        tables,
        kernels,
        max_reqs=max_reqs,
        graph_batches=settings.graph_batches if is_gpu else (),
        min_split_reqs=settings.micro_batch_min_bs if is_gpu else 0,
        is_behind=is_gpu,
    )


class DeviceRunner:
    """Runs steps in CUDA graphs of ``graph_batches`` requests; larger batches go without.

    A batch with at least ``min_split_reqs`` hisparse requests is split; with 0 none is. With None, the
    capture of graphs measures from how many requests on splitting is faster; pools have to be empty then.
    ``is_behind``: whether the next step may be launched before the last one is read.
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
        device, max_new, num_rows = tables.device, tables.state.max_new, tables.state.num_rows
        self._inputs = StepInputs.create(max_reqs, max_new, device)
        self._outcomes = RowOutcomes.create(num_rows, max_new, device)
        self._counts = RowCounts(num_rows, model.spec.vocab_size, device)
        can_measure = bool(graph_batches)  # the ways to split are timed as graphs

        self._forwards = Forwards(
            model,
            tables,
            kernels,
            self._inputs,
            self._outcomes,
            max_reqs=max_reqs,
            min_split_reqs=_first_split_size(min_split_reqs, max_reqs, can_measure=can_measure),
        )
        is_pinned = device.type == "cuda"
        self._buffers = [
            StepBuffers.create(max_reqs, max_new, model.spec.vocab_size, is_pinned, model.ranks)
            for _ in range(2)
        ]
        """Steps take them by turns: one may be read while the next is in flight."""
        self._num_sent = 0
        """Steps so far, which tells whose turn it is."""
        self._has_verified = False
        """Whether the last step verified drafts, so that its outcomes have lengths and drafts."""

        if graph_batches:
            self._send_inputs([], max_new)  # all requests are padding during the capture
            self._forwards.capture(sorted(graph_batches, reverse=True))

    @property
    def step_secs(self) -> Mapping[int, float]:
        """Seconds of steps that miss nothing, by their number of requests, as the capture of graphs has
        measured them; empty without graphs."""
        return self._forwards.step_secs

    def would_split(self, batch: Sequence[Request]) -> bool:
        """Return whether this rank wants to split the batch. If one rank does, all split (``Lockstep``)."""
        return sum(request.hot_capacity > 0 for request in batch) >= self._forwards.min_split_reqs

    @torch.inference_mode()  # as during the capture, whose tensors it writes to
    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        """Enqueue one step, which all requests of ``batch`` enter; another rank may have more of them.

        Its tokens are drawn, too, unless a request has a grammar: then call ``Launched.draw``. Raises what
        the model raises.
        """
        _check_slots(batch)
        self._counts.count(batch, self._outcomes.tokens)
        entries = self._make_entries(batch, step.num_new)
        buffers = self._send_inputs(entries, step.num_new)
        self._has_verified = step.num_new > 1
        forward = self._forwards.launch(step.num_tokens, step.num_new, is_split=step.is_split)
        draws = StepDraws.plan(entries, self._counts)
        launched = Launched(
            entries,
            buffers,
            step.num_new,
            feeds_next=self._is_behind and (step.num_new == 1 or draws is None),
            sample=None if draws is None else partial(self._sample, draws, forward, buffers.masks),
            finish=partial(self._forwards.follow, forward),
        )
        if has_grammar(batch):
            buffers.mark_end()  # until the draws are enqueued, ``wait`` waits for the forward
        else:
            launched.draw()
        for entry in entries:
            # Positions that it computes in any case, and those that it keeps only if drafts are accepted.
            entry.request.enter_step(entry.num_sure, entry.num_unsure)
        return launched

    def wait(self) -> None:
        """Wait for everything that was enqueued for steps, as after an error in ``launch``."""
        if self._tables.device.type == "cuda":
            torch.cuda.current_stream(self._tables.device).synchronize()

    def _make_entries(self, batch: Sequence[Request], num_new: int) -> list[StepEntry]:
        """Make each request's part in the step, with the drafts that it verifies.

        While a prompt goes on, its own tokens take the place of drafts. Where the last step is unread, the
        device has the drafts, and the entry only says how many of them may be verified.
        """
        entries = []
        for request in batch:
            most = self._tables.max_verifiable(request, num_new - 1) if num_new > 1 else 0
            # The prompt's next tokens, at most ``most + 1``: the first ``most`` take the place of drafts. One
            # more follows the last new position, so nothing is drawn there (``StepEntry`` has an example).
            if known := request.known_next(most):
                drafts = known[:most]
                entries.append(
                    StepEntry(request, drafts, most_drafts=len(drafts), is_unread=False, known=known)
                )
                continue
            is_unread = request.num_outputs_in_flight > 0 and self._has_verified
            # Drafts that the host has are older than an unread step: they are dropped, for the device's own.
            drafts = request.take_drafts(0 if is_unread else most)
            entries.append(StepEntry(request, drafts, most if is_unread else len(drafts), is_unread))
        return entries

    def _send_inputs(self, entries: Sequence[StepEntry], num_new: int) -> StepBuffers:
        """Enqueue the inputs of the next step. Returns its buffers."""
        buffers = self._buffers[self._num_sent % 2]
        self._num_sent += 1
        buffers.send(entries, num_new, self._spec.context_length, self._inputs)
        return buffers

    def _sample(self, draws: StepDraws, forward: Forward, masks: Tensor) -> Sampled:
        sampled = draws.enqueue(forward, masks, self._spec.eos_token_ids)
        # Without drafts, the forward has written the likeliest tokens as outcomes; those drawn replace them.
        # With drafts, ``Forwards.follow`` writes the outcomes.
        if forward.num_new == 1:
            num_reqs = len(draws.entries)
            self._outcomes.tokens[self._inputs.req_rows[:num_reqs]] = forward.token_ids[:num_reqs]
        return sampled


@dataclass
class Launched:
    """A step that was enqueued."""

    entries: Sequence[StepEntry]
    buffers: StepBuffers
    num_new: int
    """New positions of each request: 1 without drafts."""
    feeds_next: bool
    """Whether the next step may be launched before this one's result was taken: on a GPU, unless drafts are
    verified and a token may be another than the likeliest."""
    sample: Callable[[], Sampled] | None
    """Enqueues the draws; None where all tokens are just the likeliest."""
    finish: Callable[[], Tensor]
    """Enqueues what follows the draws (``Forwards.follow``): drafts are accepted, KV is backed up and the
    next drafts are made, or without drafts the draft layer's KV is written. Returns the tensor that the host
    reads."""
    sampled: Sampled | None = field(default=None, init=False)
    is_drawn: bool = field(default=False, init=False)

    @property
    def batch(self) -> list[Request]:
        return [entry.request for entry in self.entries]

    @property
    def most_drafts(self) -> list[int]:
        """The number of drafts that the step verifies of each request, at most. While it is in flight, nobody
        knows how many of them are accepted."""
        return [entry.most_drafts for entry in self.entries]

    def take_requests_out(self) -> None:
        """Take the requests out of the step. Called just before its tokens are read, or when it failed."""
        for entry in self.entries:
            entry.request.leave_step(entry.num_sure, entry.num_unsure)

    @torch.inference_mode()
    def draw(self) -> None:
        """Enqueue the draws, and what follows from them, unless that is done. Raises what sampling raises."""
        if self.is_drawn:
            return
        try:
            if self.sample is not None:
                self.sampled = self.sample()
            self.buffers.receive(self.finish()[: len(self.entries)])
        finally:  # what was enqueued before an error is waited for, too
            self.buffers.mark_end()
        self.is_drawn = True

    def wait(self) -> None:
        """Wait for all of the step that was enqueued up to its last ``mark_end``. After ``draw``, which marks
        the end even when it fails, the step then reads and writes no memory of its requests any more."""
        self.buffers.wait()

    def result(self) -> list[StepResult]:
        """Wait, and return what the step made of each request. To be called once, before the step after the
        next is launched."""
        if not self.is_drawn:  # its buffers still have the results of an earlier step
            raise RuntimeError("the step's tokens were not drawn")
        rows = self.buffers.read(len(self.entries), num_columns(self.num_new))
        num_known = [len(entry.known) for entry in self.entries]
        return read_results(rows, self.num_new, num_known, self.sampled)


def _first_split_size(min_split_reqs: int | None, max_reqs: int, *, can_measure: bool) -> int | None:
    """Return the number of hisparse requests from which on batches are split, at least one for each part;
    one more than a batch can have if none is to be split. None: it is to be measured."""
    if min_split_reqs is None and can_measure:
        return None
    return max(min_split_reqs, NUM_PARTS) if min_split_reqs else max_reqs + 1


def _check_slots(batch: Sequence[Request]) -> None:
    """Raise RuntimeError unless all requests have slots for their next tokens."""
    for request in batch:
        if not request.has_slots_for_next:
            raise RuntimeError(
                f"room {request.room}: no slot for position {request.next_seq_len - 1}, it has "
                f"{request.reserved_tokens}"
            )
