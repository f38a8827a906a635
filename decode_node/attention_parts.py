"""Selection, swap-in and attention of a large hisparse batch in parts, within each layer.

A large batch is bound by PCIe. In parts, the misses of one cross it while the indexer selects for the next,
and while attention reads the part in front. Products and experts, which read weights, run over the whole
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.kernels.attention import AttentionBackend
from hisparse_pd.kernels.attention_backends import attention_beside
from hisparse_pd.kernels.hot_state import StepRequests
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.swap_in import plan_misses, replay_misses

NUM_PARTS: Final = 2
"""Of a batch that is split. Four were as fast at 128 requests, and slower at 64."""
COPY_BLOCKS: Final = 12
"""Multiprocessors that copies take from the computing; so few fill PCIe."""
TAKEN_SMS: Final = 16
"""Multiprocessors that computing does without: kernels that fill a GPU would begin twice otherwise."""


class MissCopies:
    """Copies for steps of up to ``max_reqs`` requests in parts: one behind the other, so that PCIe is one
    part's alone, which so has its misses soonest."""

    def __init__(self, tables: RequestTables, max_reqs: int) -> None:
        self._memory = tables.memory
        self._state = tables.state
        device, most_reqs = tables.device, -(-max_reqs // NUM_PARTS)
        self.miss_plans = [
            MissPlan.create(most_reqs, tables.spec.index_topk, device) for _ in range(NUM_PARTS)
        ]
        """One for each part."""
        # Copies come first: one that waits for a multiprocessor leaves PCIe idle.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, miss_plan: MissPlan, kv_layers: Sequence[int]) -> torch.cuda.Event | None:
        """Copy a part's misses in these layers, behind what the current stream has and beside what it gets.
        Returns the end, for ``wait``."""
        k_host, k_dev = self._memory.k_host, self._memory.k_dev
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for kv_layer in kv_layers:
                replay_misses(miss_plan, kv_layer, k_host, k_dev, max_blocks=COPY_BLOCKS, state=self._state)
        return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def wait(end: torch.cuda.Event | None) -> None:
        """Order what the current stream gets behind a copy."""
        if end is not None:
            torch.cuda.current_stream().wait_event(end)


class AttentionParts:
    """What the steps of a node share whose attention runs in parts."""

    def __init__(self, kernels: AttentionKernels, copies: MissCopies) -> None:
        self._beside = attention_beside(kernels.step_attention, TAKEN_SMS)
        self._alone = kernels.step_attention
        self._copies = copies

    def of(self, requests: StepRequests) -> list[Part]:
        """Parts of a step of ``requests``, each of requests that are next to each other; padding is last."""
        num_reqs, device = requests.num_reqs, requests.state.device
        size = -(-num_reqs // NUM_PARTS)
        before = torch.arange(0, num_reqs, size, dtype=torch.int32, device=device)
        num_real = (requests.num_real_reqs - before).clamp(0, size)
        parts = []
        for number, start in enumerate(range(0, num_reqs, size)):
            rows = slice(start, min(start + size, num_reqs))
            of_part = StepRequests(
                requests.state,
                requests.seq_lens[rows],
                requests.req_rows[rows],
                num_real[number : number + 1],
            )
            attention = self._alone if rows.stop == num_reqs else self._beside
            parts.append(Part(rows, of_part, attention, self._copies.miss_plans[number], self._copies))
        return parts


class Part:
    """Some requests of a step. ``rows``: theirs of the step's, which has one for each request."""

    def __init__(
        self,
        rows: slice,
        requests: StepRequests,
        attention: AttentionBackend,
        miss_plan: MissPlan,
        copies: MissCopies,
    ) -> None:
        self.rows = rows
        self.requests = requests
        self._attention = attention
        self._miss_plan = miss_plan
        self._copies = copies
        self._device_slots: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def plan(self, hot_group: int, positions: Tensor) -> None:
        """Find entries for ``positions``, int32 [requests of the part, index_topk]."""
        self._device_slots = plan_misses(positions, self.requests, group=hot_group, miss_plan=self._miss_plan)

    def begin_copy(self, kv_layers: Sequence[int]) -> None:
        """Copy what was planned, in these layers of the hot group, beside what the current stream gets from
        now on."""
        if kv_layers:
            self._copied = self._copies.begin(self._miss_plan, kv_layers)

    def attend(self, q: Tensor, layer_pool: Tensor, scale: float) -> Tensor:
        """Attention of the part's queries, when its misses of the layer are there."""
        assert self._device_slots is not None
        self._copies.wait(self._copied)
        return self._attention.attend(q, layer_pool, self._device_slots, scale)
