"""Lets a GPU of this process write to another process's memory, on the host or on a GPU, and read from there.

The prefill node's ``shm`` lane uses it (``transfer/lane_memory.py``): a ``GpuWriter`` registers or opens the
decode node's pools once, and each thread that sends or reads then calls ``start_copy``. The decode node's
memory gets an ``ipc_handle`` for each pool on a GPU. Main memory that both processes map is registered with
CUDA in each of them. GPU memory, of the same or another GPU, is opened by its owner's handle (CUDA IPC). The
GPU's copy engine copies long ranges, a kernel short ones (``csrc/lane_copy.cu``). cupy is imported, and the
kernel compiled, on first use."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.core.memory.host import CudaPinning
from hisparse_pd.kernels.cuda_launch import cupy_module, translation_unit

Addresses = npt.NDArray[np.int64]

NUM_BLOCKS = 32
NUM_THREADS = 256
"""The size of the copy kernel's launches: it fills PCIe and leaves the rest of the GPU to the forward."""
_MEMCPY_DEFAULT = 4
_LAZY_PEER_ACCESS = 1
"""CUDA's cudaMemcpyDefault and cudaIpcMemLazyEnablePeerAccess."""


def ipc_handle(memory: Tensor) -> tuple[bytes, int]:
    """Return the handle by which another process opens ``memory`` on a GPU, and its offset in the opened
    memory.

    Raises RuntimeError or the driver's error where there is none, such as in expandable segments.
    """
    from cuda.bindings import driver

    with torch.cuda.device(memory.device):
        error, base, _ = driver.cuMemGetAddressRange(memory.data_ptr())
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{error.name} from cuMemGetAddressRange at {memory.data_ptr():#x}")
        handle = cupy_module().cuda.runtime.ipcGetMemHandle(int(base))
    return bytes(handle), memory.data_ptr() - int(base)


class GpuWriter:
    """Copies from ``sources``, tensors on ``device``, to memory of other processes, and from there to them;
    safe for any thread."""

    def __init__(self, device: torch.device, sources: Sequence[Tensor]) -> None:
        self._device = device
        in_order = sorted((source.data_ptr(), source.data_ptr() + source.nbytes) for source in sources)
        # An empty range at 0 comes first, so that every address has a range that begins at or before it.
        self._starts = np.array([0, *(start for start, _ in in_order)], np.int64)
        self._ends = np.array([0, *(end for _, end in in_order)], np.int64)
        self._sources = tuple(sources)  # keeps their memory allocated
        self._pinning = CudaPinning()
        self._of_thread = threading.local()
        """Each thread's ``channel``."""

    def owns(self, addrs: Addresses) -> npt.NDArray[np.bool_]:
        """Return for each address whether it lies in the sources."""
        return addrs < self._ends[np.searchsorted(self._starts, addrs, side="right") - 1]

    def register(self, addr: int, num_bytes: int) -> None:
        """Let the GPU reach main memory. Some 1.5 GB of 4 KiB pages are registered a second.

        Raises the driver's error.
        """
        with torch.cuda.device(self._device):
            self._pinning.register(addr, num_bytes)

    def unregister(self, addr: int) -> None:
        """Undo ``register``; no copy may be in progress."""
        with torch.cuda.device(self._device):
            self._pinning.unregister(addr)

    def open(self, handle: bytes) -> int:
        """Map another process's memory by its ``ipc_handle``. Returns its address. Raises the driver's
        error."""
        with torch.cuda.device(self._device):
            return int(cupy_module().cuda.runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))

    def close(self, addr: int) -> None:
        """Undo ``open``; no copy may be in progress."""
        with torch.cuda.device(self._device):
            cupy_module().cuda.runtime.ipcCloseMemHandle(addr)

    def start_copy(self, runs: Sequence[Addresses], pieces: Sequence[Addresses]) -> GpuCopy:
        """Enqueue copies of ``runs``, long ranges for the copy engine, and of ``pieces``, short ones for the
        kernel. Each has three columns, int64 [n]: sources, destinations and lengths in bytes.

        Waits only for the copy before this thread's latest one, whose buffer it takes. Raises the driver's
        error, after which some of the copy may still land.
        """
        with torch.cuda.device(self._device):
            channel = self._channel()
            copying = channel.next_copy()
            with torch.cuda.stream(channel.stream):
                for src, dst, length in zip(*(column.tolist() for column in runs), strict=True):
                    cupy_module().cuda.runtime.memcpyAsync(
                        dst, src, length, _MEMCPY_DEFAULT, channel.stream.cuda_stream
                    )
                if pieces[0].size:
                    channel.launch(pieces, copying)
                copying.over.record(channel.stream)
        return copying

    def _channel(self) -> _Channel:
        if not hasattr(self._of_thread, "channel"):
            self._of_thread.channel = _Channel(self._device)
        channel: _Channel = self._of_thread.channel
        return channel


class _Handle:
    """A torch stream in the form that cupy takes from other libraries."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class GpuCopy:
    """An enqueued copy, and the buffer of addresses that its kernel reads; used again for later copies."""

    def __init__(self, device: torch.device) -> None:
        # A blocking event, because a thread that spins would take a core from the forward.
        self.over = torch.cuda.Event(blocking=True)
        """Recorded behind the copy: it has happened when all of the copy has landed."""
        self.staged = torch.empty(0, dtype=torch.int64)
        """The source of the copy to ``addresses``, in pinned memory."""
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        """The columns of the short ranges, one after the other, for the kernel."""

    def wait(self) -> None:
        """Block, without the interpreter's lock, until all of it has landed. Raises the driver's error."""
        self.over.synchronize()

    def stage(self, columns: Addresses) -> None:
        """Put ``columns`` into ``addresses``, on the current stream."""
        size = columns.size
        if size > self.staged.numel():
            self.staged = torch.empty(2 * size, dtype=torch.int64, pin_memory=True)
            self.addresses = torch.empty(2 * size, dtype=torch.int64, device=self.addresses.device)
        self.staged[:size].copy_(torch.from_numpy(columns.reshape(-1)))
        self.addresses[:size].copy_(self.staged[:size], non_blocking=True)


class _Channel:
    """A thread's stream with two ``GpuCopy`` objects in turn: one is prepared while the other runs."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._cupy_stream = cupy_module().cuda.Stream.from_external(_Handle(self.stream.cuda_stream))
        self._copies = deque([GpuCopy(device), GpuCopy(device)])

    def next_copy(self) -> GpuCopy:
        """Return the object of the copy before the last one, once that copy is over."""
        self._copies.rotate()
        self._copies[0].wait()
        return self._copies[0]

    def launch(self, pieces: Sequence[Addresses], copying: GpuCopy) -> None:
        """Enqueue the kernel that copies ``pieces``, as part of ``copying``."""
        columns = np.stack(pieces)
        copying.stage(columns)
        kernel = _kernel(word_bytes(columns))
        with self._cupy_stream:
            kernel(
                (NUM_BLOCKS,),
                (NUM_THREADS,),
                (np.uint64(copying.addresses.data_ptr()), np.int32(columns.shape[1])),
            )


def word_bytes(columns: Addresses) -> int:
    """Return the size of the widest word, up to 16 bytes, that all addresses and lengths are multiples of."""
    bits = int(np.bitwise_or.reduce(columns, axis=None))
    return next(width for width in (16, 8, 4, 1) if bits % width == 0)


@functools.cache
def _kernel(width: int) -> Any:
    module = cupy_module().RawModule(code=translation_unit("lane_copy.cu"), backend="nvrtc")
    return module.get_function(f"copy_ranges_{width}")
