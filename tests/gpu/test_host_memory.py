"""Main memory that CUDA has registered: a GPU reads and writes it in place until it is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hisparse_pd.core.memory.device import DeviceMemory
from hisparse_pd.core.memory.host import PAGE_BYTES, HostMemoryError, HostPool, allocate_host
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import backup_newest, swap_in
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu

NUM_SLOTS, ITEM_BYTES = 96, 656


def kind_of_memory(addr: int) -> int:
    """Return 0 for pageable and 1 for pinned host memory."""
    from cupy.cuda import runtime

    return int(runtime.pointerGetAttributes(addr).type)


def run_step(pool: HostPool) -> None:
    """Run a swap-in that reads random bytes from ``pool``, and a backup that writes to it."""
    host = pool.tensor[: 2 * NUM_SLOTS * ITEM_BYTES].view(2, NUM_SLOTS, ITEM_BYTES)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    before = host.clone()
    dev = torch.zeros((2, 16, ITEM_BYTES), dtype=torch.uint8, device=DEVICE)
    state = HotBufferState.create(1, 1, 64, 9, 16, NUM_SLOTS, 16, DEVICE)
    host_pages = torch.randperm(NUM_SLOTS // 16)[:4]
    host_slots = (host_pages[:, None] * 16 + torch.arange(16)).flatten()
    state.assign_row(0, 9, torch.zeros(1, dtype=torch.int32), host_pages, host_pages.flip(0))
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    positions = [3, 60, 17, 33]
    requests = StepRequests(state, one * 63, one * 0, one)
    selected = torch.tensor([positions], dtype=torch.int32, device=DEVICE)
    slots = swap_in(selected, requests, group=0, layer=1, k_host=host, k_dev=dev)
    assert torch.equal(dev[1, slots[0].long()].cpu(), host[1, host_slots[positions]])
    newest = torch.randint(0, 256, (2, ITEM_BYTES), dtype=torch.uint8)
    dev[:, 8] = newest.to(DEVICE)  # hot_index capacity - 1
    backup_newest(requests, k_host=host, k_dev=dev)
    torch.cuda.synchronize()
    assert torch.equal(host[:, host_slots[62]], newest)
    others = [slot for slot in range(NUM_SLOTS) if slot != int(host_slots[62])]
    assert torch.equal(host[:, others], before[:, others])


def test_a_gpu_reads_and_writes_the_memory_in_place() -> None:
    pool = allocate_host(2 * NUM_SLOTS * ITEM_BYTES, pinned=True)
    try:
        assert pool.tensor.data_ptr() % PAGE_BYTES == 0
        assert kind_of_memory(pool.tensor.data_ptr()) == 1
        run_step(pool)
        assert pool.tensor.is_pinned()  # torch detects this once it has a context
    finally:
        pool.close()


def test_closed_memory_is_no_longer_pinned_and_can_be_had_again() -> None:
    for _ in range(3):
        pool = allocate_host(2 * NUM_SLOTS * ITEM_BYTES, pinned=True)
        run_step(pool)
        tensor = pool.tensor
        pool.close()
        pool.close()
        assert kind_of_memory(tensor.data_ptr()) == 0
        tensor.fill_(1)  # still mapped
        del tensor


def test_memory_that_is_dropped_is_unregistered() -> None:
    addresses = set()
    for _ in range(8):  # the kernel returns the same addresses again, and no address can be registered twice
        pool = allocate_host(1 << 20, pinned=True)
        addresses.add(pool.tensor.data_ptr())
        run_step(pool)
        del pool
    assert addresses


def test_memory_that_is_not_pinned_is_refused_by_the_kernels() -> None:
    pool = allocate_host(2 * NUM_SLOTS * ITEM_BYTES, pinned=False)
    with pytest.raises(KernelArgumentError, match="pageable memory"):
        run_step(pool)


def test_a_second_registration_fails_with_the_drivers_reason() -> None:
    class Twice:
        def register(self, addr: int, num_bytes: int) -> None:
            from cupy.cuda import runtime

            runtime.hostRegister(addr, num_bytes, 0)
            try:
                runtime.hostRegister(addr, num_bytes, 0)
            finally:
                runtime.hostUnregister(addr)

        def unregister(self, addr: int) -> None:
            raise AssertionError("it was never registered")

    with pytest.raises(HostMemoryError, match="AlreadyRegistered"):
        allocate_host(PAGE_BYTES, pinned=True, pinning=Twice())
    run_step(allocate_host(1 << 20, pinned=True))  # the error does not affect the next call


def test_copies_from_the_gpu_land_without_staging() -> None:
    pool = allocate_host(1 << 20, pinned=True)
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=DEVICE)
    pool.tensor.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(pool.tensor, source.cpu())
    pool.close()


def test_a_large_pool_is_touched_and_registered() -> None:
    pool = allocate_host(4 << 30, pinned=True)
    last = torch.arange(100, dtype=torch.uint8, device=DEVICE)
    pool.tensor[-100:].copy_(last)
    assert torch.equal(pool.tensor[-100:], last.cpu())
    assert not pool.tensor[: 1 << 20].any()
    pool.close()


def test_a_process_may_end_without_closing() -> None:
    code = (
        "import torch; from hisparse_pd.core.memory.host import allocate_host\n"
        "pool = allocate_host(1 << 20, pinned=True)\n"
        "tensor = pool.tensor\n"
        "tensor.cuda(non_blocking=True)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stderr
    assert "Error" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_what_is_read_of_the_gpu_follows_what_is_allocated() -> None:
    device = torch.device(DEVICE)
    before = DeviceMemory.read(device)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    during = DeviceMemory.read(device)
    assert during.total_bytes == before.total_bytes
    assert during.used_bytes - before.used_bytes >= held.nbytes
    del held
    assert DeviceMemory.read(device).used_bytes < during.used_bytes
