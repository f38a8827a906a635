"""Pages on a GPU: filled without a wait and beside steps, verified, stepped with a dense row's bits, and
backed up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.extents import slice_extents
from hisparse_pd.core.paging.pools import PoolKind, round_up
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.kernels import page_fill
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.page_fill import CHUNK_TOKENS, PageFill
from hisparse_pd.kernels.row_check import store_row_checks, wrong_row
from hisparse_pd.kernels.row_errors import HotBufferError
from tests.gpu.step_bench import NUM_STEPS, bench_of, write_model
from tests.gpu.support import DEVICE, POISON, assert_same_tables, needs_gpu, no_waiting
from tools.bench.step_bench import Bench

NUM_LAYERS, NUM_SLOTS, PAGE = 5, 4 * CHUNK_TOKENS, 64

pytestmark = needs_gpu


class Pools:
    """Random host items, and equal tables on the GPU and on the CPU, each with an empty device pool."""

    def __init__(self, item_bytes: int, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        shape = NUM_LAYERS, NUM_SLOTS, item_bytes
        self.host = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).pin_memory()
        orders = [torch.randperm(NUM_SLOTS // PAGE, generator=generator) for _ in range(4)]
        self.num_tokens = num_tokens
        num_pages = -(-num_tokens // PAGE)
        self.pages, self.host_pages, self.lookup_pages, self.index_pages = (o[:num_pages] for o in orders)
        self.devs = [torch.zeros(shape, dtype=torch.uint8, device=device) for device in (DEVICE, "cpu")]
        self.states = [self._state(dev) for dev in self.devs]

    def slots(self, pages: Tensor) -> Tensor:
        return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[: self.num_tokens]

    def _state(self, dev: Tensor) -> HotBufferState:
        """Return tables with the row checks of the host's items."""
        checks = torch.zeros((NUM_LAYERS, NUM_SLOTS), dtype=torch.int32, device=dev.device)
        items = self.host[:, self.slots(self.host_pages)].to(dev.device)
        positions = torch.arange(self.num_tokens, device=dev.device)
        slots = self.slots(self.index_pages).to(dev.device)
        store_row_checks(checks, slots, items, positions, positions, range(NUM_LAYERS))
        return HotBufferState.create(
            1, 3, NUM_SLOTS, 128, PAGE, NUM_SLOTS, NUM_SLOTS, dev.device, max_new=1, row_checks=checks
        )

    def start(self, number: int) -> PageFill:
        """Return the start of row 1 on the GPU (0) or on the CPU (1)."""
        return PageFill(
            self.states[number], 1, pages=self.pages, host_pages=self.host_pages,
            lookup_pages=self.lookup_pages, index_pages=self.index_pages, num_tokens=self.num_tokens,
            k_host=self.host, k_dev=self.devs[number],
        )  # fmt: skip


@pytest.mark.I3
@pytest.mark.parametrize("item_bytes", [656, 10])
@pytest.mark.parametrize("num_tokens", [1, 64, 700, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 1])
def test_a_row_is_filled_in_slices_without_a_wait(num_tokens: int, item_bytes: int) -> None:
    pools = Pools(item_bytes, num_tokens)
    pools.start(0).launch_slice(None)  # compiles, and fills the caches of memory
    torch.cuda.synchronize()
    pools.states[0].reset_rows(1)
    pools.devs[0].zero_()
    start = pools.start(0)
    with no_waiting():
        num_slices = 0
        while start.num_left_bytes is not None:
            start.launch_slice(item_bytes * CHUNK_TOKENS)
            num_slices += 1
    assert num_slices >= max(1, NUM_LAYERS * (num_tokens // CHUNK_TOKENS)), (
        "a slice has at most one chunk's bytes"
    )
    pools.start(1).launch_slice(None)
    assert_same_tables(*pools.states)
    assert torch.equal(pools.devs[0].cpu(), pools.devs[1])
    slots = pools.slots(pools.pages)
    assert torch.equal(pools.devs[1][:, slots], pools.host[:, pools.slots(pools.host_pages)])
    assert int(pools.states[0].error_flags[1]) == HotBufferError.NONE


@pytest.mark.I7
def test_a_wrong_row_is_found_when_it_comes_up() -> None:
    pools = Pools(656, 20_000)
    slot = int(pools.slots(pools.host_pages)[17_001])
    pools.host[3, slot, 100] ^= 4
    for number in (0, 1):
        pools.start(number).launch_slice(None)
        state = pools.states[number]
        assert int(state.error_flags[1]) == HotBufferError.WRONG_ROW
        wrong = wrong_row(state, 1)
        assert (wrong.item.layer, wrong.item.position, wrong.item.slot) == (3, 17_001, slot)
        assert wrong.is_on_host


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def check_both_copies(bench: Bench, request: Request) -> None:
    """Check that all items of a resident request are the same in both pools."""
    memory, num_tokens = bench.memory, request.num_kv_tokens
    host, device = (
        slots_tensor(request.extents(kind))[:num_tokens] for kind in (PoolKind.HOST, PoolKind.DEVICE)
    )
    assert torch.equal(memory.k_host[:, host], memory.k_dev[:, device.to(memory.k_dev.device)].cpu())


def leave_pages(bench: Bench, request: Request, most: int) -> None:
    """Give a resident request a hot buffer of up to ``most`` entries for its pages. The others are lost."""
    slots, num_tokens = request.owned[PoolKind.DEVICE], request.num_kv_tokens
    num_slots, max_new = request.num_device_slots, bench.tables.state.max_new
    capacity = min(most, num_slots, bench.tables.state.max_capacity)
    first = round_up(max(0, num_tokens - (capacity - max_new)), PAGE)
    bench.tables.retract(request)
    request.hot_capacity = min(capacity, num_slots - first)
    end = first + round_up(request.hot_capacity, PAGE)
    request.owned.extents[PoolKind.DEVICE] = slice_extents(slots, first, end)
    bench.tables.enter_hot_buffer(request, first)
    given_up = set(slots_tensor(slots).tolist()) - set(slots_tensor(request.owned[PoolKind.DEVICE]).tolist())
    bench.memory.k_dev[:, torch.tensor(sorted(given_up), device=DEVICE, dtype=torch.int64)] = POISON


def run_beside_a_fill(bench: Bench) -> list[list[int]]:
    """Fill the first request's pages beside steps of both, and take steps behind that, and behind its leaving
    them. Returns the tokens of both. The last two requests end before, and leave the first one their device
    slots."""
    tables, (filling, staying, *others) = bench.tables, bench.requests
    device = filling.owned.extents[PoolKind.DEVICE]
    for other in others:
        tables.release(other)
        device += other.owned[PoolKind.DEVICE]
    bench.requests = [filling, staying]
    num_hot = filling.num_device_slots
    filling.num_page_slots = round_up(filling.reserved_tokens, PAGE)
    filling.owned.extents[PoolKind.DEVICE] = slice_extents(device, 0, num_hot + filling.num_page_slots)
    filling.num_filled_tokens = filling.num_kv_tokens
    tables.fills.slice_bytes = 1
    tables.start_pages(filling)
    num_turns = 0
    while not tables.is_ready(filling):
        tables.go_on()
        num_turns += 1
        if num_turns % 2 and num_turns < 2 * NUM_STEPS:
            bench.run(1)  # while the slice is copied
    assert filling.num_kv_tokens >= filling.num_filled_tokens + NUM_STEPS
    tables.enter_pages(filling)
    filling.owned.extents[PoolKind.DEVICE] = filling.page_extents
    filling.hot_capacity = filling.num_page_slots = 0
    bench.run(NUM_STEPS)
    torch.cuda.synchronize()
    check_both_copies(bench, filling)
    leave_pages(bench, filling, num_hot)
    bench.run(NUM_STEPS)
    return [filling.output_token_ids, staying.output_token_ids]


@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_pages_are_filled_beside_steps_of_their_own_request(
    checkpoint: Path, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of requests that keep their hot buffers; without drafts these miss."""
    monkeypatch.setattr(page_fill, "CHUNK_TOKENS", 512)
    buffer = "2112" if num_drafts == 0 else "4096"
    tokens: list[list[list[int]]] = []
    for fills in (False, True):
        with bench_of(checkpoint, Mode.HISPARSE, 4, num_drafts, "--buffer", buffer) as bench:
            if fills:
                tokens.append(run_beside_a_fill(bench))
            else:
                bench.run(3 * NUM_STEPS)
                tokens.append([request.output_token_ids for request in bench.requests[:2]])
    for of_hot, of_filled in zip(*tokens, strict=True):
        num = min(len(of_hot), len(of_filled))
        assert num > 2 * NUM_STEPS
        assert of_hot[:num] == of_filled[:num]


@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_steps_have_the_tokens_of_dense_ones_and_back_up_their_items(
    checkpoint: Path, num_drafts: int
) -> None:
    tokens = []
    for mode in (Mode.DENSE, Mode.HISPARSE):
        is_resident = mode is Mode.HISPARSE
        with bench_of(checkpoint, mode, 3, num_drafts, is_resident=is_resident) as bench:
            bench.run(NUM_STEPS)
            torch.cuda.synchronize()
            tokens.append([request.output_token_ids for request in bench.requests])
            for request in bench.requests if is_resident else ():
                assert request.num_kv_tokens >= 3000 + NUM_STEPS
                check_both_copies(bench, request)
    assert tokens[0] == tokens[1]
