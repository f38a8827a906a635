"""Lanes of a prefill node whose KV is on a GPU, with a stand-in for the GPU that copies on the CPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

import hisparse_pd.transfer.lane
import hisparse_pd.transfer.lane_memory
from hisparse_pd.core.paging.extents import SlotArray
from hisparse_pd.transfer.errors import TransferError
from hisparse_pd.transfer.lane import Lane
from hisparse_pd.transfer.lane_copy import copy_ranges
from hisparse_pd.transfer.lane_host import SharedMemory
from hisparse_pd.transfer.plan import LONG_BYTES, PIECE_BYTES, Descriptors
from tests.unit.transfer.lane_pair import POOL_BYTES, SESSION, Network, Pair, pair_of
from tests.waiting import WAIT_SECS, wait_until


class FakeCopying:
    """A copy that is made when it is awaited."""

    def __init__(self, gpu: FakeGpu, *parts: Sequence[SlotArray]) -> None:
        self._gpu = gpu
        self._parts = parts

    def wait(self) -> None:
        if self._gpu.error is not None:
            raise self._gpu.error
        self._gpu.num_copied += 1
        for src, dst, lengths in self._parts:
            copy_ranges(src, dst, lengths)


class FakeGpu:
    """A stand-in for a GpuWriter that copies on the CPU; its KV is the first half of the source."""

    def __init__(self, network: Network, calls: list[str]) -> None:
        self.calls = calls
        self.may_register = threading.Event()
        self.may_register.set()
        self.error: Exception | None = None
        self.opened = np.zeros(9000, np.uint8)
        """The memory that a handle opens."""
        self.num_runs = self.num_pieces = 0
        self.num_started = self.num_copied = 0
        self._first, self._stop = network.addr, network.addr + network.source.nbytes // 2

    def owns(self, addrs: SlotArray) -> NDArray[np.bool_]:
        return (addrs >= self._first) & (addrs < self._stop)

    def register(self, addr: int, num_bytes: int) -> None:
        assert self.may_register.wait(WAIT_SECS)
        if self.error is not None:
            raise self.error
        self.calls.append(f"register {num_bytes}")

    def unregister(self, addr: int) -> None:
        np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(addr))[0] += 0  # it is still mapped
        self.calls.append("unregister")

    def open(self, handle: bytes) -> int:
        if handle != b"handle":
            raise RuntimeError("invalid device context")
        self.calls.append("open")
        return int(self.opened.ctypes.data)

    def close(self, addr: int) -> None:
        assert addr == self.opened.ctypes.data
        self.calls.append("close")

    def start_copy(self, runs: Sequence[SlotArray], pieces: Sequence[SlotArray]) -> FakeCopying:
        self.num_runs, self.num_pieces = runs[0].size, pieces[0].size
        self.num_started += 1
        assert (runs[2] >= LONG_BYTES).all()
        assert (pieces[2] <= PIECE_BYTES).all()
        return FakeCopying(self, runs, pieces)

    def enqueue(self, runs: Sequence[SlotArray], pieces: Sequence[SlotArray]) -> None:
        self.start_copy(runs, pieces).wait()


@contextmanager
def pair_with_gpu(handle: bytes = b"handle") -> Iterator[tuple[Pair, FakeGpu]]:
    """The decode node's second region is in its GPU, at an address that does not exist in this process."""
    with pair_of(covers_all=False) as pair:
        pair.regions[1] = (1 << 50, 4000)
        on_gpu = SharedMemory(*pair.regions[1], None, handle, 5000)
        pair.host.memory = (*pair.host.memory, on_gpu)
        gpu = FakeGpu(pair.network, [])
        pair.lanes.gpu = gpu  # type: ignore[assignment]
        yield pair, gpu


def test_a_gpu_writes_to_main_memory_and_to_the_other_gpu() -> None:
    with pair_with_gpu() as (pair, gpu):
        assert pair.register().kind == "shm"
        assert pair.lanes.take_decided() == [SESSION]
        lengths = [LONG_BYTES + 1, 3 * PIECE_BYTES, 100]
        src = [0, LONG_BYTES + 1, 50]  # the second source continues the first, but its destination does not
        dst = [0, LONG_BYTES + 7, LONG_BYTES + 4 * PIECE_BYTES]
        expected = pair.memory[0].copy()
        for start, to, length in zip(src, dst, lengths, strict=True):
            expected[to : to + length] = pair.network.source[start : start + length]
        pair.write(src, dst, lengths)
        assert np.array_equal(pair.memory[0], expected)
        assert (gpu.num_runs, gpu.num_pieces) == (1, 4)
        pair.lanes.write(SESSION, ([pair.network.addr + 9], [(1 << 50) + 30], [60]))
        assert np.array_equal(gpu.opened[5030:5090], pair.network.source[9:69])
        # The CPU copies sources in main memory, such as aux records, and never to a GPU.
        gpu.num_pieces = 0
        pair.write([pair.network.source.nbytes - 40], [0], [40])
        assert gpu.num_pieces == 0
        assert np.array_equal(pair.memory[0][:40], pair.network.source[-40:])
        with pytest.raises(TransferError, match="cannot be written to the decode node's GPU"):
            pair.lanes.write(SESSION, ([pair.network.addr + pair.network.source.nbytes - 9], [1 << 50], [9]))
        assert pair.network.sent == []
        pair.lanes.close()
        expected_calls = [f"register {POOL_BYTES[0]}", "open", "close", "unregister"]
        wait_until(lambda: gpu.calls == expected_calls, "CUDA has let go of the memory before it is unmapped")


def test_a_gpu_reads_from_main_memory_and_from_the_other_gpu() -> None:
    with pair_with_gpu() as (pair, gpu):
        assert pair.register().kind == "shm"
        pair.memory[0][:] = np.arange(pair.memory[0].size) % 251
        gpu.opened[:] = np.arange(gpu.opened.size) % 249
        lengths = [LONG_BYTES + 1, 3 * PIECE_BYTES, 100]
        src, dst = [0, LONG_BYTES + 1, 50], [0, LONG_BYTES + 7, LONG_BYTES + 4 * PIECE_BYTES]
        # The CPU reads what goes to main memory.
        half = pair.network.source.nbytes // 2
        src, dst, lengths = [*src, 70], [*dst, half + 9], [*lengths, 40]
        expected = pair.network.source.copy()
        for start, to, length in zip(src, dst, lengths, strict=True):
            expected[to : to + length] = pair.memory[0][start : start + length]
        pair.read(src, dst, lengths)
        assert np.array_equal(pair.network.source, expected)
        assert (gpu.num_runs, gpu.num_pieces) == (1, 4)
        pair.lanes.read(SESSION, ([(1 << 50) + 30], [pair.network.addr + 9], [60]))
        assert np.array_equal(pair.network.source[9:69], gpu.opened[5030:5090])
        with pytest.raises(TransferError, match="GPU cannot be read into main memory"):
            pair.lanes.read(SESSION, ([1 << 50], [pair.network.addr + half + 1], [9]))
        assert pair.network.read_from == []


@pytest.mark.I1
def test_pinned_memory_is_read_until_it_is_let_go() -> None:
    with pair_with_gpu() as (pair, gpu):
        assert pair.lanes.pinned(SESSION) is None
        assert pair.register().kind == "shm"
        memory = pair.lanes.pinned(SESSION)
        assert memory is not None
        pair.lanes.close()  # as when the decode node has ended
        assert pair.lanes.pinned(SESSION) is None
        with pytest.raises(TransferError, match="has closed the decode node's memory"):
            memory.pin()  # whoever found it before that
        pair.memory[0][:] = np.arange(pair.memory[0].size) % 251
        gpu.opened[:] = np.arange(gpu.opened.size) % 249
        base, here = pair.regions[0][0], pair.network.addr
        columns = [base + 7, (1 << 50) + 30], [here + 1, here + 2000], [1000, 60]
        memory.enqueue_reads(Descriptors(*(np.array(column) for column in columns)), 9)
        assert np.array_equal(pair.network.source[1:1001], pair.memory[0][7:1007])
        assert np.array_equal(pair.network.source[2000:2060], gpu.opened[5030:5090])
        outside = [base + POOL_BYTES[0] - 9], [here], [10]
        with pytest.raises(TransferError, match="not within the decode node's memory; nothing was read"):
            memory.enqueue_reads(Descriptors(*(np.array(column) for column in outside)), 9)
        assert "unregister" not in gpu.calls
        memory.unpin()
        wait_until(lambda: "unregister" in gpu.calls, "the memory is let go")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_only_a_gpu_that_reaches_all_memory_reads_it_itself(has_gpu: bool) -> None:
    with pair_with_gpu() as (pair, _), pair_of() as on_cpus:
        if has_gpu:
            pair.regions.append((1 << 51, 64))  # not offered
            assert pair.register().kind == "shm"
            assert pair.lanes.pinned(SESSION) is None
        else:
            assert on_cpus.register().kind == "shm"
            assert on_cpus.lanes.pinned(SESSION) is None


@pytest.mark.I1
@pytest.mark.parametrize("stops_after", [None, 3])
def test_one_part_is_made_up_while_another_is_copied_and_none_is_left_behind(
    stops_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hisparse_pd.transfer.lane_memory, "PART_BYTES", 1000)
    monkeypatch.setattr(hisparse_pd.transfer.lane_memory, "PART_RANGES", 3)
    with pair_with_gpu() as (pair, gpu):
        assert pair.register().kind == "shm"
        num_in_flight = []

        def stop() -> str:
            num_in_flight.append(gpu.num_started - gpu.num_copied)
            return "cancelled" if len(num_in_flight) - 1 == stops_after else ""

        src, lengths = [0, 10, 20, 30, 3000], [10, 10, 10, 5, 4000]  # 3 ranges: 35 bytes, then pieces of 1000
        sources = [pair.network.addr + start for start in src]
        base = pair.regions[0][0]
        if stops_after is None:
            pair.lanes.write(SESSION, (sources, [base + start for start in src], lengths), stop)
            assert np.array_equal(pair.memory[0][3000:7000], pair.network.source[3000:7000])
            assert np.array_equal(pair.memory[0][:35], pair.network.source[:35])
        else:
            with pytest.raises(TransferError, match="stopped after 1035 bytes: cancelled") as caught:
                pair.lanes.write(SESSION, (sources, [base + start for start in src], lengths), stop)
            assert not caught.value.may_still_land
        assert max(num_in_flight) == 1
        assert gpu.num_started == gpu.num_copied == len(num_in_flight) - (stops_after is not None)


@pytest.mark.I1
def test_a_gpus_writes_are_not_over_when_its_process_is() -> None:
    with pair_with_gpu() as (pair, _):
        assert pair.register().kind == "shm"
        pair.lanes.close()
        assert pair.ended_when_closed() == []


def test_a_pair_waits_until_cuda_has_registered_the_memory() -> None:
    with pair_with_gpu() as (pair, gpu):
        gpu.may_register.clear()
        for _ in range(2):
            assert pair.lanes.register(SESSION, pair.host.offer, pair.regions) is None
        with pytest.raises(TransferError, match="has no lane"):
            pair.write([0], [0], [10])
        gpu.may_register.set()
        wait_until(lambda: pair.lanes.take_decided() == [SESSION], "the lane is open")
        pair.write([0], [0], [10])
        assert pair.network.sent == []
        assert np.array_equal(pair.memory[0][:10], pair.network.source[:10])


def test_memory_that_cuda_registered_too_late_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair_with_gpu() as (pair, gpu):
        gpu.may_register.clear()
        assert pair.lanes.register(SESSION, pair.host.offer, pair.regions) is None
        monkeypatch.setattr(hisparse_pd.transfer.lane, "OPEN_SECS", 0.0)
        lane = pair.register()
        assert lane.kind == "tcp"
        assert "not open within 0 s; `hisparse-pd doctor`" in lane.reason
        gpu.may_register.set()
        wait_until(lambda: gpu.calls[-1:] == ["unregister"], "the memory is let go of")
        assert pair.lanes.lane(SESSION) == lane


def test_memory_that_cuda_does_not_take_is_left_to_the_network() -> None:
    with pair_with_gpu() as (pair, gpu):
        gpu.error = RuntimeError("cudaErrorMemoryAllocation")
        lane = pair.register()
        assert lane.kind == "tcp"
        assert (
            "CUDA cannot register 300001 bytes of the decode node: cudaErrorMemoryAllocation" in lane.reason
        )
        wait_until(lambda: not pair.host.connections, "the connection ends")
        pair.write([0], [0], [10])
        assert len(pair.network.sent) == 1


def test_a_gpu_that_cannot_be_opened_is_written_to_over_the_network() -> None:
    with pair_with_gpu(b"of a GPU that is not visible") as (pair, _):
        assert pair.register() == Lane("shm", "both see the same memory; the rest of it over tcp")
        pair.lanes.write(SESSION, ([pair.network.addr], [1 << 50], [9]))
        assert pair.network.sent == [(SESSION, [1 << 50])]


@pytest.mark.I1
def test_what_a_gpu_failed_to_write_may_still_land() -> None:
    with pair_with_gpu() as (pair, gpu):
        assert pair.register().kind == "shm"
        gpu.error = RuntimeError("cudaErrorLaunchFailure")
        with pytest.raises(TransferError, match="RuntimeError: cudaErrorLaunchFailure") as caught:
            pair.write([0], [0], [10])
        assert caught.value.may_still_land
