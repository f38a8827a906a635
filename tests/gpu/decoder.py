"""Decode steps of one state, captured once for each batch size and number of new positions, and replayed with
other inputs; each replay is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import backup_newest, newest_slots, replay_misses, swap_in
from tests.gpu.support import DEVICE, POISON, check_step, on_host
from tests.unit.kernels.table_rules import check_consistency

NUM_LAYERS = 2


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Capture ``call`` in a graph, after one call that compiles and allocates. Returns the replay."""
    call()
    if DEVICE == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def draw(generator: torch.Generator, values: tuple[int, ...]) -> int:
    return values[int(torch.randint(len(values), (1,), generator=generator))]


class Decoder:
    """One state with a request in every row, and a graph of a decode step for every batch size and number of
    new positions."""

    def __init__(
        self,
        seed: int,
        batch_sizes: tuple[int, ...],
        *,
        top_k: int,
        capacity: int,
        max_context: int = 400,
        max_new: int = 1,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_rows = num_rows = max(batch_sizes)
        self.top_k, self.capacity, self.max_context = top_k, capacity, max_context
        pages_each = -(-max_context // 16)
        self.slots_each = slots_each = pages_each * 16
        num_host_slots = num_rows * slots_each
        num_hot_pages = -(-capacity // 16)
        self.scratch = num_rows * num_hot_pages * 16
        self.state = HotBufferState.create(
            1, num_rows, max_context, capacity, 16, num_host_slots, self.scratch, DEVICE, max_new
        )
        self.truth = torch.randint(
            0, 256, (NUM_LAYERS, num_host_slots, 48), dtype=torch.uint8, generator=self.generator
        )
        """Position p of a row is at ``row * slots_each + p``, its host slot and its lookup slot."""
        self.host = torch.full_like(self.truth, POISON, pin_memory=DEVICE == "cuda")
        self.dev = torch.full((NUM_LAYERS, self.scratch + 1, 48), POISON, dtype=torch.uint8, device=DEVICE)
        self.seq_len_of = torch.randint(1, max_context // 2, (num_rows,), generator=self.generator)
        for row, seq_len in enumerate(self.seq_len_of.tolist()):
            known = slice(row * slots_each, row * slots_each + seq_len)
            self.host[:, known] = self.truth[:, known]
            pages = torch.arange(pages_each) + row * pages_each
            hot_pages = torch.arange(num_hot_pages).flip(0) + row * num_hot_pages
            self.state.assign_row(row, capacity, hot_pages, pages, pages)
        num_slots = num_rows * max_new
        self.selected = torch.full((num_slots, top_k), -1, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.full((num_rows,), max_new, dtype=torch.int32, device=DEVICE)
        self.rows = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
        self.num_real = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.newest = torch.zeros((NUM_LAYERS, num_slots, 48), dtype=torch.uint8, device=DEVICE)
        self.num_newest = torch.ones(num_rows, dtype=torch.int32, device=DEVICE)
        self.out = torch.zeros((num_slots, top_k), dtype=torch.int32, device=DEVICE)
        self.plan = MissPlan.create(num_slots, top_k, DEVICE)
        self.graphs = {
            (size, num_new): captured(partial(self.step, size, num_new))
            for size in batch_sizes
            for num_new in range(1, max_new + 1)
        }

    def step(self, size: int, num_new: int) -> None:
        pools: dict[str, Any] = {"k_host": self.host, "k_dev": self.dev}
        num_slots = size * num_new
        requests = self.requests(size, num_new)
        slots = newest_slots(requests)
        self.dev[:, slots.masked_fill(slots < 0, self.scratch).long()] = self.newest[:, :num_slots]
        swap_in(
            self.selected[:num_slots], requests,
            group=0, layer=0, out=self.out[:num_slots], miss_plan=self.plan, **pools,
        )  # fmt: skip
        replay_misses(self.plan, 1, **pools)
        num_newest = self.num_newest[:size]
        accepted = replace(requests, seq_lens=requests.seq_lens - num_new + num_newest, num_new=1)
        backup_newest(accepted, **pools, num_newest=num_newest)

    def requests(self, size: int, num_new: int) -> StepRequests:
        return StepRequests(self.state, self.seq_lens[:size], self.rows[:size], self.num_real, num_new)

    def prepare(self, size: int, num_new: int = 1) -> None:
        """Draw new inputs: some rows, each some tokens longer, with selections of which half is hot. Any
        number of the new positions is accepted; the others get other bytes in the next step."""
        self.num_new = num_new
        running = torch.nonzero(self.seq_len_of + num_new <= self.max_context).flatten()
        running = running[torch.randperm(len(running), generator=self.generator)]
        rows = running[: int(torch.randint(0, size + 1, (1,), generator=self.generator))]
        num_real = len(rows)
        self.before = on_host(self.state)
        first_new = self.seq_len_of[rows]
        selected = torch.full((size, num_new, self.top_k), -1, dtype=torch.int32)
        for i, row in enumerate(rows.tolist()):
            hot = self.before.hot_to_lookup[0, self.before.entry_slots(row)] - row * self.slots_each
            hot = hot[(hot >= 0) & (hot < first_new[i])]
            hot = hot[: self.top_k // 2]
            cold = torch.randint(int(first_new[i]) + 1, (self.top_k,), generator=self.generator)
            for new in range(num_new):
                drawn = cold.clone()
                drawn[: len(hot)] = hot
                drawn[-1] = first_new[i] + new
                selected[i, new] = drawn[torch.randperm(self.top_k, generator=self.generator)]
        lens = torch.full((size,), num_new, dtype=torch.int32)
        lens[:num_real] = first_new.int() + num_new
        req_rows = torch.zeros(size, dtype=torch.int64)
        req_rows[:num_real] = rows
        num_newest = torch.randint(1, num_new + 1, (size,), dtype=torch.int32, generator=self.generator)
        num_slots = size * num_new
        self.inputs = (selected.flatten(0, 1), lens, req_rows, torch.tensor([num_real], dtype=torch.int32))
        self.selected[:num_slots].copy_(self.inputs[0])
        self.seq_lens[:size].copy_(lens)
        self.rows[:size].copy_(req_rows)
        self.num_real.copy_(self.inputs[3])
        self.num_newest[:size].copy_(num_newest)
        slots = (rows * self.slots_each + first_new)[:, None] + torch.arange(num_new)
        shape = (NUM_LAYERS, num_real * num_new, 48)
        self.truth[:, slots.flatten()] = torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=self.generator
        )
        self.newest[:, : num_real * num_new] = self.truth[:, slots.flatten()].to(DEVICE)
        self.newest_of = slots[torch.arange(num_new) < num_newest[:num_real, None]]
        self.seq_len_of[rows] += num_newest[:num_real]

    def replay(self, size: int) -> None:
        self.graphs[size, self.num_new]()

    def check(self) -> None:
        selected, _, rows, num_real = self.inputs
        out = self.out[: len(selected)].cpu()
        requests = self.requests(len(rows), self.num_new)
        check_step(self.before, selected, requests, out, miss_plan=self.plan)
        is_placed = out >= 0
        row_of = rows.repeat_interleave(self.num_new)
        host_slots = (row_of[:, None] * self.slots_each + selected)[is_placed]
        assert torch.equal(self.dev[:, out[is_placed].to(DEVICE).long()].cpu(), self.truth[:, host_slots])
        assert is_placed[: int(num_real) * self.num_new].any(dim=1).all()
        assert torch.equal(self.host[:, self.newest_of], self.truth[:, self.newest_of]), "I4"

    def finish(self) -> None:
        check_consistency(self.state)
        known = torch.arange(self.slots_each) < self.seq_len_of[:, None]
        assert torch.equal(self.host[:, known.flatten()], self.truth[:, known.flatten()])
        assert (self.host[:, ~known.flatten()] == POISON).all()
