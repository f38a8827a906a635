"""The workload of the swap-in benchmark: what every step selects, and the tables and pools it runs on.

The rule of the main table: one request selects TOP_K of CONTEXT positions; per step ``miss x
TOP_K`` randomly chosen ones of them are replaced by positions that were never selected before (once the
context is used up, by those selected longest ago), and the order is shuffled. Which of the positions that
were never selected comes next is not part of that rule, so there are two readings of it (FRESH):

- ``random``: a random permutation of the context, consumed in order.
- ``ascending``: the lowest first, which is kinder to host memory because a step's misses lie together.

With drafts a step runs several positions of a request, whose selections have much in common
(``draft_selections``).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.hot_state import HotBufferState
from kernels.swap_in import swap_in

TOP_K = 2048
CAPACITY = 4096
CONTEXT = 32768
NUM_STEPS = 30
NUM_WARM_STEPS = 3
"""Steps that run before the clock and the counters start."""
MISS_PERCENTS = (0, 2, 10, 30, 100)
FRESH = ("random", "ascending")
PAGE_SIZE = 64


def selections(batch: int, miss_percent: int, seed: int, fresh: str) -> Tensor:
    """int32 [NUM_STEPS, batch, TOP_K]; the newest position is never selected."""
    random = np.random.default_rng(seed)
    num_new = round(TOP_K * miss_percent / 100)
    steps = np.empty((NUM_STEPS, batch, TOP_K), dtype=np.int32)
    for req in range(batch):
        order = random.permutation(CONTEXT - 1).astype(np.int32)
        if fresh == "ascending":
            order[TOP_K:].sort()
        current = order[:TOP_K].copy()
        used = TOP_K
        steps[0, req] = current
        for step in range(1, NUM_STEPS):
            replaced = random.choice(TOP_K, num_new, replace=False)
            current[replaced] = order[(used + np.arange(num_new)) % len(order)]
            used += num_new
            random.shuffle(current)
            steps[step, req] = current
    return torch.from_numpy(steps)


def draft_selections(
    num_positions: int, batch: int, miss_percent: int, union_of_four: float, seed: int
) -> Tensor:
    """int32 [num_positions, batch, TOP_K]: what the tokens of a request select one after the other.

    ``union_of_four``: distinct positions that four neighbours select, over TOP_K. So each replaces a third of
    what that is above 1, ``miss x TOP_K`` of them by positions that were never selected before in random
    order (once the context is used up, by those selected longest ago), and the others by some that left three
    tokens earlier, which are hot in a buffer of any size that holds the union of five. The first three have
    none that left, and miss all that they replace. Raises ValueError when there is more to miss than that.
    """
    random = np.random.default_rng(seed)
    num_replaced = round(TOP_K * (union_of_four - 1) / 3)
    num_missed = round(TOP_K * miss_percent / 100)
    if num_missed > num_replaced:
        raise ValueError(
            f"{miss_percent}% misses: a token replaces {num_replaced} of {TOP_K} positions at a union of "
            f"{union_of_four}; give fewer misses or a larger union"
        )
    steps = np.empty((num_positions, batch, TOP_K), dtype=np.int32)
    for req in range(batch):
        order = random.permutation(CONTEXT - PAGE_SIZE).astype(np.int32)  # no new position among them
        current = order[:TOP_K].copy()
        used = TOP_K
        left: list[np.ndarray] = []
        steps[0, req] = current
        for step in range(1, num_positions):
            replaced = random.choice(TOP_K, num_replaced, replace=False)
            left.append(current[replaced])
            back = left[-4][: num_replaced - num_missed] if len(left) > 3 else order[:0]
            num_fresh = num_replaced - len(back)
            current[replaced] = np.concatenate((back, order[(used + np.arange(num_fresh)) % len(order)]))
            used += num_fresh
            random.shuffle(current)
            steps[step, req] = current
    return torch.from_numpy(steps)


class Cell:
    """Requests whose hot buffers are empty, over one host pool: tables, device pool and common arguments.

    ``host``: uint8 [num_layers, num_slots, item_bytes]; every layer has an indexer of its own. The rows of a
    request lie together, and those of the next one behind them. Raises ValueError when they do not fit.
    """

    def __init__(
        self, host: Tensor, batch: int, context: int, capacity: int, device: str, max_new: int = 1
    ) -> None:
        num_layers, num_slots, item_bytes = host.shape
        self.host = host
        # Zeroed, so that recycled memory cannot hold the bytes that a call should have brought.
        self.dev = torch.zeros((num_layers, batch * capacity, item_bytes), dtype=torch.uint8, device=device)
        pages_each = -(-context // PAGE_SIZE)
        self.host_slots_each = pages_each * PAGE_SIZE
        if batch * self.host_slots_each > num_slots:
            raise ValueError(f"{batch} requests of {context} tokens do not fit in {num_slots} host slots")
        self.state = HotBufferState.create(
            num_layers, batch, context, capacity, PAGE_SIZE, batch * self.host_slots_each, device, max_new
        )
        hot_slots = torch.arange(batch * capacity).view(batch, capacity)
        host_pages = torch.arange(batch * pages_each).view(batch, pages_each)
        for row in range(batch):
            self.state.assign_row(row, hot_slots[row], host_pages[row])
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.num_real = torch.full((1,), batch, dtype=torch.int32, device=device)
        self.batch = batch

    def prepare(self, selected: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """A call in which every request is padding: makes what a captured call cannot make."""
        self.num_real.zero_()
        self.call(selected, seq_lens, out)
        self.num_real.fill_(self.batch)

    def call(self, selected: Tensor, seq_lens: Tensor, out: Tensor, layer: int = 0) -> None:
        """One swap-in of ``selected``, int32 [batch * num_new, top_k], into ``out``."""
        swap_in(
            selected, seq_lens, self.rows, self.num_real, self.state,
            group=layer, layer=layer, k_host=self.host, k_dev=self.dev, out=out,
            num_new=selected.shape[0] // self.batch,
        )  # fmt: skip

    def verify(self, selected: Tensor, out: Tensor, layer: int = 0) -> None:
        """Raises RuntimeError unless every returned slot holds its token's bytes.

        Not for selections with the newest position, whose bytes a model would have written.
        """
        num_new = selected.shape[0] // self.batch
        for i in range(selected.shape[0]):
            row = i // num_new
            slots = selected[i].cpu().long() + row * self.host_slots_each
            if not torch.equal(self.dev[layer, out[i].long()].cpu(), self.host[layer, slots]):
                raise RuntimeError(f"layer {layer}, row {row}: a returned slot holds other bytes")

    def counted(self) -> list[int]:
        """Hits, misses and evictions of all rows so far."""
        counters: list[int] = self.state.counters.sum(0).tolist()
        return counters
