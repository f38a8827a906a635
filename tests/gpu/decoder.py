"""Decode steps of one state, captured once a batch size and replayed with other inputs, each one checked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.hot_state import HotBufferState
from kernels.miss_plan import MissPlan
from kernels.swap_in import backup_newest, newest_slots, replay_misses, swap_in
from tests.gpu.pools import POISON
from tests.gpu.support import DEVICE, check_step, on_host

NUM_LAYERS = 2


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """``call`` as a graph, after one call that makes what a capture may not make."""
    call()
    if DEVICE == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Decoder:
    """One state with a request in every row, and a graph of a decode step for every batch size."""

    def __init__(
        self, seed: int, batch_sizes: tuple[int, ...], *, top_k: int, capacity: int, max_context: int = 400
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_rows = num_rows = max(batch_sizes)
        self.top_k, self.capacity, self.max_context = top_k, capacity, max_context
        pages_each = -(-max_context // 16)
        self.slots_each = slots_each = pages_each * 16
        num_host_slots = num_rows * slots_each
        self.state = HotBufferState.create(1, num_rows, max_context, capacity, 16, num_host_slots, DEVICE)
        self.truth = torch.randint(
            0, 256, (NUM_LAYERS, num_host_slots, 48), dtype=torch.uint8, generator=self.generator
        )
        """Of position p of a row at ``row * slots_each + p``, its host and its lookup slot too."""
        self.host = torch.full_like(self.truth, POISON, pin_memory=DEVICE == "cuda")
        self.scratch = num_rows * capacity
        self.dev = torch.full((NUM_LAYERS, self.scratch + 1, 48), POISON, dtype=torch.uint8, device=DEVICE)
        self.seq_len_of = torch.randint(1, max_context // 2, (num_rows,), generator=self.generator)
        for row, seq_len in enumerate(self.seq_len_of.tolist()):
            known = slice(row * slots_each, row * slots_each + seq_len)
            self.host[:, known] = self.truth[:, known]
            pages = torch.arange(pages_each) + row * pages_each
            self.state.assign_row(row, torch.arange(capacity) + row * capacity, pages, pages)
        self.selected = torch.full((num_rows, top_k), -1, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.ones(num_rows, dtype=torch.int32, device=DEVICE)
        self.rows = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
        self.num_real = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.newest = torch.zeros((NUM_LAYERS, num_rows, 48), dtype=torch.uint8, device=DEVICE)
        self.slots = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
        self.out = torch.zeros((num_rows, top_k), dtype=torch.int32, device=DEVICE)
        self.plan = MissPlan.create(num_rows, top_k, DEVICE)
        self.replay = {size: captured(lambda size=size: self.step(size)) for size in batch_sizes}

    def step(self, size: int) -> None:
        pools = {"k_host": self.host, "k_dev": self.dev}
        requests = (self.seq_lens[:size], self.rows[:size], self.num_real)
        slots = newest_slots(*requests, self.state, out=self.slots[:size])
        self.dev[:, slots.masked_fill(slots < 0, self.scratch).long()] = self.newest[:, :size]
        swap_in(
            self.selected[:size], *requests, self.state,
            group=0, layer=0, out=self.out[:size], miss_plan=self.plan, **pools,
        )  # fmt: skip
        replay_misses(self.plan, 1, **pools)
        backup_newest(*requests, self.state, **pools)

    def prepare(self, size: int) -> None:
        """Other inputs: some rows, each one token longer, half of whose selection is what is hot."""
        running = torch.nonzero(self.seq_len_of < self.max_context).flatten()
        running = running[torch.randperm(len(running), generator=self.generator)]
        rows = running[: int(torch.randint(0, size + 1, (1,), generator=self.generator))]
        self.seq_len_of[rows] += 1
        self.before = on_host(self.state)
        selected = torch.full((size, self.top_k), -1, dtype=torch.int32)
        for i, row in enumerate(rows.tolist()):
            hot = self.before.hot_to_lookup[0, row] - row * self.slots_each
            hot = hot[hot >= 0][: self.top_k // 2]
            drawn = torch.randint(int(self.seq_len_of[row]), (self.top_k,), generator=self.generator)
            drawn[: len(hot)] = hot
            selected[i] = drawn[torch.randperm(self.top_k, generator=self.generator)]
        lens = torch.ones(size, dtype=torch.int32)
        lens[: len(rows)] = self.seq_len_of[rows].int()
        req_rows = torch.zeros(size, dtype=torch.int64)
        req_rows[: len(rows)] = rows
        self.inputs = (selected, lens, req_rows, torch.tensor([len(rows)], dtype=torch.int32))
        self.selected[:size].copy_(selected)
        self.seq_lens[:size].copy_(lens)
        self.rows[:size].copy_(req_rows)
        self.num_real.copy_(self.inputs[3])
        self.newest_of = rows * self.slots_each + self.seq_len_of[rows] - 1
        self.newest[:, : len(rows)] = self.truth[:, self.newest_of].to(DEVICE)

    def check(self) -> None:
        selected, _, rows, num_real = self.inputs
        out = self.out[: len(selected)].cpu()
        check_step(self.before, self.state, *self.inputs, out, miss_plan=self.plan)
        is_placed = out >= 0
        host_slots = (rows[:, None] * self.slots_each + selected)[is_placed]
        assert torch.equal(self.dev[:, out[is_placed].to(DEVICE).long()].cpu(), self.truth[:, host_slots])
        assert is_placed[: int(num_real)].any(dim=1).all()
        assert torch.equal(self.host[:, self.newest_of], self.truth[:, self.newest_of]), "I4"

    def finish(self) -> None:
        self.state.check_consistency()
        known = torch.arange(self.slots_each) < self.seq_len_of[:, None]
        assert torch.equal(self.host[:, known.flatten()], self.truth[:, known.flatten()])
        assert (self.host[:, ~known.flatten()] == POISON).all()
