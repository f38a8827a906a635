"""Hot buffers that change their size on a GPU: tables and bytes of the CPU, no wait, and tokens of requests
whose hot buffers stay as they are. ``test_swap_in_cuda.py`` has random histories."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.kernels.hot_entries import enter_hot_buffer, resize_hot_buffer
from hisparse_pd.kernels.hot_state import ABSENT, HotBufferState
from hisparse_pd.kernels.swap_in import RowStart
from tests.gpu.step_bench import bench_of, write_model
from tests.gpu.support import DEVICE, POISON, assert_same_tables, needs_gpu, no_waiting
from tests.unit.kernels.table_rules import check_consistency

PAGE, NUM_TOKENS, LARGEST = 64, 20_000, 24_576
LAYERS_OF_GROUP = ((0, 1), (2,), (3,))
NUM_ROUNDS, NUM_STEPS = 7, 3
"""Entries of a hot buffer in which the 3,000 tokens of a request fit."""

pytestmark = needs_gpu


class Row:
    """A row with a warm hot buffer, on the GPU (0) and on the CPU (1)."""

    def __init__(self, item_bytes: int, capacity: int) -> None:
        self.generator = torch.Generator().manual_seed(item_bytes + capacity)
        num_layers, num_pages = sum(map(len, LAYERS_OF_GROUP)), -(-NUM_TOKENS // PAGE)
        shape = num_layers, num_pages * PAGE, item_bytes
        host = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)
        self.host = host.pin_memory() if DEVICE == "cuda" else host
        self.hot_pages = torch.randperm(LARGEST // PAGE, generator=self.generator)
        self.slots = (self.hot_pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.pages = torch.randperm(num_pages, generator=self.generator)
        self.capacity = capacity
        hints = [torch.randperm(NUM_TOKENS, generator=self.generator).int().numpy() for _ in LAYERS_OF_GROUP]
        self.states, self.devs = [], []
        for device in (DEVICE, "cpu"):
            state = HotBufferState.create(
                len(LAYERS_OF_GROUP), 2, NUM_TOKENS, LARGEST, PAGE, num_pages * PAGE, LARGEST, device
            )
            dev = torch.full((num_layers, LARGEST, item_bytes), POISON, dtype=torch.uint8, device=device)
            RowStart(
                state, 1, capacity=capacity, hot_pages=self.pages_of(capacity), host_pages=self.pages,
                lookup_pages=self.pages.flip(0), index_pages=self.pages, num_tokens=NUM_TOKENS, hints=hints,
                layers_of_group=LAYERS_OF_GROUP, k_host=self.host, k_dev=dev,
            ).launch_slice(None)  # fmt: skip
            self.states.append(state)
            self.devs.append(dev)

    def pages_of(self, capacity: int) -> Tensor:
        """Return the device pages of a hot buffer of ``capacity`` entries."""
        return self.hot_pages[: -(-capacity // PAGE)]

    def use(self) -> None:
        """Let the entries have been used in random steps."""
        is_used = self.states[1].hot_to_lookup != ABSENT
        stamps = torch.randint(0, 90, is_used.shape, dtype=torch.int32, generator=self.generator)
        for state in self.states:
            state.stamps.copy_(torch.where(is_used, stamps, ABSENT))
            state.step[:, 1] = 90

    def resize(self, number: int, capacity: int) -> None:
        resize_hot_buffer(
            self.states[number], 1, num_before=self.capacity, capacity=capacity,
            hot_pages=self.pages_of(capacity), num_tokens=NUM_TOKENS, layers_of_group=LAYERS_OF_GROUP,
            k_dev=self.devs[number],
        )  # fmt: skip

    def check(self) -> int:
        """Check that both devices have the same, and the right items. Returns how many positions are hot in
        each group."""
        assert_same_tables(*self.states)
        assert torch.equal(self.devs[0].cpu(), self.devs[1])
        state = self.states[1]
        check_consistency(state)
        num_hot = set()
        for group, layers in enumerate(LAYERS_OF_GROUP):
            hot_to_lookup = state.hot_to_lookup[group, self.slots].long()
            entries = torch.nonzero(hot_to_lookup != ABSENT).flatten()
            lookup_slots = hot_to_lookup[entries]
            host_pages = self.pages[self.pages.flip(0).argsort()[lookup_slots // PAGE]]
            host_slots = host_pages * PAGE + lookup_slots % PAGE
            for layer in layers:
                assert torch.equal(self.devs[1][layer, self.slots[entries]], self.host[layer, host_slots])
            num_hot.add(len(entries))
        (num_in_each,) = num_hot
        return num_in_each


@pytest.mark.I3
@pytest.mark.parametrize("item_bytes", [656, 1152, 7])
def test_what_stays_hot_moves_on_the_device_without_a_wait(item_bytes: int) -> None:
    """It shrinks, grows, and then holds all positions, each at the hot_index of its own number."""
    row = Row(item_bytes, 16_384)
    assert row.check() == 16_383
    num_hot = 16_383
    for capacity in (4096, 2049, 2050, 16_384, 9000, LARGEST, 12_000):
        row.use()
        with no_waiting():
            row.resize(0, capacity)
        row.resize(1, capacity)
        row.capacity = capacity
        num_hot = min(num_hot, capacity - 1)
        assert row.check() == num_hot
        for dev in row.devs:  # what it has given up is another's
            dev[:, row.slots[capacity:].to(dev.device)] = POISON


@pytest.mark.I3
@pytest.mark.parametrize(("capacity", "first"), [(4096, 15_936), (2049, 17_984), (LARGEST, 0)])
def test_pages_become_a_hot_buffer_without_a_wait(capacity: int, first: int) -> None:
    row = Row(16, 4096)
    for state, dev in zip(row.states, row.devs, strict=True):
        state.drop_hot_buffer(1)
        state.set_pages(1, 0, torch.arange(NUM_TOKENS // PAGE))
        positions = torch.arange(first, NUM_TOKENS)
        host_slots = row.pages[positions // PAGE] * PAGE + positions % PAGE
        dev.fill_(POISON)
        dev[:, row.slots[: len(positions)].to(dev.device)] = row.host[:, host_slots].to(dev.device)
        with no_waiting():
            enter_hot_buffer(
                state, 1, capacity=capacity, hot_pages=row.pages_of(capacity), first_position=first,
                num_tokens=NUM_TOKENS,
            )  # fmt: skip
    row.capacity = capacity
    assert row.check() == NUM_TOKENS - first
    assert (row.states[1].page_table[1] == ABSENT).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize(
    ("num_drafts", "largest", "capacities"),
    [(0, 4096, (2112, 2600, 4096, 2304)), (3, 4200, (3200, 4200, 3300, 3500))],
)
def test_tokens_are_the_same_while_hot_buffers_change_their_size(
    checkpoint: Path, num_drafts: int, largest: int, capacities: tuple[int, ...]
) -> None:
    """Steps are replayed from graphs that were captured before. With drafts all tokens of a request must fit:
    a step may select all of them."""
    tokens: list[list[list[int]]] = []
    num_steps = (largest - 3000) // (4 * (num_drafts + 1)) + 1  # for slots of so many tokens, or more
    for resizes in (False, True):
        in_turn = cycle(capacities)
        with bench_of(
            checkpoint, Mode.HISPARSE, 3, num_drafts, "--buffer", "8192", num_steps=num_steps
        ) as bench:
            for _ in range(NUM_ROUNDS):
                bench.run(NUM_STEPS)
                for request in bench.requests if resizes else ():
                    num_before, request.hot_capacity = request.hot_capacity, next(in_turn)
                    bench.tables.resize(request, num_before, request.hot_capacity)
                    given_up = slots_tensor(request.owned[PoolKind.DEVICE])[request.hot_capacity :]
                    bench.memory.k_dev[:, given_up.to(DEVICE)] = POISON
            tokens.append([request.output_token_ids for request in bench.requests])
    for as_they_are, resized in zip(*tokens, strict=True):
        num = min(len(as_they_are), len(resized))
        assert num > NUM_STEPS * NUM_ROUNDS
        assert as_they_are[:num] == resized[:num]


@pytest.mark.I1
@pytest.mark.I5
def test_tokens_are_the_same_where_a_hot_buffer_changes_beside_a_step_of_the_others(checkpoint: Path) -> None:
    """What it gives up is another's at once, while that step runs."""
    tokens: list[list[list[int]]] = []
    beside = torch.cuda.Stream()
    for resizes in (False, True):
        in_turn = cycle((2112, 2600, 4096, 2304))
        with bench_of(checkpoint, Mode.HISPARSE, 3, 0, "--buffer", "8192", num_steps=275) as bench:
            tables, everyone = bench.tables, bench.requests
            for _ in range(NUM_ROUNDS):
                bench.run(NUM_STEPS)
                for request in everyone if resizes else ():
                    others = [each for each in everyone if each is not request]
                    tables.note_launch()
                    step = bench.runner.launch(others, NodeStep(len(others), is_split=False, num_new=1))
                    num_before, request.hot_capacity = request.hot_capacity, next(in_turn)
                    tables.resize(request, num_before, request.hot_capacity)
                    given_up = slots_tensor(request.owned[PoolKind.DEVICE])[request.hot_capacity :]
                    if request.hot_capacity < num_before:  # else the steps' stream has words of new slots
                        with torch.cuda.stream(beside):
                            bench.memory.k_dev[:, given_up.to(DEVICE)] = POISON
                    bench.commit(step)
            tokens.append([request.output_token_ids for request in everyone])
    for as_they_are, resized in zip(*tokens, strict=True):
        num = min(len(as_they_are), len(resized))
        assert num >= NUM_STEPS * NUM_ROUNDS
        assert as_they_are[:num] == resized[:num]
