"""The CUDA swap-in against the CPU reference: seeded histories, step by step from the same tables.

After every step the tables as they were before it go through the reference on the CPU. Hits, misses,
evictions, flags and the places served must agree; which entry a miss takes is free among equal stamps, so
bytes are compared through the returned slots (I3), and evictions by the age of what went and what stayed.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.checks import KernelArgumentError
from kernels.hot_state import EVICTIONS, HITS, MISSES, HotBufferError, HotBufferState
from kernels.swap_in import MissPlan, backup_newest, newest_slots, preload, replay_misses, swap_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

POISON = 0xA5
GUARD = 64
"""Poisoned ints around ``out``."""


def on_host(state: HotBufferState) -> HotBufferState:
    """A copy of the tables on the CPU."""
    return HotBufferState(
        **{
            f.name: value.cpu().clone() if isinstance(value := getattr(state, f.name), Tensor) else value
            for f in dataclasses.fields(state)
        }
    )


@dataclass
class Request:
    seq_len: int
    capacity: int
    truth: list[Tensor]
    """Per pool, uint8 [num_layers, max_context, item_bytes]."""
    host_slots: Tensor
    hot_slots: list[int]
    pages: list[int]
    has_stepped: bool = False
    """Since its capacity last changed."""
    last: Tensor | None = None
    """Last selection."""


class History:
    """Random admissions, steps, growth and releases on one GPU, with every step checked."""

    def __init__(
        self,
        seed: int,
        item_bytes: tuple[int, ...],
        *,
        top_k: int = 24,
        num_rows: int = 6,
        max_context: int = 300,
        capacities: tuple[int, ...] = (25, 31, 48, 90),
        num_layers: int = 2,
        lens_dtype: torch.dtype = torch.int32,
        rows_dtype: torch.dtype = torch.int64,
        churns: tuple[float, ...] = (0.0, 0.02, 0.1, 0.5, 1.0),
        has_dense: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.top_k, self.max_context, self.num_layers = top_k, max_context, num_layers
        self.capacities, self.churns, self.has_dense = capacities, churns, has_dense
        self.lens_dtype, self.rows_dtype = lens_dtype, rows_dtype
        self.page_size = 16
        max_capacity = max(capacities)
        self.state = HotBufferState.create(1, num_rows, max_context, max_capacity, self.page_size, "cuda")
        num_host = num_rows * max_context + 3
        self.num_pages = num_rows * -(-max(max_capacity, max_context) // self.page_size)
        self.item_bytes = item_bytes

        def pool(num_slots: int, num_bytes: int) -> Tensor:
            return torch.full((num_layers, num_slots, num_bytes), POISON, dtype=torch.uint8)

        self.host = [pool(num_host, n).pin_memory() for n in item_bytes]
        self.dev = [pool(self.num_pages * self.page_size, n).cuda() for n in item_bytes]
        self.expected_host = [host.clone() for host in self.host]
        self.is_owned = torch.zeros(self.num_pages * self.page_size, dtype=torch.bool)
        self.free_host = list(range(num_host))
        self.free_pages = list(range(self.num_pages))
        self.random.shuffle(self.free_pages)
        self.requests: dict[int, Request] = {}
        self.free_rows = list(range(num_rows))
        self.plan = MissPlan.create(num_rows + 2, top_k, "cuda")

    def pools(self) -> dict[str, Tensor]:
        names = ("k", "v")[: len(self.host)]
        return {f"{n}_host": h for n, h in zip(names, self.host, strict=True)} | {
            f"{n}_dev": d for n, d in zip(names, self.dev, strict=True)
        }

    def admit(self) -> None:
        if not self.free_rows:
            return
        row = self.free_rows.pop(self.random.randrange(len(self.free_rows)))
        is_dense = self.has_dense and self.random.random() < 0.25
        capacity = 0 if is_dense else self.random.choice(self.capacities)
        prompt = self.random.choice(
            [self.random.randint(1, self.max_context - 1), self.random.randint(1, max(self.capacities))]
        )
        prompt = min(prompt, self.max_context - 40) if self.max_context > 41 else prompt
        truth = [
            torch.randint(
                0, 256, (self.num_layers, self.max_context, n), dtype=torch.uint8, generator=self.generator
            )
            for n in self.item_bytes
        ]
        span = self.max_context if is_dense else max(self.capacities)
        pages = [self.free_pages.pop() for _ in range(-(-span // self.page_size))]
        slots = [page * self.page_size + i for page in pages for i in range(self.page_size)]
        self.is_owned[slots] = True
        if is_dense:
            request = Request(prompt, 0, truth, torch.empty(0, dtype=torch.int64), slots, pages)
            self.state.assign_dense_row(row, torch.tensor(pages))
            for dev, items in zip(self.dev, truth, strict=True):
                dev[:, torch.tensor(slots[:prompt]).cuda()] = items[:, :prompt].cuda()
        else:
            self.random.shuffle(slots)
            self.random.shuffle(self.free_host)
            host_slots = torch.tensor([self.free_host.pop() for _ in range(self.max_context)])
            request = Request(prompt, capacity, truth, host_slots, slots, pages)
            for host, expected, items in zip(self.host, self.expected_host, truth, strict=True):
                host[:, host_slots[:prompt]] = items[:, :prompt]
                expected[:, host_slots[:prompt]] = items[:, :prompt]
            self.state.assign_row(row, capacity, torch.tensor(slots[:capacity]), host_slots)
            if self.random.random() < 0.6:
                self.warm_up(row, request)
        self.requests[row] = request

    def warm_up(self, row: int, request: Request) -> None:
        """Preload on a side stream; the same on the CPU must fill the tables alike."""
        hint = torch.tensor(
            [self.random.randrange(-1, request.seq_len) for _ in range(self.top_k)], dtype=torch.int32
        )
        twin = on_host(self.state)
        expected, _ = reference.place(twin, 0, row, request.seq_len, hint)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            num_warm = preload(
                self.state, group=0, layers=list(range(self.num_layers)), row=row,
                num_tokens=request.seq_len, positions=hint, **self.pools(),
            )  # fmt: skip
        torch.cuda.current_stream().wait_stream(stream)
        assert num_warm == len(expected)
        for name in ("position_to_hot", "hot_to_position", "stamps"):
            assert torch.equal(getattr(self.state, name).cpu(), getattr(twin, name)), name

    def release(self) -> None:
        if not self.requests:
            return
        row = self.random.choice(list(self.requests))
        request = self.requests.pop(row)
        self.state.reset_row(row)
        self.free_rows.append(row)
        self.free_host += request.host_slots.tolist()
        self.free_pages += request.pages
        slots = torch.tensor(request.hot_slots)
        self.is_owned[slots] = False
        for dev in self.dev:
            dev[:, slots.cuda()] = POISON
        if request.capacity:
            for host, expected in zip(self.host, self.expected_host, strict=True):
                host[:, request.host_slots] = POISON
                expected[:, request.host_slots] = POISON

    def grow(self) -> None:
        """Give a request that outgrew its buffer a larger one."""
        for row, request in self.requests.items():
            larger = [c for c in self.capacities if request.capacity < c < request.seq_len]
            if request.capacity and larger and self.random.random() < 0.5:
                request.capacity = self.random.choice(larger)
                slots = torch.tensor(request.hot_slots[: request.capacity], dtype=torch.int32)
                self.state.hot_slots[row, : request.capacity] = slots.cuda()
                self.state.capacity[row] = request.capacity
                request.has_stepped = False

    def shrink(self) -> None:
        """Take entries from the end of a buffer, after forgetting what they held."""
        for row, request in self.requests.items():
            smaller = [c for c in self.capacities if c < request.capacity and c < request.seq_len]
            if smaller and request.seq_len > request.capacity and self.random.random() < 0.3:
                capacity = self.random.choice(smaller)
                lost = self.state.hot_to_position[0, row, capacity:]
                self.state.position_to_hot[0, row, lost[lost >= 0].long()] = -1
                self.state.hot_to_position[0, row, capacity:] = -1
                self.state.stamps[0, row, capacity:] = -1
                self.state.clock_hand[0, row] = 0
                self.state.capacity[row] = capacity
                request.capacity = capacity
                request.has_stepped = False

    def selection(self, request: Request) -> Tensor:
        seq_len, top_k = request.seq_len, self.top_k
        limit = top_k if request.capacity == 0 else min(top_k, request.capacity - 1)
        num_wanted = min(seq_len, limit)
        kept = request.last
        churn = self.random.choice(self.churns)
        fresh = torch.randperm(seq_len, generator=self.generator)[:num_wanted]
        if kept is not None:
            num_kept = int(len(kept) * (1 - churn))
            kept = kept[torch.randperm(len(kept), generator=self.generator)[:num_kept]]
            fresh = torch.cat([kept, fresh[~torch.isin(fresh, kept)]])[:num_wanted]
        if self.random.random() < 0.5:
            fresh[-1] = seq_len - 1  # may be a duplicate
        request.last = fresh
        row = torch.full((top_k,), -1)
        row[: len(fresh)] = fresh
        if len(fresh) < top_k and self.random.random() < 0.5:
            num_duplicates = self.random.randint(0, top_k - len(fresh))
            row[len(fresh) : len(fresh) + num_duplicates] = fresh[0]
        return row[torch.randperm(top_k, generator=self.generator)].to(torch.int32)

    def step(self) -> None:
        batch = [(r, q) for r, q in self.requests.items() if q.seq_len < self.max_context]
        self.random.shuffle(batch)
        for _, request in batch:
            request.seq_len += 1
            request.has_stepped = True
        num_padding = self.random.randint(0, 2)
        if not batch and not num_padding:
            return
        rows = torch.tensor([r for r, _ in batch] + [0] * num_padding, dtype=self.rows_dtype)
        seq_lens = torch.tensor([q.seq_len for _, q in batch] + [0] * num_padding, dtype=self.lens_dtype)
        num_real = torch.tensor([len(batch)], dtype=torch.int32)
        selected = torch.stack(
            [self.selection(q) for _, q in batch] + [torch.zeros(self.top_k, dtype=torch.int32)] * num_padding
        )
        rows_dev, lens_dev, real_dev, selected_dev = (
            rows.cuda(),
            seq_lens.cuda(),
            num_real.cuda(),
            selected.cuda(),
        )
        twin = on_host(self.state)

        slots = newest_slots(lens_dev, rows_dev, real_dev, self.state)
        expected_slots = torch.empty(len(rows), dtype=torch.int32)
        reference.newest_slots(seq_lens, rows, num_real, twin, expected_slots)
        assert torch.equal(slots.cpu(), expected_slots)
        for (_, request), slot in zip(batch, slots.tolist(), strict=False):
            for dev, items in zip(self.dev, request.truth, strict=True):
                dev[:, slot] = items[:, request.seq_len - 1].cuda()

        guarded = torch.full((selected.numel() + 2 * GUARD,), -7, dtype=torch.int32, device="cuda")
        out = guarded[GUARD:-GUARD].view(selected.shape)
        swap_in(
            selected_dev, lens_dev, rows_dev, real_dev, self.state,
            group=0, layer=0, out=out, miss_plan=self.plan, **self.pools(),
        )  # fmt: skip
        for layer in range(1, self.num_layers):
            replay_misses(self.plan, layer, **self.pools())
        assert (guarded[:GUARD] == -7).all()
        assert (guarded[-GUARD:] == -7).all()
        self.compare(twin, batch, selected, seq_lens, rows, num_real, out.cpu())

        backup_newest(lens_dev, rows_dev, real_dev, self.state, **self.pools())
        torch.cuda.synchronize()
        for _, request in batch:
            if request.capacity:
                slot = request.host_slots[request.seq_len - 1]
                for expected, items in zip(self.expected_host, request.truth, strict=True):
                    expected[:, slot] = items[:, request.seq_len - 1]

    def compare(
        self,
        twin: HotBufferState,
        batch: list[tuple[int, Request]],
        selected: Tensor,
        seq_lens: Tensor,
        rows: Tensor,
        num_real: Tensor,
        out: Tensor,
    ) -> None:
        before = on_host(twin)
        expected = torch.empty_like(selected)
        src_host_slots, _ = reference.resolve(selected, seq_lens, rows, num_real, twin, 0, expected)
        after = on_host(self.state)
        after.check_consistency({r: q.seq_len for r, q in self.requests.items() if q.has_stepped})
        for name in ("counters", "error_flags", "step"):
            assert torch.equal(getattr(after, name), getattr(twin, name)), name
        assert int(self.plan.num_misses) == len(src_host_slots)
        assert torch.equal(out < 0, expected < 0)
        planned = self.plan.src_host_slots[: len(src_host_slots)].cpu().sort().values
        assert torch.equal(planned, torch.from_numpy(src_host_slots).sort().values)
        for i, (row, request) in enumerate(batch):
            is_valid = out[i] >= 0
            positions = selected[i][is_valid].long()
            for dev, items in zip(self.dev, request.truth, strict=True):
                got = dev[:, out[i][is_valid].long().cuda()].cpu()
                assert torch.equal(got, items[:, positions]), f"I3: wrong bytes in row {row}"
            if request.capacity and request.seq_len > request.capacity:
                self.check_ages(before, after, row, request)

    def check_ages(self, before: HotBufferState, after: HotBufferState, row: int, request: Request) -> None:
        """No entry that went was used later than one that stayed unused."""
        movable = slice(0, request.capacity - 1)
        was, now = before.hot_to_position[0, row, movable], after.hot_to_position[0, row, movable]
        old_stamps, step = before.stamps[0, row, movable], int(after.step[0, row])
        gone = old_stamps[was != now]
        stayed = old_stamps[after.stamps[0, row, movable] < step]
        if gone.numel() and stayed.numel():
            assert int(gone.max()) <= int(stayed.min()), "a younger entry went before an older one"

    def finish(self) -> None:
        """Memory that no request owns is as it was, and the host holds exactly what it should."""
        for host, expected in zip(self.host, self.expected_host, strict=True):
            assert torch.equal(host, expected)
        for dev in self.dev:
            assert (dev.cpu()[:, ~self.is_owned] == POISON).all()

    def run(self, num_steps: int) -> None:
        for _ in range(3):
            self.admit()
        for _ in range(num_steps):
            match self.random.random():
                case x if x < 0.08:
                    self.admit()
                case x if x < 0.12:
                    self.release()
                case x if x < 0.16:
                    self.grow()
                case x if x < 0.19:
                    self.shrink()
                case _:
                    pass
            if all(q.seq_len >= self.max_context for q in self.requests.values()):
                self.release()
                self.admit()
            self.step()
        self.finish()


@pytest.mark.parametrize("item_bytes", [1, 7, 8, 15, 24, 576, 640, 656, 1152, 1153])
def test_history_of_each_item_size(item_bytes: int) -> None:
    History(item_bytes, (item_bytes,)).run(220)


@pytest.mark.parametrize("item_bytes", [(656, 7), (24, 1152)])
@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
def test_history_of_dtypes_and_two_pools(
    item_bytes: tuple[int, ...], lens_dtype: torch.dtype, rows_dtype: torch.dtype
) -> None:
    History(7, item_bytes, lens_dtype=lens_dtype, rows_dtype=rows_dtype).run(60)


@pytest.mark.parametrize(
    ("top_k", "capacities", "max_context"),
    [
        (1, (2,), 60),
        (3, (4, 5), 100),
        (31, (32,), 100),
        (2048, (2049, 3072, 6144), 9000),
        (2500, (2501, 4097), 7000),
        (4096, (4097, 8192), 12000),
    ],
)
def test_history_of_each_size(top_k: int, capacities: tuple[int, ...], max_context: int) -> None:
    num_steps = 60 if top_k > 1000 else 250
    History(
        top_k, (16,), top_k=top_k, capacities=capacities, max_context=max_context, num_rows=4, num_layers=1
    ).run(num_steps)


def test_sanitized_history() -> None:
    """Small enough for compute-sanitizer, all paths taken."""
    History(3, (656, 7), num_rows=3, max_context=120, capacities=(25, 40)).run(25)
    History(4, (1152,), top_k=1500, num_rows=2, max_context=5000, capacities=(1501,), num_layers=1).run(4)


class Single:
    """One hisparse request of top_k 8 in a buffer of 9."""

    def __init__(
        self, num_rows: int = 1, max_context: int = 64, capacity: int = 9, item_bytes: int = 32
    ) -> None:
        self.state = HotBufferState.create(1, num_rows, max_context, capacity, 16, "cuda")
        self.host = torch.randint(0, 256, (1, max_context, item_bytes), dtype=torch.uint8).pin_memory()
        self.dev = torch.zeros((1, capacity, item_bytes), dtype=torch.uint8, device="cuda")
        self.state.assign_row(0, capacity, torch.arange(capacity), torch.arange(max_context))
        self.rows = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.one = torch.ones(1, dtype=torch.int32, device="cuda")

    def __call__(self, seq_len: int, selected: list[int]) -> list[int]:
        slots: list[int] = swap_in(
            torch.tensor([selected], dtype=torch.int32, device="cuda"),
            torch.tensor([seq_len], dtype=torch.int32, device="cuda"), self.rows, self.one, self.state,
            group=0, layer=0, k_host=self.host, k_dev=self.dev,
        )[0].tolist()  # fmt: skip
        self.state.check_consistency()
        return slots

    def flags(self) -> int:
        return int(self.state.error_flags[0])

    def counters(self) -> list[int]:
        result: list[int] = self.state.counters[0].tolist()
        return result


def test_more_misses_than_entries_are_flagged_and_leave_a_consistent_state() -> None:
    one = Single()
    slots = one(40, list(range(12)))
    assert sum(slot >= 0 for slot in slots) == 8
    assert one.flags() == HotBufferError.TOO_MANY_MISSES
    assert one.counters() == [0, 12, 0]
    served = [p for p, slot in enumerate(slots) if slot >= 0]
    assert torch.equal(one.dev[0, [s for s in slots if s >= 0]].cpu(), one.host[0, served])
    assert sorted(one(41, list(range(20, 28)))) == list(range(8))
    assert one.counters()[EVICTIONS] == 9


def test_bad_positions_and_missing_host_slots_are_flagged() -> None:
    one = Single()
    assert one(5, [5, -3, 0, -1])[:2] == [-1, -1]
    assert one.flags() == HotBufferError.BAD_POSITION
    one.state.host_slots[0, 30] = -1
    assert one(40, [30, 31, 30])[::2] == [-1, -1]
    assert one.flags() == HotBufferError.BAD_POSITION | HotBufferError.NO_HOST_SLOT
    assert one.counters()[MISSES] == 3


def test_newest_in_place_of_a_selected_former_newest() -> None:
    one = Single()
    one.dev[0, 8] = 77
    assert one(20, [19, 3])[0] == 8
    slots = one(21, [19, 20, 19, 3])
    assert slots[1] == 8
    assert slots[0] == slots[2] != 8
    assert torch.equal(one.dev[0, slots[0]].cpu(), one.host[0, 19])
    assert one.counters() == [3, 2, 1]
    assert one.counters()[HITS] == 3


def test_empty_calls() -> None:
    one = Single()
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    shape = torch.empty((0, 4), dtype=torch.int32, device="cuda")
    pools = {"k_host": one.host, "k_dev": one.dev}
    assert swap_in(shape, none, none, one.one, one.state, group=0, layer=0, **pools).shape == (0, 4)
    backup_newest(none, none, one.one, one.state, **pools)
    assert newest_slots(none, none, one.one, one.state).shape == (0,)


def test_pageable_host_memory_is_refused() -> None:
    one = Single()
    one.host = torch.zeros((1, 64, 32), dtype=torch.uint8)
    with pytest.raises(KernelArgumentError, match="k_host: expected pinned host memory"):
        one(5, [1])


def test_graph_replay_with_changing_inputs_matches_the_reference() -> None:
    """One captured call, replayed with other selections, lengths, rows and padding."""
    num_rows, top_k, capacity, max_context, item_bytes = 40, 64, 80, 600, 48
    generator = torch.Generator().manual_seed(5)
    state = HotBufferState.create(1, num_rows, max_context, capacity, 16, "cuda")
    host = torch.randint(
        0, 256, (1, num_rows * max_context, item_bytes), dtype=torch.uint8, generator=generator
    ).pin_memory()
    dev = torch.zeros((1, num_rows * capacity, item_bytes), dtype=torch.uint8, device="cuda")
    for row in range(num_rows):
        state.assign_row(
            row, capacity, torch.arange(capacity) + row * capacity,
            torch.arange(max_context) + row * max_context,
        )  # fmt: skip
    selected = torch.full((num_rows, top_k), -1, dtype=torch.int32, device="cuda")
    seq_lens = torch.ones(num_rows, dtype=torch.int32, device="cuda")
    rows = torch.arange(num_rows, device="cuda")
    num_real = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(selected)

    def call() -> None:
        swap_in(selected, seq_lens, rows, num_real, state, group=0, layer=0, k_host=host, k_dev=dev, out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(200):
        real = int(torch.randint(1, num_rows + 1, (1,), generator=generator))
        order = torch.randperm(num_rows, generator=generator)
        positions = torch.stack(
            [torch.randperm(299, generator=generator)[:top_k] for _ in range(num_rows)]
        ).to(torch.int32)
        twin = on_host(state)
        selected.copy_(positions)
        # Lengths only grow in a row, so that the newest position is never an old one.
        lens = torch.full((num_rows,), 350 + step, dtype=torch.int32)
        seq_lens.copy_(lens)
        rows.copy_(order)
        num_real.fill_(real)
        graph.replay()
        expected = torch.empty_like(positions)
        reference.resolve(positions, lens, order, torch.tensor([real], dtype=torch.int32), twin, 0, expected)
        got = out.cpu()
        assert torch.equal(got < 0, expected < 0)
        assert torch.equal(state.counters.cpu(), twin.counters)
        for i in range(real):
            items = host[0, positions[i].long() + order[i] * max_context]
            assert torch.equal(dev[0, got[i].long().cuda()].cpu(), items)
    state.check_consistency()


def test_capture_of_a_fresh_state_is_refused() -> None:
    one = Single()
    other = Single()
    other(5, [1])
    selected = torch.empty((1, 1), dtype=torch.int32, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            one.one.clone()  # an empty graph warns
            swap_in(
                selected, one.rows, one.rows, one.one, one.state,
                group=0, layer=0, k_host=one.host, k_dev=one.dev,
            )  # fmt: skip

    with pytest.raises(KernelArgumentError, match="expected a call before the graph capture"):
        capture()


def test_offsets_beyond_two_gigabytes() -> None:
    num_slots, item_bytes = 1_900_000, 1152
    state = HotBufferState.create(1, 1, 64, 9, 16, "cuda")
    host = torch.empty((1, num_slots, item_bytes), dtype=torch.uint8, pin_memory=True)
    dev = torch.empty((1, num_slots, item_bytes), dtype=torch.uint8, device="cuda")
    host_slots = torch.arange(num_slots - 64, num_slots)
    host[0, host_slots] = torch.randint(0, 256, (64, item_bytes), dtype=torch.uint8)
    state.assign_row(0, 9, torch.arange(num_slots - 9, num_slots), host_slots)
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    positions = [3, 60, 17, 33]
    slots = swap_in(
        torch.tensor([positions], dtype=torch.int32, device="cuda"), one * 63, one * 0, one, state,
        group=0, layer=0, k_host=host, k_dev=dev,
    )  # fmt: skip
    assert torch.equal(dev[0, slots[0].long()].cpu(), host[0, host_slots[positions]])


def test_hit_rate_is_that_of_exact_lru() -> None:
    """Over a drifting selection, free-running beside the reference."""
    top_k, capacity, max_context, num_steps = 256, 384, 8000, 150
    generator = torch.Generator().manual_seed(9)
    rates = {}
    draws = [
        ((torch.randn(top_k, generator=generator) * 150 + 1000 + 12 * step).long() % 7000).unique()
        for step in range(num_steps)
    ]
    for device in ("cpu", "cuda"):
        state = HotBufferState.create(1, 1, max_context, capacity, 16, device)
        state.assign_row(0, capacity, torch.arange(capacity), torch.arange(max_context))
        host = torch.zeros((1, max_context, 1), dtype=torch.uint8)
        host = host.pin_memory() if device == "cuda" else host
        dev = torch.zeros((1, capacity, 1), dtype=torch.uint8, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        for step, draw in enumerate(draws):
            selected = torch.full((1, top_k), -1, dtype=torch.int32)
            selected[0, : len(draw)] = draw
            swap_in(
                selected.to(device), one * (7001 + step), one * 0, one, state,
                group=0, layer=0, k_host=host, k_dev=dev,
            )  # fmt: skip
        hits, misses, _ = state.counters[0].tolist()
        rates[device] = hits / (hits + misses)
    assert rates["cuda"] == pytest.approx(rates["cpu"], abs=0.01)
