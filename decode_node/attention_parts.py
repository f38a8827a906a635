"""Selection, swap-in and attention of a large hisparse batch in parts of its requests, within each layer.

A large batch is bound by PCIe. In parts, the misses of one part cross it while the indexer selects for the
next part, and while attention reads the part before. Products and experts, which read weights, run over the
whole batch. ``StepHalves`` makes one ``AttentionParts`` for the engine, and a ``StepInParts`` for each step
that is split like this; the model calls its ``select`` once for each index group and its ``attend`` in each
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.side_stream import SideStream, wait_for
from hisparse_pd.decode_node.device_step import DeviceStep, NewPositions
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.kernels.attention import AttentionBackend
from hisparse_pd.kernels.attention_backends import attention_beside
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.paged_indexer import IndexerScratch
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import plan_misses, replay_misses

NUM_PARTS: Final = 2
"""Parts of a batch that is split. Four were as fast at 128 requests, and slower at 64."""
COPY_BLOCKS: Final = 12
"""Multiprocessors that copies use: no more are needed to fill PCIe."""
TAKEN_SMS: Final = 16
"""Multiprocessors that attention and the indexer leave to copies. With blocks for the whole GPU, those that
find no place beside a copy would run after the others, and both would take twice as long."""


class MissCopies:
    """Copies of misses for steps of up to ``max_reqs`` requests in parts, or in micro-batches.

    The copies run one after the other: each has PCIe to itself and is over as early as it can be.
    """

    def __init__(self, tables: RequestTables, max_reqs: int) -> None:
        self._memory = tables.memory
        self._state = tables.state
        device, max_part_reqs = tables.device, -(-max_reqs // NUM_PARTS)
        self.miss_plans = [
            MissPlan.create(max_part_reqs, tables.spec.index_topk, device) for _ in range(NUM_PARTS)
        ]
        """One for each part."""
        # Its kernels go before others: a copy that waits for a multiprocessor leaves PCIe idle.
        self._stream = SideStream(device, priority=-1)

    def begin(self, miss_plan: MissPlan, kv_layers: Sequence[int]) -> torch.cuda.Event | None:
        """Begin to copy a part's misses in ``kv_layers``. Returns the end of the copy, for ``wait_for``.

        The copy waits for the current stream's work so far, and runs beside its later work.
        """
        k_host, k_dev = self._memory.k_host, self._memory.k_dev
        with self._stream.behind_current():
            for kv_layer in kv_layers:
                replay_misses(miss_plan, kv_layer, k_host, k_dev, max_blocks=COPY_BLOCKS, state=self._state)
        return self._stream.record()


class AttentionParts:
    """The kernels, memory and copies that all steps in parts share."""

    def __init__(self, kernels: AttentionKernels, copies: MissCopies) -> None:
        self._attention_beside_copies = attention_beside(kernels.step_attention, TAKEN_SMS)
        self._attention_alone = kernels.step_attention
        self._scratch = kernels.indexer_scratch
        self._copies = copies

    def split(self, requests: StepRequests) -> list[Part]:
        """Divide a step into parts of requests that are next to each other; padding is last."""
        num_reqs, device = requests.num_reqs, requests.state.device
        size = -(-num_reqs // NUM_PARTS)
        starts = torch.arange(0, num_reqs, size, dtype=torch.int32, device=device)
        num_real = (requests.num_real_reqs - starts).clamp(0, size)
        parts = []
        for number, start in enumerate(range(0, num_reqs, size)):
            rows = slice(start, min(start + size, num_reqs))
            part_requests = StepRequests(
                requests.state,
                requests.seq_lens[rows],
                requests.req_rows[rows],
                num_real[number : number + 1],
            )
            # Parts attend in the order of their copies. When the last part attends, its copy, the last of the
            # layer, is over: it needs to leave no multiprocessors to copies.
            attention = self._attention_alone if rows.stop == num_reqs else self._attention_beside_copies
            # Nothing is copied yet when the first part selects.
            scratch = self._scratch.beside(TAKEN_SMS) if self._scratch and number else self._scratch
            miss_plan = self._copies.miss_plans[number]
            parts.append(Part(rows, part_requests, scratch, attention, miss_plan, self._copies))
        return parts


class Part:
    """Some requests of a step. ``rows``: their rows in the step, one for each request. ``scratch``: the
    memory in which the indexer scores their positions; None on a CPU."""

    def __init__(
        self,
        rows: slice,
        requests: StepRequests,
        scratch: IndexerScratch | None,
        attention: AttentionBackend,
        miss_plan: MissPlan,
        copies: MissCopies,
    ) -> None:
        self.rows = rows
        self.requests = requests
        self.scratch = scratch
        self._attention = attention
        self._miss_plan = miss_plan
        self._copies = copies
        self._device_slots: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        """The end of the latest copy."""

    def page_in(self, hot_group: int, positions: Tensor, kv_layers: Sequence[int]) -> None:
        """Find entries for ``positions``, int32 [requests of the part, index_topk], and begin to copy the
        misses in ``kv_layers``."""
        self._device_slots = plan_misses(positions, self.requests, group=hot_group, miss_plan=self._miss_plan)
        self.copy_misses(kv_layers)

    def copy_misses(self, kv_layers: Sequence[int]) -> None:
        """Begin to copy the misses that ``page_in`` found, in ``kv_layers``."""
        if kv_layers:
            self._copied = self._copies.begin(self._miss_plan, kv_layers)

    def attend(self, q: Tensor, items: Tensor, scale: float) -> Tensor:
        """Return the attention of the part's queries to ``items``, a layer of the pool, once all copies that
        were begun are over."""
        assert self._device_slots is not None
        wait_for(self._copied)
        return self._attention.attend(q, items, self._device_slots, scale)


class StepInParts(DeviceStep):
    """The ``KvAccess`` of a step without drafts whose selection, swap-in and attention go by ``parts``."""

    def __init__(
        self,
        tables: RequestTables,
        kernels: AttentionKernels,
        new: NewPositions,
        parts: AttentionParts,
        *,
        backup: SideStream | None = None,
    ) -> None:
        super().__init__(tables, kernels, new, backup=backup)
        self._parts = parts.split(self._requests)

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        layer, selected = self._spec.layers_of_group[group][0], []
        for part in self._parts:
            num_real = part.requests.num_real_reqs
            positions = self._select_rows(group, q_index, weights, part.rows, num_real, part.scratch)
            part.page_in(self._hot_group(layer), positions, self._spec.kv_layers_filled_at[layer])
            selected.append(positions)
        return torch.cat(selected)

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        # All layers of an index group have the misses that ``select`` found. ``select`` has also begun the
        # copies that the first layer needs; each later layer begins its own here.
        if not self._is_first_of_group(layer):
            for part in self._parts:
                part.copy_misses(self._spec.kv_layers_filled_at[layer])
        out = q.new_empty((*q.shape[:2], self._spec.kv_lora_rank))
        for part in self._parts:
            out[part.rows] = part.attend(q[part.rows], self._items(layer), scale)
        return out
