"""Runs a step in micro-batches, each in a stream of its own, so that copies of misses hide behind computing.

A large hisparse batch is bound by the copies of its misses over PCIe. While one micro-batch copies those of a
layer, the others compute theirs. ``StepHalves`` uses ``MicroBatches`` for the batch sizes for which
``split_choice.py`` has found it fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.side_stream import SideStream, wait_for
from hisparse_pd.decode_node.attention_parts import NUM_PARTS, TAKEN_SMS, MissCopies
from hisparse_pd.decode_node.device_step import DeviceStep, NewPositions
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.swap_in import plan_misses


class MicroBatches:
    """Runs forwards of batches in ``NUM_PARTS`` micro-batches. ``backup``: the stream in which all of them
    copy new items to the host (``DeviceStep``)."""

    def __init__(
        self,
        model: DsaModel,
        tables: RequestTables,
        kernels: AttentionKernels,
        copies: MissCopies,
        backup: SideStream,
    ) -> None:
        self._model = model
        self._tables = tables
        self._backup = backup
        self._copies = copies
        self._parts = [
            _Resources(own_kernels, miss_plan, SideStream(tables.device))
            for own_kernels, miss_plan in zip(
                kernels.split(NUM_PARTS, TAKEN_SMS), copies.miss_plans, strict=True
            )
        ]

    def forward(self, token_ids: Tensor, new: NewPositions) -> tuple[Tensor, Tensor | None]:
        """Run the model over ``token_ids`` (int64 [num_reqs]) at the ``new`` positions, one for each request.

        Returns logits, float32 [num_reqs, vocab_size], and if the model has a draft layer the hidden states
        that it takes, [num_reqs, hidden_size] (``DsaModel.forward_with_hidden``), else None. Requests go to
        the micro-batches by turns, and so does padding.
        """
        with matmuls_without(TAKEN_SMS):
            return self._forward(token_ids, new)

    def _forward(self, token_ids: Tensor, new: NewPositions) -> tuple[Tensor, Tensor | None]:
        # Prepare a forward for each micro-batch: a generator, which launches a layer a turn.
        num_parts = len(self._parts)
        planning = _OneAtATime(token_ids.device)
        forwards = []
        for number, part in enumerate(self._parts):
            with part.stream.behind_current():
                every = slice(number, None, num_parts)  # requests number, number + num_parts, …
                of_part = NewPositions(
                    new.seq_lens[every].contiguous(),
                    new.req_rows[every].contiguous(),
                    (new.num_real_reqs + (num_parts - 1 - number)) // num_parts,  # how many of them are real
                )
                step = _MicroBatchStep(self._tables, part, of_part, planning, self._copies, self._backup)
                forwards.append(
                    self._model.forward_by_layer(token_ids[every], step.positions, step, logit_rows=None)
                )
        # Launch a layer of each micro-batch in turn.
        spec = self._model.spec
        logits = token_ids.new_empty((len(token_ids), spec.vocab_size), dtype=torch.float32)
        hidden = None
        if spec.num_draft_layers:
            hidden = token_ids.new_empty((len(token_ids), spec.hidden_size), dtype=spec.dtype)
        running = list(range(num_parts))
        while running:
            for number in list(running):
                with self._parts[number].stream.use():
                    try:
                        next(forwards[number])
                    except StopIteration as end:  # its value is what the forward returns
                        logits[number::num_parts], hidden_of_part = end.value
                        if hidden is not None:
                            hidden[number::num_parts] = hidden_of_part
                        running.remove(number)
        for part in self._parts:
            part.stream.join()
        self._backup.join()
        return logits, hidden


@dataclass(frozen=True)
class _Resources:
    """The resources that a micro-batch has for itself."""

    kernels: AttentionKernels
    miss_plan: MissPlan
    stream: SideStream


@dataclass
class _OneAtATime:
    """Makes streams of ``device`` do some work one after the other, in the order of the calls of ``turn``."""

    device: torch.device
    _last: torch.cuda.Event | None = field(default=None, init=False)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Queue work that the current stream gets within this context behind that of all earlier turns."""
        if self.device.type != "cuda":  # where everything happens in order
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None:
            stream.wait_event(self._last)
        yield
        self._last = stream.record_event()


class _MicroBatchStep(DeviceStep):
    """The ``KvAccess`` of one micro-batch. Its swap-in is two launches, so that the copy, which only waits
    for PCIe, can run beside the others' kernels.

    Micro-batches do not plan at the same time (``planning``), since the launches share a workspace, and they
    do not copy at the same time (``copies``).
    """

    def __init__(
        self,
        tables: RequestTables,
        resources: _Resources,
        new: NewPositions,
        planning: _OneAtATime,
        copies: MissCopies,
        backup: SideStream,
    ) -> None:
        super().__init__(tables, resources.kernels, new, backup=backup)
        self._miss_plan = resources.miss_plan
        self._planning = planning
        self._copies = copies

    def page_in(self, layer: int, positions: Tensor) -> Tensor:
        """See ``DeviceStep.page_in``. An index group's first layer plans the group's misses; each layer
        copies those of the KV layers that have to be filled before it attends."""
        if self._is_first_of_group(layer):
            with self._planning.turn():
                self._device_slots = plan_misses(
                    positions, self._requests, group=self._hot_group(layer), miss_plan=self._miss_plan
                )
        copied = self._copies.begin(self._miss_plan, self._spec.kv_layers_filled_at[layer])
        wait_for(copied)
        return self.device_slots


@contextmanager
def matmuls_without(num_sms: int) -> Iterator[None]:
    """Keep ``num_sms`` multiprocessors free of matrix products that are launched meanwhile: the copies of
    another micro-batch's misses run there.

    torch warns in the log that this setting may go some day; without it steps are some 3% longer.
    """
    set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", lambda num_sms: None)
    set_carveout(num_sms)
    try:
        yield
    finally:
        set_carveout(None)
