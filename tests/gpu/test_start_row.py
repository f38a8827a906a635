"""Rows are started, grown and emptied without waiting for the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.swap_in import RowStart, start_dense_row
from tests.books import make_request
from tests.gpu.support import DEVICE, assert_same_tables, needs_gpu, no_waiting
from tests.unit.model.model_specs import make_spec

pytestmark = needs_gpu

NUM_GROUPS, NUM_HOST, NUM_DEVICE, CAPACITY = 61, 4096, 640, 300
NUM_HOT_PAGES = 5
"""Pages of CAPACITY."""


def states() -> tuple[HotBufferState, HotBufferState]:
    """Return equal tables on the GPU and on the CPU."""
    sizes = (NUM_GROUPS, 3, 2000, CAPACITY, 64, NUM_HOST, NUM_DEVICE)
    return HotBufferState.create(*sizes, DEVICE), HotBufferState.create(*sizes)


def test_the_link_to_the_host_pool_is_measured() -> None:
    totals = SlotCounts(host=4096, device=4096, index=4096, lookup=8192, aux=2, req_row=4)
    memory = DecodeMemory(make_spec(), totals, 64, torch.device(DEVICE))
    assert memory.measure_host_link() > 0
    memory.close()
    assert memory.measure_host_link() == 0, "there is no host pool"


@pytest.mark.parametrize("num_tokens", [0, 1, 299, 300, 1500])
@pytest.mark.parametrize("item_bytes", [656, 10])
def test_a_life_of_a_row_without_a_wait(num_tokens: int, item_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    host = torch.randint(0, 256, (NUM_GROUPS, NUM_HOST, item_bytes), dtype=torch.uint8, generator=generator)
    host = host.pin_memory()
    devs = [
        torch.zeros((NUM_GROUPS, NUM_DEVICE, item_bytes), dtype=torch.uint8, device=device)
        for device in (DEVICE, "cpu")
    ]
    page_ids = torch.randperm(NUM_HOST // 64, generator=generator)
    hot_pages = torch.randperm(NUM_DEVICE // 64, generator=generator)[:NUM_HOT_PAGES]
    hints = [
        torch.randperm(max(1, num_tokens), generator=generator)[:200].int().numpy() for _ in range(NUM_GROUPS)
    ]
    layers = [(layer,) for layer in range(NUM_GROUPS)]
    both = states()

    def live(state: HotBufferState, dev: torch.Tensor) -> None:
        num_pages = -(-num_tokens // 64)
        row_start = RowStart(
            state, 1, capacity=CAPACITY, hot_pages=hot_pages, host_pages=page_ids[:num_pages],
            lookup_pages=page_ids.flip(0)[:num_pages], index_pages=page_ids[:3], num_tokens=num_tokens,
            hints=hints, layers_of_group=layers, k_host=host, k_dev=dev,
        )  # fmt: skip
        more = slice(num_pages, num_pages + 2)
        state.set_host_pages(1, num_pages, page_ids[more], page_ids.flip(0)[more])  # before it is filled
        row_start.launch_slice(None)
        start_dense_row(state, 2, pages=page_ids[40:50], index_pages=page_ids[:1])
        state.set_index_pages(1, 3, page_ids[3:4])
        state.set_pages(2, 10, page_ids[50:51])

    live(both[0], devs[0])  # compiles, and fills the caches of memory
    both[0].reset_rows(1)
    both[0].reset_rows(2)
    with no_waiting():
        live(both[0], devs[0])
    live(both[1], devs[1])
    assert_same_tables(*both)
    assert torch.equal(devs[0].cpu(), devs[1])
    with no_waiting():
        both[0].reset_rows(1)
        both[0].reset_rows(2)
    assert_same_tables(both[0], states()[1])


def test_slices_fill_a_row_as_one_call_does_without_a_wait() -> None:
    host = torch.randint(0, 256, (NUM_GROUPS, NUM_HOST, 656), dtype=torch.uint8).pin_memory()
    devs = [
        torch.zeros((NUM_GROUPS, NUM_DEVICE, 656), dtype=torch.uint8, device=of) for of in (DEVICE, "cpu")
    ]
    pages, both = torch.arange(25), states()
    starts = [
        RowStart(
            state, 1, capacity=CAPACITY, hot_pages=torch.arange(NUM_HOT_PAGES).flip(0) + 2,
            host_pages=pages + 3, lookup_pages=pages + 1, index_pages=pages[:3], num_tokens=1500,
            hints=[np.arange(200, dtype=np.int32)],
            layers_of_group=[(layer,) for layer in range(NUM_GROUPS)], k_host=host, k_dev=dev,
        )
        for state, dev in zip(both, devs, strict=True)
    ]  # fmt: skip
    starts[1].launch_slice(None)
    starts[0].launch_slice(1)  # compiles, and fills the caches of memory
    num_slices = 1
    with no_waiting():
        while starts[0].num_left_bytes is not None:
            assert starts[0].launch_slice(2_000_000) <= 2_000_000
            num_slices += 1
    assert num_slices > NUM_GROUPS // 15
    assert_same_tables(*both)
    assert torch.equal(devs[0].cpu(), devs[1])


@pytest.mark.parametrize("mode", [Mode.HISPARSE, Mode.DENSE])
def test_admission_and_end_do_not_wait_for_steps_in_flight(mode: Mode) -> None:
    """While a kernel of another stream keeps the GPU busy, a request is admitted and grows; another ends."""
    spec = make_spec(
        num_layers=3, index_group_of_layer=(0, 1, 1), context_length=2000, index_topk=64, has_row_checks=True
    )
    pools = Pools(SlotCounts(host=4096, device=4096, index=4096, lookup=8192, aux=2, req_row=4), 64)
    memory = DecodeMemory(spec, pools.totals, 64, torch.device(DEVICE))
    hot = RequestTables(spec, memory, num_rows=4, num_lookup_slots=8192, max_capacity=256, page_size=64)
    requests = []
    for number in range(2):
        request = make_request(number, 700, 9)
        request.mode = mode
        request.hot_capacity = 256 if mode is Mode.HISPARSE else 0
        host = 768 if mode is Mode.HISPARSE else 0
        need = SlotCounts(host=host, device=256 if host else 768, index=768, lookup=host, req_row=1)
        request.holding = pools.reserve(request.room, need)
        request.output_token_ids.append(1)
        request.hot_positions = [np.arange(64, dtype=np.int32)] * 2
        requests.append(request)
    hot.start(requests[0])  # compiles, and loads torch's kernels, for which the driver may wait
    hot.release(requests[0])
    hot.start(requests[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second of the current stream
    busy = torch.cuda.current_stream().record_event()
    with no_waiting():
        hot.start(requests[1])
        assert not hot.is_ready(requests[1])
        if mode is Mode.DENSE:
            hot.grow(requests[1])
    assert not busy.query(), "the host waited for the stream"
    torch.cuda.synchronize()
    assert hot.is_ready(requests[1])
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.current_stream().record_event()
    with no_waiting():
        assert hot.is_ready(requests[0])
        hot.release(requests[0])
    assert not busy.query(), "the host waited for the stream"
    torch.cuda.synchronize()
    memory.close()
