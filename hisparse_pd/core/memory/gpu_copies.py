"""Copies of byte ranges that a GPU makes, between memory of any kind that it reaches: its own, another GPU's,
and main memory that CUDA has registered.

Its copy engine copies long ranges, a kernel short ones (``csrc/copy_ranges.cu``): any number of them in one
launch, where a call for each would take the host longer than the bytes take the link. cupy is imported, and
the kernel compiled, on first use or by ``compile_copies``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hisparse_pd.kernels.cuda_launch import cupy_module, translation_unit

Addresses = npt.NDArray[np.int64]

NUM_BLOCKS = 32
NUM_THREADS = 256
"""The size of the kernel's launches: it fills PCIe and leaves the rest of the GPU to the forward."""
MOST_RANGES: Final = 1 << 16
"""Most ranges of one launch, whose addresses are staged on the GPU."""
STAGED_BYTES: Final = 3 * 8 * MOST_RANGES
"""Most bytes that the copies of a stream stage on the GPU: a launch's memory serves the next one, too."""
WORD_BYTES: Final = (16, 8, 4, 1)
"""Widths of the words that the kernel copies."""
_MEMCPY_DEFAULT = 4
"""CUDA's cudaMemcpyDefault."""


def enqueue_copies(device: torch.device, runs: Sequence[Addresses], pieces: Sequence[Addresses]) -> None:
    """Enqueue copies of ``runs``, long ranges for the copy engine, and of ``pieces``, short ones for the
    kernel, on the current stream of ``device``. Each has three columns, int64 [n]: sources, destinations and
    lengths in bytes.

    Does not wait. Raises the driver's error, after which some of the copies may still be made.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        copy = cupy_module().cuda.runtime.memcpyAsync
        for src, dst, length in zip(*(column.tolist() for column in runs), strict=True):
            copy(dst, src, length, _MEMCPY_DEFAULT, stream)
        for first in range(0, pieces[0].size, MOST_RANGES):
            _launch(device, np.stack([column[first : first + MOST_RANGES] for column in pieces]))


def _launch(device: torch.device, columns: Addresses) -> None:
    """Enqueue one launch for the ranges of ``columns``, int64 [3, n]."""
    # torch keeps the pinned memory until the copy from it is done, and gives the memory on the device to
    # nothing but later work of this stream.
    addresses = torch.from_numpy(columns).pin_memory().to(device, non_blocking=True)
    parameters = np.uint64(addresses.data_ptr()), np.int32(columns.shape[1])
    stream = _Handle(torch.cuda.current_stream(device).cuda_stream)
    with cupy_module().cuda.Stream.from_external(stream):
        _kernel(word_bytes(columns))((NUM_BLOCKS,), (NUM_THREADS,), parameters)


class _Handle:
    """A torch stream in the form that cupy takes from other libraries."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def word_bytes(columns: Addresses) -> int:
    """Return the size of the widest word, up to 16 bytes, that all addresses and lengths are multiples of."""
    bits = int(np.bitwise_or.reduce(columns, axis=None))
    return next(width for width in WORD_BYTES if bits % width == 0)


def compile_copies(device: torch.device) -> None:
    """Compile the kernel for words of each width, so that no copy waits for that."""
    with torch.cuda.device(device):
        for width in WORD_BYTES:
            _kernel(width)


@functools.cache
def _kernel(width: int) -> Any:
    module = cupy_module().RawModule(code=translation_unit("copy_ranges.cu"), backend="nvrtc")
    return module.get_function(f"copy_ranges_{width}")
