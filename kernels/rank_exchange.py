"""The host side of ``csrc/rank_exchange.cu``: collectives of the GPUs of one machine, over each other's
memory.

``hisparse_pd.core.model.rank_exchange`` makes a ``RankMemory``, tells its offer to the other ranks, and
calls ``connect``, which opens their memory (CUDA IPC; no multicast). Then forwards call ``gather`` and
``sum_own``. Every rank makes the same calls with equally large tensors in the same order, on one stream. A
CUDA graph can capture a call, because the device counts the calls. The first ``RankMemory`` imports cupy, and
its ``connect`` compiles the code.

A part is what one rank sends to another in a call. It is cut into pieces: in each round, every block sends
one piece. A part of 1 MiB takes 32 blocks of one piece of 32 KiB each; one of 4 MiB takes two rounds of
pieces of 64 KiB. The memory of a rank has a header, with the number of the last piece that came from each
rank through each block (its channel), and slots for the pieces of the last four numbers (banks).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.cuda_launch import cupy_module, launch, translation_unit

MAIN_SOURCE = "rank_exchange.cu"
MAX_RANKS = 8
NUM_THREADS = 512
NUM_CHANNELS = 32
NUM_BANKS = 4
MAX_PIECE_BYTES = 65536
HEADER_BYTES = 8192
"""The constants from MAX_RANKS to here are the same as in csrc/rank_exchange.cu, which explains why four
banks are enough. A header begins with the counts of pieces."""
MIN_PIECE_BYTES = 4096
"""Fewest bytes of a piece, unless the whole part is smaller: smaller pieces would only occupy more blocks."""
ALIGNMENT = 16
"""Bytes of the widest word; pieces are multiples of it."""
GATHER_WORDS = (16, 4, 1)
SUM_WORDS = {torch.bfloat16: (16, 2), torch.float32: (16, 4)}
"""Widths of words, in bytes, for which there are kernels; the last width fits every length."""
SUM_DTYPES = tuple(SUM_WORDS)

_NUM_COUNTS = NUM_CHANNELS * 32 + NUM_CHANNELS
"""Counts in the header, each of 32 bits: for each channel a line of 32, in which each rank's entry is the
number of the last piece that came from it; behind all lines, for each channel the last number sent."""
IS_OVERDUE = _NUM_COUNTS
"""Index of the overdue flag in the header, in 32-bit words."""
_LAZY_PEER_ACCESS, _MEMCPY_DEFAULT = 1, 4
"""cudaIpcMemLazyEnablePeerAccess, cudaMemcpyDefault"""

_POINTER, _LONG, _INT = np.uint64, np.int64, np.int32
PARAMS = np.dtype(
    [
        ("memory", _POINTER, (MAX_RANKS,)),
        ("x", _POINTER),
        ("out", _POINTER),
        ("part_bytes", _LONG),
        ("part_stride", _LONG),
        ("timeout_ns", _POINTER),  # no pointer, but as wide
        ("rank", _INT),
        ("num_ranks", _INT),
        ("num_rounds", _INT),
        ("piece_bytes", _INT),
        ("only_notes_overdue", _INT),
        ("padding", _INT),
    ],
    align=True,
)
"""ExchangeParams of csrc/rank_exchange.cu, field by field."""


@dataclass(frozen=True)
class Pieces:
    """How the part that one rank sends to another is cut: into ``num_rounds`` rounds of ``num_blocks``
    pieces."""

    num_blocks: int
    num_rounds: int
    piece_bytes: int

    @classmethod
    def of(cls, part_bytes: int) -> Pieces:
        """Return the fewest rounds of pieces that cover ``part_bytes``."""
        num_blocks = min(-(-part_bytes // MIN_PIECE_BYTES), NUM_CHANNELS)
        num_rounds = -(-part_bytes // (num_blocks * MAX_PIECE_BYTES))
        piece_bytes = -(-part_bytes // (num_blocks * num_rounds))
        return cls(num_blocks, num_rounds, -(-piece_bytes // ALIGNMENT) * ALIGNMENT)


def memory_bytes(num_ranks: int) -> int:
    """Return the bytes that each rank allocates, whatever it exchanges."""
    return HEADER_BYTES + NUM_BANKS * num_ranks * NUM_CHANNELS * MAX_PIECE_BYTES


def word_bytes(widths: Sequence[int], *values: int) -> int:
    """Return the widest word that divides all addresses and lengths."""
    return next(width for width in widths if all(value % width == 0 for value in values))


class MemoryOffer(NamedTuple):
    """The offer with which other ranks of the machine open a rank's memory."""

    gpu: str
    """The PCI address of the rank's GPU, which names it in all processes."""
    handle: bytes
    """CUDA's handle of the memory."""


class RankMemory:
    """One rank's memory, to which other ranks write, and the addresses of theirs, for the process's
    lifetime."""

    def __init__(self, device: torch.device, rank: int, num_ranks: int) -> None:
        """Allocate the memory. Raises RuntimeError, or any error of the driver or of an import, if it
        fails."""
        if num_ranks > MAX_RANKS:
            raise RuntimeError(f"{num_ranks} ranks, but a kernel takes at most {MAX_RANKS}")
        self._device, self.rank = device, rank
        runtime = cupy_module().cuda.runtime
        with torch.cuda.device(device):
            self._own = int(runtime.malloc(memory_bytes(num_ranks)))
            self.offer = MemoryOffer(
                gpu=str(runtime.deviceGetPCIBusId(torch.cuda.current_device())),
                handle=bytes(runtime.ipcGetMemHandle(self._own)),
            )
        self._addresses = [self._own] * num_ranks
        self.begin_at(0)

    def connect(self, offers: dict[int, MemoryOffer]) -> None:
        """Open the memory of other ranks, whose ``offers`` are by rank. Raises what the constructor does."""
        runtime = cupy_module().cuda.runtime
        with torch.cuda.device(self._device):
            here = torch.cuda.current_device()
            for rank, (gpu, handle) in offers.items():
                there = runtime.deviceGetByPCIBusId(gpu)
                if not runtime.deviceCanAccessPeer(here, there):
                    raise RuntimeError(
                        f"GPU {self.offer.gpu} does not reach the memory of GPU {gpu}, rank {rank}'s"
                    )
                self._addresses[rank] = int(runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
            for name in kernels():  # now, because a compilation would stop a CUDA graph's capture
                compiled(name)

    def begin_at(self, count: int) -> None:
        """Set the number of each channel's last piece to ``count``, modulo 2^32. No rank may be in an
        exchange, and none may begin one before all ranks have done this. Beside the constructor only tests
        call it."""
        header = np.zeros(HEADER_BYTES // 4, np.uint32)
        header[:_NUM_COUNTS] = count % 2**32
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            cupy_module().cuda.runtime.memcpy(self._own, header.ctypes.data, header.nbytes, _MEMCPY_DEFAULT)
            torch.cuda.synchronize()

    def is_overdue(self) -> bool:
        """Return whether a peer was late since the start. Waits for the device."""
        found = np.zeros(1, np.uint32)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            cupy_module().cuda.runtime.memcpy(
                found.ctypes.data, self._own + 4 * IS_OVERDUE, found.nbytes, _MEMCPY_DEFAULT
            )
        return bool(found[0])

    def gather(self, out: Tensor, x: Tensor, timeout_secs: float, *, only_notes_overdue: bool) -> None:
        """Fill ``out`` [num_ranks * n, …] with ``x`` [n, …] of all ranks, in the order of ranks.

        Both have one dtype, any, and are contiguous on the device. A peer that is later than ``timeout_secs``
        ends the kernel with an error, and with it all work of this process on the GPU. With
        ``only_notes_overdue``, as in trials at the start, ``is_overdue`` reports it instead, and the
        results of this and all later exchanges are invalid.
        """
        _check(out, x, (x.dtype,), len(self._addresses) * x.nbytes, out.nbytes)
        width = word_bytes(GATHER_WORDS, x.nbytes, x.data_ptr(), out.data_ptr())
        self._launch(f"ranks_gather_{width}", out, x, x.nbytes, 0, timeout_secs, only_notes_overdue)

    def sum_own(self, out: Tensor, x: Tensor, timeout_secs: float, *, only_notes_overdue: bool) -> None:
        """Fill ``out`` [n, …] with the sum over all ranks of this rank's part of their ``x`` [num_ranks * n,
        …].

        Both are bfloat16 or float32, contiguous, on the device. The parts are added up in float32 in the
        order of ranks and rounded once, so that an element's bits do not depend on its row or on the number
        of rows. ``timeout_secs`` and ``only_notes_overdue`` are as in ``gather``.
        """
        _check(out, x, SUM_DTYPES, x.nbytes, len(self._addresses) * out.nbytes)
        width = word_bytes(SUM_WORDS[x.dtype], out.nbytes, x.data_ptr(), out.data_ptr())
        name = f"ranks_sum_{str(x.dtype).removeprefix('torch.')}_{width}"
        self._launch(name, out, x, out.nbytes, out.nbytes, timeout_secs, only_notes_overdue)

    def _launch(
        self,
        name: str,
        out: Tensor,
        x: Tensor,
        part_bytes: int,
        part_stride: int,
        timeout_secs: float,
        only_notes_overdue: bool,
    ) -> None:
        """Launch the kernel ``name``. ``part_bytes``: what a rank gets from each other one. ``part_stride``:
        bytes from one rank's part of ``x`` to the next rank's; 0 if all ranks get the same part."""
        if part_bytes == 0:
            return
        pieces = Pieces.of(part_bytes)
        parameters = np.zeros((), PARAMS)
        parameters["memory"][: len(self._addresses)] = self._addresses
        parameters["x"], parameters["out"] = x.data_ptr(), out.data_ptr()
        parameters["part_bytes"], parameters["part_stride"] = part_bytes, part_stride
        parameters["timeout_ns"] = round(1e9 * timeout_secs)
        parameters["rank"], parameters["num_ranks"] = self.rank, len(self._addresses)
        parameters["num_rounds"], parameters["piece_bytes"] = pieces.num_rounds, pieces.piece_bytes
        parameters["only_notes_overdue"] = only_notes_overdue
        launch(compiled(name), self._device, pieces.num_blocks, NUM_THREADS, parameters)


def source() -> str:
    """Return the whole translation unit: ``csrc/rank_exchange.cu`` with its own headers."""
    return translation_unit(MAIN_SOURCE)


def compile_options() -> tuple[str, ...]:
    """Return the compiler's options without the architecture."""
    return ("-std=c++17", "-lineinfo")


def _check(
    out: Tensor, x: Tensor, dtypes: tuple[torch.dtype, ...], num_bytes: int, wanted_bytes: int
) -> None:
    """Raise KernelArgumentError unless dtypes and layouts fit and ``num_bytes`` are ``wanted_bytes``."""
    for name, tensor in (("x", x), ("out", out)):
        if tensor.dtype not in dtypes or not tensor.is_contiguous():
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise KernelArgumentError(
                f"{name}: expected a contiguous tensor of {wanted}, got {tensor.dtype} with strides "
                f"{tensor.stride()}"
            )
    if num_bytes != wanted_bytes or out.dtype != x.dtype:
        raise KernelArgumentError(
            f"out: {list(out.shape)} of {out.dtype} does not match the x of all ranks, "
            f"{list(x.shape)} of {x.dtype}"
        )


def kernels() -> list[str]:
    """Return the names of all kernels."""
    sums = [
        f"ranks_sum_{str(dtype).removeprefix('torch.')}_{width}"
        for dtype, widths in SUM_WORDS.items()
        for width in widths
    ]
    return [*(f"ranks_gather_{width}" for width in GATHER_WORDS), *sums]


@functools.cache
def _module() -> Any:
    return cupy_module().RawModule(code=source(), options=compile_options(), backend="nvrtc")


@functools.cache
def compiled(name: str) -> Any:
    return _module().get_function(name)
