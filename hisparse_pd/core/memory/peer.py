"""Lets a GPU of this process write to another process's memory, on the host or on a GPU, and read from there.

The prefill node's ``shm`` lane uses it (``transfer/lane_memory.py``): a ``GpuWriter`` registers or opens the
decode node's pools once, and each thread that sends or reads then calls ``start_copy``. The decode node's
memory gets an ``ipc_handle`` for each pool on a GPU. Main memory that both processes map is registered with
CUDA in each of them. GPU memory, of the same or another GPU, is opened by its owner's handle (CUDA IPC).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.core.memory.gpu_copies import Addresses, enqueue_copies
from hisparse_pd.core.memory.host import CudaPinning
from hisparse_pd.kernels.cuda_launch import cupy_module

_LAZY_PEER_ACCESS = 1
"""CUDA's cudaIpcMemLazyEnablePeerAccess."""


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
        """Each thread's ``stream``."""

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
        """Enqueue copies, as ``enqueue_copies``, on the calling thread's stream. Raises the driver's error,
        after which some of the copies may still land."""
        with torch.cuda.stream(self._stream()):
            self.enqueue(runs, pieces)
            return GpuCopy()

    def enqueue(self, runs: Sequence[Addresses], pieces: Sequence[Addresses]) -> None:
        """Enqueue copies, as ``enqueue_copies``, on the current stream, behind which the caller waits."""
        enqueue_copies(self._device, runs, pieces)

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._of_thread.stream
        return stream


class GpuCopy:
    """The copies that are enqueued on the current stream."""

    def __init__(self) -> None:
        # A blocking event, because a thread that spins would take a core from the forward.
        self._over = torch.cuda.Event(blocking=True)
        self._over.record()

    def wait(self) -> None:
        """Block, without the interpreter's lock, until all of it has landed. Raises the driver's error."""
        self._over.synchronize()
