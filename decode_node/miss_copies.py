"""Copies of misses beside computing: a stream of their own, and what a batch that is split copies by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from decode_node.hot_buffers import HotBuffers
from kernels.miss_plan import MissPlan
from kernels.swap_in import replay_misses

NUM_PARTS: Final = 2
"""Of a batch that is split. Four were as fast at 128 requests, and slower at 64."""
COPY_BLOCKS: Final = 12
"""Multiprocessors that copies take from the computing; so few fill PCIe."""
TAKEN_SMS: Final = 16
"""Multiprocessors that computing does without: kernels that fill a GPU would begin twice otherwise."""


class MissCopies:
    """Copies for steps of up to ``max_reqs`` requests in parts: one behind the other, so that PCIe is one
    part's alone, which so has its misses soonest."""

    def __init__(self, hot_buffers: HotBuffers, max_reqs: int) -> None:
        self._memory = hot_buffers.memory
        self._state = hot_buffers.state
        device, most_reqs = hot_buffers.device, -(-max_reqs // NUM_PARTS)
        self.miss_plans = [
            MissPlan.create(most_reqs, hot_buffers.spec.index_topk, device) for _ in range(NUM_PARTS)
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
