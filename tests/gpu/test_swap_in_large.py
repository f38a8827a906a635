"""The CUDA swap-in at sizes that need much memory: long contexts and offsets beyond 32 bits."""

from __future__ import annotations

import torch

from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import swap_in
from tests.gpu.history import ONE_LAYER, History
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu


def test_history_up_to_the_last_of_a_million_positions() -> None:
    history = History(
        17, 16, top_k=4096, num_rows=3, max_context=1_000_000, capacities=(4097, 20_000, 32_768),
        group_layers=ONE_LAYER, has_dense=False,
    )  # fmt: skip
    last = 1_000_000 - 1
    for number, capacity in enumerate((32_768, 20_000, 4097)):
        history.admit(capacity=capacity, prompt=last - 12 + number)
    for _ in range(8):
        history.step()
    for positions in (range(0, last, 245), range(last - 4090, last), range(17, last, 245)):
        history.step({row: [last - 12 + 9, *list(positions)[:4095]] for row in history.requests})
    while max(request.seq_len for request in history.requests.values()) < 1_000_000:
        history.step({row: [request.seq_len - 1] for row, request in history.requests.items()})
    history.finish()


def test_offsets_beyond_two_gigabytes() -> None:
    num_slots, item_bytes = 1_900_000, 1152
    state = HotBufferState.create(1, 1, 64, 9, 16, num_slots, num_slots, DEVICE)
    host = torch.empty((1, num_slots, item_bytes), dtype=torch.uint8, pin_memory=True)
    dev = torch.empty((1, num_slots, item_bytes), dtype=torch.uint8, device=DEVICE)
    host_slots = torch.arange(num_slots - 64, num_slots)
    host[0, host_slots] = torch.randint(0, 256, (64, item_bytes), dtype=torch.uint8)
    pages = torch.arange(num_slots // 16 - 4, num_slots // 16)
    state.assign_row(0, 9, pages[-1:], pages, pages)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    positions = [3, 60, 17, 33]
    slots = swap_in(
        torch.tensor([positions], dtype=torch.int32, device=DEVICE),
        StepRequests(state, one * 63, one * 0, one),
        group=0, layer=0, k_host=host, k_dev=dev,
    )  # fmt: skip
    assert torch.equal(dev[0, slots[0].long()].cpu(), host[0, host_slots[positions]])
