"""Main memory for the pools: page-aligned, touched by several threads, registered once with CUDA.

A pinned allocator rounds hundreds of gigabytes up to a power of two and creates their pages in one thread.
Here the pages belong to an anonymous mapping, all cores create them at once, and the driver only pins them.
Memory that another process also maps is a memfd. It has no name, so nothing of it is left when its processes
have ended. On a machine of several NUMA nodes the pages come from the rank's own node.

``decode_node/memory.py`` allocates pools here, as the doctor does a buffer. A prefill node's pools are plain
tensors. A pool's life: ``allocate_host``, registration with the transport, service, unregistration,
``close``. The memory stays mapped until its last tensor is gone, so no reader of a tensor meets unmapped
memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.machine import memlock_limit
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.memory.numa_binding import place_memory

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
MAX_TOUCH_THREADS = 32
"""Most threads that create pages; more threads do not create more pages a second."""
MIN_TOUCH_BYTES = 64 << 20
"""Fewest bytes for each thread; fewer are not worth one more thread."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_PORTABLE, _MAPPED = 1, 2
"""cudaHostRegisterPortable, cudaHostRegisterMapped"""
_GIB = 1 << 30


class HostMemoryError(StartError):
    """Main memory cannot be allocated or pinned; the message names the limit, the value and the remedy."""


class Pinning(Protocol):
    """A way to let a GPU read main memory."""

    def register(self, addr: int, num_bytes: int) -> None:
        """Pin the memory. Raises the driver's error."""

    def unregister(self, addr: int) -> None:
        """Undo ``register`` for the memory at ``addr``."""


class CudaPinning:
    """Pins through the CUDA runtime, for all devices of the process."""

    def register(self, addr: int, num_bytes: int) -> None:
        from cupy.cuda import runtime  # slow to import, and missing on machines without a GPU

        runtime.hostRegister(addr, num_bytes, _PORTABLE | _MAPPED)

    def unregister(self, addr: int) -> None:
        import torch
        from cupy.cuda import runtime

        torch.cuda.synchronize()  # kernels may still read the memory
        runtime.hostUnregister(addr)


class _Mapping(mmap.mmap):
    """An mmap that can have finalizers, which run before the memory is unmapped."""


class HostPool:
    """Zeroed main memory of one pool, made by ``allocate_host``."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int, shared_fd: int | None = None) -> None:
        self.mapping: mmap.mmap | None = mapping
        self.num_bytes = num_bytes
        self._close_fd: Callable[[], object] = lambda: None
        if shared_fd is not None:
            self._close_fd = weakref.finalize(mapping, os.close, shared_fd)
        self.shared_fd = shared_fd
        """The memfd whose bytes, from 0 on, are this memory; None for private memory, and after ``close``."""
        self.unpin: Callable[[], object] | None = None
        """Undoes the registration with CUDA; None where there is none."""

    @property
    def tensor(self) -> Tensor:
        """Return the memory, uint8 [num_bytes], page-aligned. The tensor keeps it mapped, but not pinned.

        Raises HostMemoryError once the pool is closed.
        """
        if self.mapping is None:
            raise HostMemoryError(f"the host pool of {self.num_bytes} bytes is closed")
        import torch  # here, because the doctor uses this module and has to report a broken torch

        return torch.frombuffer(self.mapping, dtype=torch.uint8, count=self.num_bytes)

    def close(self) -> None:
        """Unpin the memory; it is unmapped once no tensor is left on it. May be called more than once.

        The transport must have unregistered the memory. Waits for the GPU, which may still read it.
        """
        unpin, self.unpin = self.unpin, None
        if unpin is not None:
            try:
                unpin()
            except Exception:  # a broken CUDA context, for example, must not keep the process from ending
                log.warning("CUDA cannot unregister %d bytes", self.num_bytes, exc_info=True)
        self._close_fd()
        self.shared_fd = self.mapping = None


def allocate_host(
    num_bytes: int,
    *,
    pinned: bool,
    touch: bool = True,
    shared: bool = False,
    name: str = "host memory",
    pinning: Pinning | None = None,
    placement: Placement = ANYWHERE,
) -> HostPool:
    """Allocate ``num_bytes`` bytes of zeroed memory that starts at a page.

    ``pinned``: let GPUs read and write it at the same address. ``touch``: create all pages now, with several
    threads, and not at their first write. ``shared``: make it a memfd, which other processes can map
    (``HostPool.shared_fd``). ``name``: for the log and for errors. ``pinning``: CUDA's by default.
    ``placement``: the NUMA node of the pages. Raises HostMemoryError, having kept nothing.
    """
    if num_bytes < 1:
        raise HostMemoryError(f"{name}: {num_bytes} bytes; expected at least 1")
    started = time.perf_counter()
    try:
        mapping, shared_fd = _map_shared(num_bytes) if shared else (_Mapping(-1, num_bytes, _PRIVATE), None)
    except (OSError, OverflowError) as error:
        cause = (
            "the limits on a process's address space (ulimit -v) and on committed memory "
            "(vm.overcommit_memory) bound it"
        )
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            cause = "the limit on a process's descriptors (ulimit -n) bounds it"
        remedy = "; --same-host-lane off asks for private memory" if shared else ""
        raise HostMemoryError(
            f"{name}: {num_bytes} bytes ({num_bytes / _GIB:.1f} GiB) cannot be mapped: {error}; "
            f"{cause}{remedy}"
        ) from error
    pool = HostPool(mapping, num_bytes, shared_fd)
    advise(mapping)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    place_memory(addr, len(mapping), placement, name)
    mapped = time.perf_counter()
    if touch:
        touch_pages(addr, num_bytes)
    touched = time.perf_counter()
    if pinned:
        _pin(pool, mapping, addr, name, pinning or CudaPinning())
    pinning_secs = time.perf_counter() - touched
    log.info(
        "%s: %.2f GiB mapped in %.3f s, touched in %.3f s, %s",
        name,
        num_bytes / _GIB,
        mapped - started,
        touched - mapped,
        f"registered with CUDA in {pinning_secs:.3f} s" if pinned else "not registered with CUDA",
    )
    return pool


def _map_shared(num_bytes: int) -> tuple[_Mapping, int]:
    """Return a mapping and its memfd. Raises OSError, and OverflowError if no file can be that long."""
    fd = os.memfd_create("hisparse-pd pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        # A process that shortened the file could kill (SIGBUS) others that have it mapped.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapping = _Mapping(fd, num_bytes, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(fd)
        raise
    return mapping, fd


def num_touch_threads(num_bytes: int, num_cores: int) -> int:
    """Return how many threads touch ``num_bytes`` on a machine of ``num_cores``."""
    return max(1, min(num_cores, MAX_TOUCH_THREADS, num_bytes // MIN_TOUCH_BYTES))


def touch_slices(num_bytes: int, num_threads: int) -> list[tuple[int, int]]:
    """Return half-open ranges of bytes, one for each thread, that cover ``num_bytes`` and meet at pages."""
    num_pages = -(-num_bytes // PAGE_BYTES)
    bounds = [min(num_bytes, part * num_pages // num_threads * PAGE_BYTES) for part in range(num_threads + 1)]
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def touch_pages(addr: int, num_bytes: int) -> None:
    """Write to all pages. ctypes releases the interpreter's lock, so threads run in parallel."""
    num_cores = len(os.sched_getaffinity(0))
    slices = touch_slices(num_bytes, num_touch_threads(num_bytes, num_cores))
    with ThreadPoolExecutor(len(slices)) as threads:
        list(threads.map(lambda bounds: ctypes.memset(addr + bounds[0], 0, bounds[1] - bounds[0]), slices))


def _pin(pool: HostPool, mapping: mmap.mmap, addr: int, name: str, pinning: Pinning) -> None:
    try:
        pinning.register(addr, pool.num_bytes)
    except Exception as error:
        limit = memlock_limit()
        memlock = "unlimited" if limit is None else f"{limit} bytes"
        raise HostMemoryError(
            f"{name}: CUDA cannot register {pool.num_bytes} bytes ({pool.num_bytes / _GIB:.1f} GiB): "
            f"{type(error).__name__}: {error}; locked memory is limited to {memlock} (ulimit -l, docker's "
            "--ulimit memlock=-1), and a container's memory limit counts pinned pages: raise them, or ask "
            "for a smaller pool"
        ) from error
    # A pool that is dropped without close must not leave its addresses pinned: the next mapping at them could
    # not be registered. At exit there is nothing to do, and the driver may be gone by then.
    unpin = weakref.finalize(mapping, pinning.unregister, addr)
    unpin.atexit = False
    pool.unpin = unpin


def advise(mapping: mmap.mmap) -> None:
    """Give the kernel hints about the memory; hints that it does not know have no effect."""
    # Without DONTFORK a forked child would get its own copy of all pinned pages. With huge pages there are
    # 512 times fewer faults, and fewer pages to pin.
    hints = ("MADV_DONTFORK", "MADV_HUGEPAGE")
    for hint in hints:
        if (advice := getattr(mmap, hint, None)) is not None:
            with contextlib.suppress(OSError):
                mapping.madvise(advice)
