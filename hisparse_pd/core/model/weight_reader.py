"""Reads tensors of safetensors files into the model's memory, with several threads at once.

The loader opens a checkpoint's ``WeightFiles``, plans a ``Placement`` (a tensor of the checkpoint and the
memory that it fills) for each weight, and calls ``read_weights`` once. Tensors are read in pieces of whole
rows, so threads can share a large one. A piece is read straight into its target if possible. Otherwise a
thread reads it into its buffer of one piece, which is pinned for a GPU and copied while other threads read.
Files are read, not mapped: a failed read raises an error that names the tensor; with a mapping it would kill
the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.stored_weights import WeightFile
from hisparse_pd.kernels.block_fp8 import BLOCK, dequantize

log = logging.getLogger(__name__)

NUM_THREADS = 8
PIECE_BYTES = 16 << 20
"""Maximum bytes of a piece, unless one row, with scales one row of blocks, or a tensor that is converted as a
whole is larger."""
SAMPLE_BYTES = 64 << 10
"""Bytes at each end of a tensor that ``is_same`` compares."""
REPORT_INTERVAL_SECS = 0.5
"""Time between two calls of ``on_progress``."""
LOG_INTERVAL_SECS = 5.0

Progress = Callable[[int, int], None]
"""A function that is called now and then with the bytes read so far and the bytes in all."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}
"""The dtypes that are read. Weights in four bits are packed into int32."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file. ``dtype_name``: safetensors' name of the dtype; ``offset``: its first byte in
    the file."""

    name: str
    path: Path
    descriptor: int
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype. Raises CheckpointError for one that weights cannot have."""
        if self.dtype_name not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: {self.name} is in {self.dtype_name}; supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[self.dtype_name]

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def sample(self, start: int) -> bytes:
        """Return ``SAMPLE_BYTES`` from byte ``start`` on, or as many as there are. Raises OSError."""
        num_bytes = min(SAMPLE_BYTES, self.num_bytes - start)
        return os.pread(self.descriptor, num_bytes, self.offset + start)

    def read(self, first_row: int, part: Tensor) -> None:
        """Read the rows from ``first_row`` on into ``part``, a contiguous CPU tensor of their shape and
        dtype.

        Raises CheckpointError when they cannot be read.
        """
        if part.numel() == 0:
            return
        rest = part.view(-1).view(torch.uint8).numpy().data
        offset = self.offset + first_row * (self.num_bytes // self.num_rows)
        while rest:
            try:
                num_bytes = os.preadv(self.descriptor, [rest], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {self.name} cannot be read: {error}") from error
            if num_bytes == 0:
                raise CheckpointError(f"{self.path}: the file ends at byte {offset}, within {self.name}")
            rest, offset = rest[num_bytes:], offset + num_bytes


def is_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same by dtype, shape, and their first and last ``SAMPLE_BYTES``. The loader
    asks this of a matrix of the MTP layer that most checkpoints repeat: all of it is gigabytes."""
    if (one.dtype_name, one.shape) != (other.dtype_name, other.shape):
        return False
    rest = max(0, one.num_bytes - SAMPLE_BYTES)
    return all(one.sample(start) == other.sample(start) for start in (0, rest))


class WeightFiles:
    """The open files of a checkpoint and the tensors that are read from them."""

    def __init__(self, files: Sequence[WeightFile]) -> None:
        """Raises CheckpointError, with the path, if a file is incomplete or is no safetensors file."""
        self._descriptors: list[int] = []
        self._tensors: dict[str, StoredTensor] = {}
        try:
            for file in files:
                self._open(file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.num_bytes for stored in self._tensors.values())

    def get(self, name: str) -> StoredTensor | None:
        return self._tensors.get(name)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _open(self, file: WeightFile) -> None:
        from safetensors import SafetensorError, safe_open

        path = file.path
        try:
            with safe_open(path, framework="pt"):  # checks that every tensor is complete and within the file
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._descriptors.append(descriptor)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path}: the file cannot be read: {error}") from error
        for name, place in file.tensors.items():
            self._tensors[name] = StoredTensor(
                name, path, descriptor, place.dtype_name, place.shape, place.offset, place.num_bytes
            )


@dataclass(frozen=True)
class Placement:
    """A tensor of the checkpoint, and the memory of its shape that it fills, on any device and in any dtype.

    With ``scales``, the tensor is in fp8, and ``target`` gets its values times the scales of their blocks.
    With ``convert``, ``target`` may have another shape: it gets what ``convert`` makes, on its device, of the
    whole tensor and of those ``beside`` it.
    """

    stored: StoredTensor
    target: Tensor
    scales: StoredTensor | None = None
    convert: Callable[..., Tensor] | None = None
    beside: tuple[StoredTensor, ...] = ()

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes can be read straight into the target."""
        target = self.target
        is_unconverted = self.scales is None and self.convert is None and target.dtype == self.stored.dtype
        return is_unconverted and target.device.type == "cpu" and target.is_contiguous()

    @property
    def rows_per_piece(self) -> int:
        stored = self.stored
        if self.convert is not None:
            return stored.num_rows
        rows = max(1, PIECE_BYTES * stored.num_rows // max(1, stored.num_bytes))
        return rows if self.scales is None else max(BLOCK, rows // BLOCK * BLOCK)


@dataclass(frozen=True)
class _Piece:
    """Some rows of a placement, which one thread reads at a time."""

    placement: Placement
    first_row: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        stored = self.placement.stored
        return stored.num_bytes // stored.num_rows * self.num_rows

    @property
    def is_staged(self) -> bool:
        """Whether the piece is read into a thread's buffer first."""
        return not self.placement.is_direct

    @property
    def target(self) -> Tensor:
        """The rows of the placement's target that the piece fills."""
        target = self.placement.target
        is_whole = not target.ndim or self.placement.convert is not None
        return target if is_whole else target[self.first_row : self.first_row + self.num_rows]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its rows in the file."""
        stored = self.placement.stored
        return (self.num_rows, *stored.shape[1:]) if stored.shape else ()


def read_weights(
    placements: Sequence[Placement],
    device: torch.device,
    on_progress: Progress = lambda done, total: None,
    num_threads: int = NUM_THREADS,
) -> None:
    """Fill all targets. ``device``: this process's device. Buffers for targets on GPUs are pinned through its
    driver context; without a current device, torch would make one on the first GPU.

    ``on_progress`` is called by the calling thread. Raises CheckpointError when a tensor cannot be read, and
    any other error of a thread, such as torch.OutOfMemoryError; all threads have ended by then.
    """
    gpus = {placement.target.device for placement in placements if placement.target.device.type == "cuda"}
    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # enqueued work may still use the targets' memory
    reading = Reading(placements, device, pinned=bool(gpus))
    started = time.monotonic()
    next_log_at = started + LOG_INTERVAL_SECS
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
        running = {threads.submit(reading.work) for _ in range(num_threads)}
        try:
            while running:
                done, running = wait(running, REPORT_INTERVAL_SECS, FIRST_EXCEPTION)
                for thread in done:
                    thread.result()
                on_progress(reading.done_bytes, reading.num_bytes)
                if (now := time.monotonic()) >= next_log_at:
                    next_log_at = now + LOG_INTERVAL_SECS
                    log.info("%s", describe(reading.done_bytes, reading.num_bytes, now - started))
        finally:
            reading.stop()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    log.info("%s", describe(reading.done_bytes, reading.num_bytes, time.monotonic() - started))


def describe(done_bytes: int, num_bytes: int, secs: float) -> str:
    """Return one line of progress, after ``secs`` of reading."""
    rate = done_bytes / max(secs, 1e-9)
    line = f"read {done_bytes / 1e9:.1f} of {num_bytes / 1e9:.1f} GB of weights in {secs:.0f} s"
    if done_bytes == num_bytes:
        return f"{line}, {rate / 1e9:.2f} GB/s"
    left = f"{(num_bytes - done_bytes) / rate:.0f} s left" if done_bytes else "nothing yet"
    return f"{line}, {rate / 1e9:.2f} GB/s, {left}"


class Reading:
    """The state that the threads of one ``read_weights`` share: pieces that are left, and bytes that are
    done.

    Each thread runs ``work``. Pieces come in the order of the files.
    """

    def __init__(self, placements: Sequence[Placement], device: torch.device, *, pinned: bool) -> None:
        in_order = sorted(placements, key=lambda placement: (placement.stored.path, placement.stored.offset))
        self.num_bytes = sum(placement.stored.num_bytes for placement in in_order)
        self.done_bytes = 0
        self._pieces = _pieces(in_order)
        self._device = device
        self._is_pinned = pinned
        self.buffer_bytes = max(
            (piece.num_bytes for piece in _pieces(in_order) if piece.is_staged), default=0
        )
        self._lock = threading.Lock()
        self._converting = threading.Lock()
        """Held by the thread that converts a whole tensor, which takes several times its memory."""

    def stop(self) -> None:
        """Let every thread end after its current piece."""
        with self._lock:
            self._pieces = iter(())

    @torch.inference_mode()  # only inference mode may write tensors that a caller made in it
    def work(self) -> None:
        """Read piece after piece in one thread, until none is left or one fails in any thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # otherwise pinning would start the driver on the first GPU
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        copied: torch.cuda.Event | None = None
        try:
            while (piece := self._next()) is not None:
                if not piece.is_staged:
                    piece.placement.stored.read(piece.first_row, piece.target)
                else:
                    if copied is not None:
                        copied.synchronize()
                    copied = _read_through(piece, buffer, self._converting)
                with self._lock:
                    self.done_bytes += piece.num_bytes
        except BaseException:
            self.stop()
            raise
        finally:
            if copied is not None:
                copied.synchronize()  # the buffer can be reused now

    def _next(self) -> _Piece | None:
        with self._lock:
            return next(self._pieces, None)


def _pieces(placements: Sequence[Placement]) -> Iterator[_Piece]:
    for placement in placements:
        num_rows, step = placement.stored.num_rows, placement.rows_per_piece
        for first in range(0, num_rows, step):
            yield _Piece(placement, first, min(step, num_rows - first))


def _read_through(piece: _Piece, buffer: Tensor, converting: threading.Lock) -> torch.cuda.Event | None:
    """Read a piece into ``buffer``, and convert and copy it to its target. Returns the event after which the
    buffer can be reused, or None if it is free at once."""
    placement, target = piece.placement, piece.target
    stored = placement.stored
    staged = buffer[: piece.num_bytes].view(stored.dtype).view(piece.shape)
    stored.read(piece.first_row, staged)
    if placement.convert is not None:
        others = [_whole(each).to(target.device) for each in placement.beside]
        with converting:
            target.copy_(placement.convert(staged.to(target.device, non_blocking=True), *others))
    elif placement.scales is not None:
        scales = _scales(placement.scales, piece).to(target.device)
        staged = dequantize(staged.to(target.device, non_blocking=True), scales, target.dtype)
    elif stored.dtype != target.dtype:
        # Convert on the target's device: copy_ would convert on the CPU, into memory of torch's own.
        staged = staged.to(target.device, non_blocking=True)
    if placement.convert is None:
        target.copy_(staged, non_blocking=True)
    if target.device.type != "cuda":
        return None
    copied: torch.cuda.Event = torch.cuda.current_stream(target.device).record_event()
    return copied


def _whole(stored: StoredTensor) -> Tensor:
    """Read a whole tensor."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read(0, tensor)
    return tensor


def _scales(stored: StoredTensor, piece: _Piece) -> Tensor:
    """Read the scales of a piece's blocks, from the tensor of scales ``stored``."""
    first = piece.first_row // BLOCK
    num_rows = -(-piece.num_rows // BLOCK)
    scales = torch.empty((num_rows, *stored.shape[1:]), dtype=stored.dtype)
    stored.read(first, scales)
    return scales
