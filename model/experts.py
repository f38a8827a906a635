"""The routed experts of one MoE layer, spread over devices.

They are nearly all of a large model's weights, and need nothing of a request but one hidden state a token.
So the device that has the attention, the pools and everything else sends the tokens of a layer to the devices
that hold its experts, and adds up what comes back. All in one process: kernels and copies between devices are
enqueued in streams, and a CUDA graph holds them as it holds the rest of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from kernels.block_fp8 import DTYPE as FP8
from kernels.block_fp8 import scales_shape
from kernels.expert_routing import ExpertMatrices, Routing, rounds
from kernels.experts import run_experts


class ExpertShard:
    """Consecutive experts of one layer on one device; the weights are for the loader to fill in."""

    def __init__(
        self, experts: range, hidden_size: int, inner_size: int, dtype: torch.dtype, queue: DeviceQueue
    ) -> None:
        """``dtype``: of the weights; ``kernels.block_fp8.DTYPE`` has scales."""
        self.experts = experts
        self._queue = queue
        self.gate_up = _empty((len(experts), 2, inner_size, hidden_size), dtype, queue.device)
        self.down = _empty((len(experts), 1, hidden_size, inner_size), dtype, queue.device)

    def take(self, hidden: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """What ``compute`` needs, on its device."""
        with self._queue.after_current_stream():
            return hidden.to(self._queue.device, non_blocking=True), routing.to(self._queue.device)

    def compute(self, hidden: Tensor, routing: Routing) -> Tensor:
        with self._queue.use():
            return run_experts(hidden, routing, self.gate_up, self.down, self.experts.start)

    def give(self, result: Tensor, device: torch.device) -> Tensor:
        """``result`` on ``device``, where what follows in the current stream finds it."""
        with self._queue.use():
            return result.to(device, non_blocking=True)  # which makes ``device``'s current stream wait


class DeviceQueue:
    """A stream of a GPU that is not ``home``, where the tokens are, and the memory of what runs there.

    On ``home``, and on CPUs, all is in order without. The memory is the queue's own and stays so: CUDA graphs
    that were captured still write to it when this process returns unused memory to the driver, as it does
    before each capture.
    """

    def __init__(self, device: torch.device, home: torch.device) -> None:
        self.device = device
        self._home = home
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and device != home:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._memory = torch.cuda.MemPool()

    @contextmanager
    def use(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(torch.cuda.use_mem_pool(self._memory, self.device))
            yield

    @contextmanager
    def after_current_stream(self) -> Iterator[None]:
        """``use``, behind what the current stream of ``home`` has."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._home))
        with self.use():
            yield


class RoutedExperts(torch.nn.Module):
    """In the place of transformers' module of the same job, with the same call."""

    def __init__(self, shards: Sequence[ExpertShard]) -> None:
        super().__init__()
        self.shards = tuple(shards)
        self._num_experts = sum(len(shard.experts) for shard in shards)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        ``hidden``: [num_tokens, hidden_size]; ``expert_ids``, ``weights``: [num_tokens, top_k].
        """
        is_rounded = rounds(hidden, self.shards[0].gate_up)
        routing = Routing.plan(expert_ids, weights, self._num_experts, is_rounded=is_rounded)
        # In three rounds: a copy back holds up the current stream, and with it copies to other devices.
        taken = [shard.take(hidden, routing) for shard in self.shards]
        results = [shard.compute(*given) for shard, given in zip(self.shards, taken, strict=True)]
        back = [shard.give(result, hidden.device) for shard, result in zip(self.shards, results, strict=True)]
        return back[0] if len(back) == 1 else torch.stack(back).sum(dim=0)


def split_evenly(num_experts: int, num_devices: int) -> list[range]:
    """The experts of each device."""
    bounds = [num_experts * device // num_devices for device in range(num_devices + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _empty(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> ExpertMatrices:
    values = torch.empty(shape, dtype=dtype, device=device)
    if dtype != FP8:
        return ExpertMatrices(values, None)
    scales = torch.empty((*shape[:2], *scales_shape(*shape[2:])), dtype=torch.float32, device=device)
    return ExpertMatrices(values, scales)
