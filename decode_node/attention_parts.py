"""Selection, swap-in and attention of a large hisparse batch in parts, within each layer.

A large batch is bound by PCIe, which carries nothing while the indexer selects and attention computes. With
the batch in parts it does: the misses of one part cross it while the indexer selects for the next, whose
misses cross it while attention reads the part in front. Products and experts, which read weights, run over
the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_node.miss_copies import NUM_PARTS, TAKEN_SMS, MissCopies
from hisparse_pd.model.attention_kernels import AttentionKernels
from kernels.attention import AttentionBackend
from kernels.attention_backends import attention_beside
from kernels.hot_state import StepRequests
from kernels.miss_plan import MissPlan
from kernels.swap_in import plan_misses


class AttentionParts:
    """What the steps of a node share whose attention runs in parts."""

    def __init__(self, kernels: AttentionKernels, copies: MissCopies) -> None:
        self._beside = attention_beside(kernels.attention, TAKEN_SMS)
        self._alone = kernels.attention
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
