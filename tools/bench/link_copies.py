"""The processes of ``tools.bench.links``, which gives them orders through a pipe.

``serve_copies`` runs in one process for each GPU: it makes blocks of main memory on a NUMA node and copies
between them and the device. ``serve_host_rates`` measures main memory alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hisparse_pd.base.process import die_with_parent
from hisparse_pd.core.memory.device import use_device
from hisparse_pd.core.memory.host import CudaPinning, allocate_host, touch_slices
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import ANYWHERE, Placement, PoolPolicy, place_ranks
from hisparse_pd.core.memory.numa_binding import bind_threads, place_memory, with_allowed_policy

PIECE_BYTES = 64 << 20
"""Length of one copy; a stream has two copies at a time."""
MAX_THREADS = 32
"""Most threads that read or copy main memory together; fewer are enough to saturate a socket's memory."""
_MAP_HUGETLB = 0x40000
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@dataclass(frozen=True)
class Block:
    """An order to make main memory to copy from or to. ``node``: None leaves it wherever threads on any CPU
    touch it.

    ``pages``: ``shared`` and ``private`` are the kinds that pools have, both with huge pages where the kernel
    gives them; ``small`` has pages of 4 KiB, ``hugetlb`` reserved pages of 2 MiB.
    """

    node: int | None
    pages: str
    num_bytes: int


@dataclass(frozen=True)
class Copy:
    """An order to copy for ``secs`` from ``start_at`` on the monotonic clock, which all processes share.

    ``direction``: ``to_device``, ``to_host``, or ``both`` at once, each with half of the block.
    """

    direction: str
    start_at: float
    secs: float


# --- blocks -----------------------------------------------------------------------------------------------


def placement_on(node: int | None, machine: Machine) -> Placement:
    """Return a placement that binds memory to ``node``. If the kernel refuses to bind, memory lies where the
    CPUs are that touch it first; if ``node`` is None, nothing is placed."""
    if node is None:
        return ANYWHERE
    (placement,) = place_ranks(str(node), ["cpu"], machine)
    return with_allowed_policy(replace(placement, policy=PoolPolicy.BIND))


def stay_on(cpus: Sequence[int]) -> None:
    """Keep all threads of this process on these CPUs from now on."""
    # The node's number is only for a warning: threads are bound to the CPUs, and no memory is.
    bind_threads(Placement("of the benchmark", 0, tuple(cpus)))


@contextmanager
def allocated(block: Block, all_cpus: Sequence[int], *, pinned: bool) -> Iterator[Tensor]:
    """Yield the block as a tensor, touched by CPUs of its node, and registered with CUDA if ``pinned``."""
    placement = placement_on(block.node, Machine())
    stay_on(placement.cpus or all_cpus)
    if block.pages in ("shared", "private"):
        pool = allocate_host(
            block.num_bytes, pinned=pinned, shared=block.pages == "shared", placement=placement
        )
        try:
            yield pool.tensor
        finally:
            pool.close()
        return
    flags = _PRIVATE | (_MAP_HUGETLB if block.pages == "hugetlb" else 0)
    mapping = mmap.mmap(-1, block.num_bytes, flags=flags)
    if block.pages == "small":
        with suppress(OSError):  # the kernel may have no huge pages
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    addr = tensor.data_ptr()
    place_memory(addr, block.num_bytes, placement, "a block")
    tensor.zero_()
    if pinned:
        CudaPinning().register(addr, block.num_bytes)
    try:
        yield tensor
    finally:
        if pinned:
            CudaPinning().unregister(addr)


def where_it_is(addr: int) -> dict[str, Any]:
    """Return the share of a mapping's pages on each node, by number, and the share in huge pages."""
    lines = _text("/proc/self/numa_maps").splitlines()
    starts = [int(line.split()[0], 16) for line in lines]
    line = next((line for start, line in zip(starts, lines, strict=True) if start == addr), "")
    pages = {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", line)}
    facts: dict[str, Any] = {"on_nodes": {node: count / sum(pages.values()) for node, count in pages.items()}}
    mapping = re.search(rf"^0*{addr:x}-.*?(?=^[0-9a-f]+-|\Z)", _text("/proc/self/smaps"), re.M | re.S)
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", mapping[0], re.M)) if mapping else {}
    huge = sum(int(sizes.get(name, 0)) for name in ("AnonHugePages", "ShmemPmdMapped", "Private_Hugetlb"))
    facts["huge_share"] = huge / int(sizes["Size"]) if sizes else None
    return facts


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# --- a GPU's process --------------------------------------------------------------------------------------


class Copier:
    """One process's side of its link: a block, and as much memory of its device."""

    def __init__(self, device: str, home: Sequence[int]) -> None:
        """``home``: the CPUs that its threads copy from, those of the GPU's node."""
        self._device = torch.device(device)
        self._home = home
        self._all_cpus = sorted(os.sched_getaffinity(0))
        self._dev = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._block = ExitStack()
        """Frees the present block when it is closed."""

    def make(self, block: Block) -> dict[str, Any]:
        """Replace the previous block. Returns where the new one lies."""
        self.close()
        if self._dev.numel() != block.num_bytes:
            self._dev = torch.empty(block.num_bytes, dtype=torch.uint8, device=self._device)
        is_gpu = self._device.type == "cuda"
        self._host = self._block.enter_context(allocated(block, self._all_cpus, pinned=is_gpu))
        stay_on(self._all_cpus if block.node is None else self._home)
        for target, source in ((self._dev, self._host), (self._host, self._dev)):
            target.copy_(source)  # pays the one-time cost of the first copy
        self._synchronize()
        return where_it_is(self._host.data_ptr())

    def copy(self, order: Copy) -> dict[str, float]:
        """Copy as ordered. Returns GB/s by direction. Raises RuntimeError without a block."""
        if not self._host.numel():
            raise RuntimeError("its block could not be made")
        half = self._host.numel() // 2 if order.direction == "both" else self._host.numel()
        jobs: dict[str, tuple[Tensor, Tensor]] = {}
        if order.direction in ("to_device", "both"):
            jobs["to_device"] = self._dev[:half], self._host[:half]
        if order.direction in ("to_host", "both"):
            jobs["to_host"] = self._host[-half:], self._dev[-half:]
        with ThreadPoolExecutor(len(jobs)) as threads:
            found = {
                name: threads.submit(self._copy_until, target, source, order)
                for name, (target, source) in jobs.items()
            }
            return {name: rate.result(order.secs + 60.0) for name, rate in found.items()}

    def close(self) -> None:
        self._host = torch.empty(0, dtype=torch.uint8)
        block, self._block = self._block, ExitStack()
        block.close()

    def _copy_until(self, target: Tensor, source: Tensor, order: Copy) -> float:
        """Copy for the time of ``order``, again and again. Returns GB/s."""
        pieces = list(zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True))
        is_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if is_gpu else None
        in_flight: deque[torch.cuda.Event] = deque()
        num_bytes = num_copies = 0
        while time.monotonic() < order.start_at:
            pass  # a sleep would end late
        started = time.monotonic()
        while not num_copies or time.monotonic() < order.start_at + order.secs:
            to, source_piece = pieces[num_copies % len(pieces)]
            with torch.cuda.stream(stream):
                to.copy_(source_piece, non_blocking=True)
                if stream is not None:
                    in_flight.append(stream.record_event())
            num_copies, num_bytes = num_copies + 1, num_bytes + to.numel()
            if len(in_flight) > 1:
                in_flight.popleft().synchronize()
        if stream is not None:
            stream.synchronize()
        return num_bytes / (time.monotonic() - started) / 1e9

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def serve_copies(orders: Connection, device: str, home: Sequence[int]) -> None:
    """Carry out the orders from ``orders`` until it ends, and answer each with its result or an error."""
    die_with_parent()
    use_device(device)
    copier = Copier(device, home)
    with suppress(EOFError):
        while (order := orders.recv()) is not None:
            try:
                orders.send(copier.make(order) if isinstance(order, Block) else copier.copy(order))
            except Exception as error:
                orders.send({"error": f"{type(error).__name__}: {error}"})
    copier.close()


# --- main memory alone ------------------------------------------------------------------------------------

_Part: TypeAlias = tuple[int, int]
"""The bytes of the memory, from the first to before the second, that a thread works on."""


def serve_host_rates(answers: Connection, nodes: Sequence[int | None], num_bytes: int, secs: float) -> None:
    """Send a row for each pair of nodes, with the GB/s at which CPUs of the first read and copy memory of the
    second, and then None."""
    die_with_parent()
    for cpus_of in nodes:
        for memory_of in nodes:
            row: dict[str, Any] = {"cpus_of": cpus_of, "memory_of": memory_of}
            try:
                row |= _host_rates(cpus_of, memory_of, num_bytes, secs)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            answers.send(row)
    answers.send(None)


def _host_rates(cpus_of: int | None, memory_of: int | None, num_bytes: int, secs: float) -> dict[str, Any]:
    all_cpus = sorted(os.sched_getaffinity(0))
    try:
        with allocated(Block(memory_of, "private", 2 * num_bytes), all_cpus, pinned=False) as memory:
            cpus = placement_on(cpus_of, Machine()).cpus or all_cpus
            stay_on(cpus)
            first, second = memory.data_ptr(), memory.data_ptr() + num_bytes
            libc = ctypes.CDLL(None)
            libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
            parts = touch_slices(num_bytes, min(MAX_THREADS, len(cpus)))

            def compare(part: _Part) -> None:  # equal bytes, so that both are read to their ends
                libc.memcmp(first + part[0], second + part[0], part[1] - part[0])

            def copy(part: _Part) -> None:
                ctypes.memmove(second + part[0], first + part[0], part[1] - part[0])

            return {
                "threads": len(parts),
                "read_gb_s": 2 * _rate(compare, parts, secs),
                "copied_gb_s": _rate(copy, parts, secs),
            }
    finally:
        stay_on(all_cpus)


def _rate(work: Callable[[_Part], None], parts: Sequence[_Part], secs: float) -> float:
    """Return the GB/s of ``work`` over ``parts``, each repeated in a thread of its own until the time is
    up."""
    barrier = threading.Barrier(len(parts) + 1)
    counts = [0] * len(parts)
    times = [0.0] * len(parts)

    def run(number: int) -> None:
        work(parts[number])
        barrier.wait(60.0)
        started = time.monotonic()
        while time.monotonic() < started + secs:
            work(parts[number])
            counts[number] += parts[number][1] - parts[number][0]
        times[number] = time.monotonic() - started

    with ThreadPoolExecutor(len(parts)) as threads:
        running = [threads.submit(run, number) for number in range(len(parts))]
        barrier.wait(60.0)
        for thread in running:
            thread.result(secs + 60.0)
    return sum(count / taken for count, taken in zip(counts, times, strict=True)) / 1e9
