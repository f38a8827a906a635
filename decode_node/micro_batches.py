"""One step in micro-batches, each in a stream of its own: while one copies its misses of a layer over PCIe,
by which a large hisparse batch is bound, the others compute theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.decode_node.attention_parts import NUM_PARTS, TAKEN_SMS, MissCopies
from hisparse_pd.decode_node.device_step import DeviceStep, MicroBatchOrder
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.kernels.miss_plan import MissPlan


class MicroBatches:
    """The forward of a batch in ``NUM_PARTS`` micro-batches. ``backup_stream``: as of ``DeviceStep``."""

    def __init__(
        self,
        model: DsaModel,
        tables: RequestTables,
        kernels: AttentionKernels,
        copies: MissCopies,
        backup_stream: torch.cuda.Stream | None,
    ) -> None:
        self._model = model
        self._tables = tables
        self._backup_stream = backup_stream
        self._copies = copies
        device = tables.device
        self._parts = [
            _MicroBatch(
                own_kernels,
                miss_plan,
                torch.cuda.Stream(device) if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
            )
            for own_kernels, miss_plan in zip(
                kernels.split(NUM_PARTS, TAKEN_SMS), copies.miss_plans, strict=True
            )
        ]

    def forward(
        self, token_ids: Tensor, seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, float32 [num_reqs, vocab_size], and with a draft layer hidden states, as of
        ``forward_with_hidden``. Every second request goes to the second part, and so does padding.

        Arguments as of ``DeviceStep``.
        """
        with matmuls_without(TAKEN_SMS):
            return self._forward(token_ids, seq_lens, req_rows, num_real_reqs)

    def _forward(
        self, token_ids: Tensor, seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        num_parts = len(self._parts)
        order = MicroBatchOrder(token_ids.device, self._copies)
        forwards = []
        for number, part in enumerate(self._parts):
            with part.after_current_stream():
                of_part = slice(number, None, num_parts)
                step = DeviceStep(
                    self._tables,
                    part.kernels,
                    seq_lens[of_part].contiguous(),
                    req_rows[of_part].contiguous(),
                    (num_real_reqs + (num_parts - 1 - number)) // num_parts,
                    self._backup_stream,
                    miss_plan=part.miss_plan,
                    order=order,
                )
                forwards.append(self._model.forward_by_layer(token_ids[of_part], step.positions, step, None))
        spec = self._model.spec
        logits = token_ids.new_empty((len(token_ids), spec.vocab_size), dtype=torch.float32)
        hidden = None
        if spec.num_draft_layers:
            hidden = token_ids.new_empty((len(token_ids), spec.hidden_size), dtype=spec.dtype)
        running = list(range(num_parts))
        while running:
            for number in list(running):
                with torch.cuda.stream(self._parts[number].stream):
                    try:
                        next(forwards[number])
                    except StopIteration as end:
                        logits[number::num_parts], of_part = end.value
                        if hidden is not None:
                            hidden[number::num_parts] = of_part
                        running.remove(number)
        for part in self._parts:
            part.join_current_stream()
        step.finish()  # of any: their backups share a stream
        return logits, hidden


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
