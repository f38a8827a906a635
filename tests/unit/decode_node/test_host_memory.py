"""Main memory for pools: where it starts, that all of it is touched, and in what order it is released."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory import host as host_memory
from hisparse_pd.core.memory.free import check_host_memory
from hisparse_pd.core.memory.host import (
    PAGE_BYTES,
    HostMemoryError,
    allocate_host,
    num_touch_threads,
    touch_slices,
)
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.protocol.messages import Extent, RegionKind
from hisparse_pd.transfer.plan import RegionView, descriptors
from tests.slot_plans import plan_slots
from tests.unit.model.model_specs import make_spec
from tests.unit.transfer.fake_machine import GIB, FakeMachine


class FakePinning:
    """A stand-in for pinning that records its calls."""

    def __init__(self, log: list[str] | None = None, error: Exception | None = None) -> None:
        self.log = [] if log is None else log
        self.error = error
        self.pinned: dict[int, int] = {}

    def register(self, addr: int, num_bytes: int) -> None:
        if self.error is not None:
            raise self.error
        self.log.append("pin")
        self.pinned[addr] = num_bytes

    def unregister(self, addr: int) -> None:
        self.log.append("unpin")
        del self.pinned[addr]


# --- one pool ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 5])
@pytest.mark.parametrize("touch", [True, False])
def test_memory_starts_at_a_page_and_is_zero(num_bytes: int, touch: bool) -> None:
    pool = allocate_host(num_bytes, pinned=False, touch=touch)
    tensor = pool.tensor
    assert tensor.data_ptr() % PAGE_BYTES == 0
    assert (tensor.dtype, tensor.shape, tensor.device.type) == (torch.uint8, (num_bytes,), "cpu")
    assert not tensor.any()


def test_tensors_outlive_the_pool_and_the_mapping_goes_with_the_last_of_them() -> None:
    pool = allocate_host(2 * PAGE_BYTES, pinned=False)
    assert pool.mapping is not None
    gone = weakref.ref(pool.mapping)
    pool.tensor[-1] = 7
    view = pool.tensor.view(2, -1)[1]
    pool.close()
    gc.collect()
    assert view[-1] == 7  # the mapping is still there: this does not crash
    assert gone() is not None
    with pytest.raises(HostMemoryError, match=r"pool of \d+ bytes is closed"):
        _ = pool.tensor
    del view
    gc.collect()
    assert gone() is None


def test_every_page_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 10 * PAGE_BYTES + 3
    written: list[tuple[int, int]] = []
    memset = ctypes.memset

    def recording(addr: int, value: int, size: int) -> Any:
        written.append((addr, size))
        return memset(addr, value, size)

    monkeypatch.setattr(ctypes, "memset", recording)
    monkeypatch.setattr(host_memory, "num_touch_threads", lambda *_: 4)
    start = allocate_host(num_bytes, pinned=False).tensor.data_ptr()
    assert len(written) == 4
    for addr, size in sorted(written):
        assert addr == start
        start += size
    assert start == min(written)[0] + num_bytes


@given(st.integers(1, 1 << 45), st.integers(1, 64))
def test_slices_cover_everything_once_and_meet_at_pages(num_bytes: int, num_threads: int) -> None:
    slices = touch_slices(num_bytes, num_threads)
    assert 1 <= len(slices) <= num_threads
    assert [start for start, _ in slices] == [0, *(stop for _, stop in slices[:-1])]
    assert slices[-1][1] == num_bytes
    assert all(start < stop and start % PAGE_BYTES == 0 for start, stop in slices)
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) < 2 * PAGE_BYTES


def test_small_memory_is_not_worth_threads() -> None:
    assert num_touch_threads(1, 64) == 1
    assert num_touch_threads(4 * host_memory.MIN_TOUCH_BYTES, 64) == 4
    assert num_touch_threads(1 << 40, 8) == 8
    assert num_touch_threads(1 << 40, 256) == host_memory.MAX_TOUCH_THREADS


@pytest.mark.parametrize(("num_bytes", "words"), [(0, "0 bytes"), (-1, "-1 bytes"), (1 << 60, "ulimit -v")])
def test_impossible_sizes_are_refused(num_bytes: int, words: str) -> None:
    with pytest.raises(HostMemoryError, match=f"the pool: .*{words}"):
        allocate_host(num_bytes, pinned=False, touch=False, name="the pool")


def test_too_few_descriptors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(HostMemoryError, match=r"the pool: .*ulimit -n"):
        allocate_host(4096, pinned=False, touch=False, shared=True, name="the pool")


# --- pinned -----------------------------------------------------------------------------------------------


def test_pinned_memory_is_registered_once_and_unregistered_once() -> None:
    pinning = FakePinning()
    pool = allocate_host(100, pinned=True, pinning=pinning)
    assert pinning.pinned == {pool.tensor.data_ptr(): 100}
    pool.close()
    pool.close()
    assert pinning.log == ["pin", "unpin"]


def test_memory_that_is_dropped_does_not_stay_pinned() -> None:
    pinning = FakePinning()
    tensor = allocate_host(100, pinned=True, pinning=pinning).tensor
    gc.collect()
    assert pinning.pinned, "a tensor is left that a GPU may read"
    del tensor
    gc.collect()
    assert not pinning.pinned


def test_a_failed_registration_names_size_cause_and_limit_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    with pytest.raises(HostMemoryError) as caught:
        allocate_host(4096, pinned=True, name="pool kv_host", pinning=FakePinning(error=OSError("no room")))
    for words in ("pool kv_host", "4096 bytes", "OSError: no room", "limited to 65536 bytes", "ulimit -l"):
        assert words in str(caught.value)


def test_an_unregistration_that_fails_does_not_stop_the_end(caplog: pytest.LogCaptureFixture) -> None:
    pinning = FakePinning()
    pool = allocate_host(100, pinned=True, pinning=pinning)
    pinning.pinned.clear()
    pool.close()
    assert "cannot unregister 100 bytes" in caplog.text


def test_nothing_is_unregistered_while_the_interpreter_ends() -> None:
    pool = allocate_host(100, pinned=True, pinning=FakePinning())
    assert isinstance(pool.unpin, weakref.finalize)
    assert not pool.unpin.atexit
    pool.close()


# --- what is free -----------------------------------------------------------------------------------------


def test_more_than_the_machine_has_free_is_refused(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path).machine
    check_host_memory(32 * GIB, machine)
    with pytest.raises(StartError) as caught:
        check_host_memory(32 * GIB + 1, machine)
    for words in (str(32 * GIB + 1), "32.0 GiB in the machine", "--host-pool-tokens"):
        assert words in str(caught.value)


def test_more_than_the_container_may_have_is_refused(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.write("proc/self/cgroup", "0::/\n")
    fake.write("sys/fs/cgroup/memory.max", f"{4 * GIB}\n")
    fake.write("sys/fs/cgroup/memory.current", f"{GIB}\n")
    check_host_memory(3 * GIB, fake.machine)
    with pytest.raises(StartError, match=r"3\.0 GiB in the control group.*limit of the node.s container"):
        check_host_memory(3 * GIB + 1, fake.machine)


# --- the decode node's pools ------------------------------------------------------------------------------

PAGE_SIZE = 4
TOTALS = SlotCounts(host=30, device=24, index=56, lookup=60, aux=3, req_row=2)


@pytest.fixture
def spec() -> ModelSpec:
    return make_spec(
        num_layers=4, index_group_of_layer=(0, 0, 1, 1), kv_lora_rank=24, qk_rope_head_dim=8,
        index_head_dim=16, index_topk=8,
    )  # fmt: skip


class RecordingTransport:
    """The part of a TransferEngine that pools use; it records the calls."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.tensors: list[torch.Tensor] = []

    def register(self, tensor: torch.Tensor) -> int:
        assert tensor.is_contiguous()
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def close(self) -> None:
        self.log.append("leave the network")
        self.tensors.clear()


def test_scratch_pages_lie_behind_what_is_handed_out_and_peers_see_the_real_stride(spec: ModelSpec) -> None:
    memory = DecodeMemory(spec, TOTALS, PAGE_SIZE, torch.device("cpu"))
    assert (memory.scratch_device_slot, memory.scratch_index_slot) == (24, 56)
    assert memory.k_dev.shape == (spec.num_layers, 24 + PAGE_SIZE, spec.item_bytes)
    assert memory.index.shape == (spec.num_index_layers, 56 + PAGE_SIZE, spec.index_item_bytes)
    assert memory.k_host.shape == (spec.num_layers, 30, spec.item_bytes)
    regions = {region.kind: region for region in memory.register(RecordingTransport([]))}  # type: ignore[arg-type]
    assert {kind: region.num_slots for kind, region in regions.items()} == {
        RegionKind.KV_HOST: 30,
        RegionKind.KV_DEVICE: 28,
        RegionKind.INDEX: 60,
        RegionKind.AUX: 3,
    }
    for kind, pool in (
        (RegionKind.KV_HOST, memory.k_host),
        (RegionKind.KV_DEVICE, memory.k_dev),
        (RegionKind.INDEX, memory.index),
    ):
        num_layers, num_slots, item_bytes = pool.shape
        region = regions[kind]
        # The peer's plan for the last slot of each layer is where this side reads that slot.
        view = RegionView(region.base_addr, region.num_bytes, num_layers, region.num_slots, item_bytes)
        assert num_layers * region.num_slots * item_bytes == region.num_bytes
        source = RegionView(1 << 40, pool.nbytes, num_layers, num_slots, item_bytes)
        writes = descriptors(plan_slots([0], [num_slots - 1]), source, view, range(num_layers))
        expected = [pool[layer, num_slots - 1].data_ptr() for layer in range(num_layers)]
        assert writes.dst_addrs.tolist() == expected


def test_the_transport_lets_go_before_cuda_does_and_unmapping_comes_last(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    pinning = FakePinning(log)

    def pinned(num_bytes: int, **options: Any) -> host_memory.HostPool:
        pool = allocate_host(num_bytes, **{**options, "pinned": True})
        weakref.finalize(pool.mapping, log.append, "unmap")
        return pool

    monkeypatch.setattr("hisparse_pd.decode_node.memory.allocate_host", pinned)
    memory = DecodeMemory(spec, TOTALS, PAGE_SIZE, torch.device("cpu"), pinning)
    assert list(pinning.pinned) == [memory.k_host.data_ptr(), memory.aux.data_ptr()]
    transport = RecordingTransport(log)
    memory.register(transport)  # type: ignore[arg-type]
    transport.close()
    memory.close()
    memory.close()
    gc.collect()
    assert log == ["pin", "pin", "leave the network", *["unpin", "unmap"] * 2]
    assert memory.k_host.numel() == 0


def test_a_spill_puts_every_position_where_its_host_slot_is(spec: ModelSpec) -> None:
    memory = DecodeMemory(spec, TOTALS, PAGE_SIZE, torch.device("cpu"))
    memory.k_dev.copy_(torch.randint(0, 256, memory.k_dev.shape, dtype=torch.uint8))
    device, host = (Extent(8, 8), Extent(0, 4)), (Extent(20, 3), Extent(2, 5), Extent(27, 3))
    num_tokens = 10
    memory.spill(device, host, num_tokens)
    device_slots, host_slots = extents_to_slots(device), extents_to_slots(host)
    assert torch.equal(memory.k_host[:, host_slots[:num_tokens]], memory.k_dev[:, device_slots[:num_tokens]])
    untouched = sorted(set(range(30)) - set(host_slots[:num_tokens].tolist()))
    assert not memory.k_host[:, untouched].any()
