"""A decode node's memory in a prefill node of the same machine: opens, maps, writes, reads and unmaps it.

``Lanes`` makes a ``Mapping`` in a thread for each decode node that offers its memory (``lane_host.py`` is the
other end), writes and reads through it, and closes it when that node has ended.

The decode node's answer lists windows: each is one file, or memory of a GPU, and the addresses that it has in
the decode node. Destinations of writes and sources of reads come as such addresses; a ``Mapping`` finds the
window of each, and the place where that window is mapped here.

Everything that the decode node's socket sends is checked: a file must have the stated length and be sealed
against shrinking. If its owner cut the file off, SIGBUS would end this process in the middle of a write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hisparse_pd.core.memory.host import advise
from hisparse_pd.core.paging.extents import SlotArray, ranges_around
from hisparse_pd.protocol.lane import (
    MAX_LANE_MESSAGE_BYTES,
    MAX_WINDOWS,
    LaneDenied,
    LaneHello,
    LaneOffer,
    LaneSole,
    Window,
    answer_decoder,
    encoder,
)
from hisparse_pd.transfer.errors import TransferError
from hisparse_pd.transfer.lane_copy import copy_ranges
from hisparse_pd.transfer.plan import Descriptors, cut_long, for_gpu

if TYPE_CHECKING:
    from hisparse_pd.core.memory.peer import GpuCopy, GpuWriter

log = logging.getLogger(__name__)

ANSWER_SECS = 10.0
"""Limit for the decode node's answer, which one of its threads gives within milliseconds."""
PART_BYTES: Final = 32 << 20
"""Most bytes that are copied between two calls of ``stop``."""
PART_RANGES: Final = 4096
"""Most ranges that are copied between two calls of ``stop``."""


class LaneError(Exception):
    """A decode node's memory cannot be opened."""


class _OpenWindow(NamedTuple):
    """A window that is open in this process, where it begins at ``start_here``."""

    window: Window
    start_here: int


class Mapping:
    """Memory of a decode node, mapped into this process and registered with its ``gpu``. Raises LaneError.

    It is unmapped when it is closed and the last copy is over; the decode node then sees the connection end.
    """

    def __init__(
        self, offer: LaneOffer, instance_id: str, directory: str, gpu: GpuWriter | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._num_copies = 0
        self._is_closing = False
        self._is_unmapped = threading.Event()
        self._connection = _connect(offer.socket, directory)
        self.maps: list[mmap.mmap] = []
        self._gpu = gpu
        self._undo: list[Callable[[], None]] = []
        """Calls that undo CUDA's registrations and opened handles, in the order in which these were made."""
        try:
            windows, descriptors = _introduce(self._connection, LaneHello(offer.token, instance_id))
            try:
                opened = list(self._open(_checked(windows, descriptors), descriptors))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except BaseException:
            self._unmap()
            raise
        # The windows, by number: where each begins and ends in the decode node, and where it begins here.
        self._starts = np.array([each.window.base_addr for each in opened], np.int64)
        self._ends = self._starts + np.array([each.window.num_bytes for each in opened], np.int64)
        self._starts_here = np.array([each.start_here for each in opened], np.int64)
        self._is_on_gpu = np.array([bool(each.window.cuda_handle) for each in opened], np.bool_)

    def _open(self, windows: Sequence[Window], descriptors: Sequence[int]) -> Iterator[_OpenWindow]:
        """Open the windows that can be opened, and yield them. Raises LaneError."""
        for window in windows:
            if not window.cuda_handle:
                self.maps.append(_map(window, descriptors[window.descriptor]))
                start_here = int(np.frombuffer(self.maps[-1], np.uint8).ctypes.data)
                self._register(start_here, window.num_bytes)
                yield _OpenWindow(window, start_here)
            elif self._gpu is not None:
                try:
                    base = self._gpu.open(window.cuda_handle)
                except Exception as error:  # such as a GPU that is hidden from this process
                    log.warning("memory of the decode node's GPU cannot be opened here: %s", error)
                    continue
                self._undo.append(partial(self._gpu.close, base))
                yield _OpenWindow(window, base + window.cuda_offset)

    def _register(self, addr: int, num_bytes: int) -> None:
        """Let this node's GPU, if it has one, reach mapped main memory. Raises LaneError."""
        if self._gpu is None:
            return
        try:
            self._gpu.register(addr, num_bytes)
        except Exception as error:
            raise LaneError(f"CUDA cannot register {num_bytes} bytes of the decode node: {error}") from error
        self._undo.append(partial(self._gpu.unregister, addr))

    def covers(self, regions: Sequence[tuple[int, int]]) -> bool:
        """Return whether all regions, ``(base_addr, num_bytes)`` each, lie in the mapped memory."""
        base = np.array([addr for addr, _ in regions], np.int64)
        num_bytes = np.array([size for _, size in regions], np.int64)
        return bool((ranges_around(self._starts, self._ends, base, num_bytes) >= 0).all())

    def write(
        self, writes: Descriptors, stop: Callable[[], str] | None = None, *, may_be_elsewhere: bool = False
    ) -> NDArray[np.bool_]:
        """Copy what goes to this memory; returns which destinations are elsewhere, bool [num_descriptors].

        ``may_be_elsewhere``: leave such destinations to the caller; otherwise they are an error. ``stop`` is
        called between parts; if it returns a reason, the write ends with it. Raises TransferError, also once
        the mapping is closed; bytes may still land only after a failure of the GPU.
        """
        return self._copy(writes, stop, may_be_elsewhere, is_read=False)

    def read(
        self, reads: Descriptors, stop: Callable[[], str] | None = None, *, may_be_elsewhere: bool = False
    ) -> NDArray[np.bool_]:
        """Copy what comes from this memory, as ``write`` copies what goes there; returns which sources are
        elsewhere."""
        return self._copy(reads, stop, may_be_elsewhere, is_read=True)

    def pin(self) -> None:
        """Keep the memory mapped, for a copy, until ``unpin``. Raises TransferError once it is closed."""
        with self._lock:
            if self._is_closing:
                raise TransferError("this node has closed the decode node's memory")
            self._num_copies += 1

    def unpin(self) -> None:
        """Undo a ``pin``: its copy is over."""
        with self._lock:
            self._num_copies -= 1
            is_last = self._is_closing and not self._num_copies
        if is_last:
            self._unmap_in_thread()

    def enqueue_reads(self, reads: Descriptors, most_long: int) -> None:
        """Enqueue reads by this node's GPU into its own memory, on its current stream. The caller has pinned
        this memory until they are over. ``most_long``: see ``for_gpu``. Raises TransferError, after which
        nothing was enqueued, and the driver's error."""
        assert self._gpu is not None, "a GPU reads"
        windows = self._windows_of(reads, may_be_elsewhere=False, is_read=True)
        to_here = (self._starts_here - self._starts)[windows]
        here = Descriptors(reads.src_addrs + to_here, reads.dst_addrs, reads.lengths)
        self._gpu.enqueue(*for_gpu(here, most_long))

    def _copy(
        self, moves: Descriptors, stop: Callable[[], str] | None, may_be_elsewhere: bool, *, is_read: bool
    ) -> NDArray[np.bool_]:
        self.pin()
        try:
            windows = self._windows_of(moves, may_be_elsewhere, is_read=is_read)
            self._copy_in_parts(windows, moves, stop, is_read=is_read)
            return windows < 0
        finally:
            self.unpin()

    def _windows_of(self, moves: Descriptors, may_be_elsewhere: bool, *, is_read: bool) -> SlotArray:
        """Return the window in which each address of the decode node lies, or -1 for none. Raises
        TransferError for a -1 unless it ``may_be_elsewhere``, and for a range across the end of a window."""
        addrs, num_bytes = moves.src_addrs if is_read else moves.dst_addrs, moves.lengths
        found = ranges_around(self._starts, self._ends, addrs, num_bytes)
        bad = found < 0
        if may_be_elsewhere and bad.any():
            begins_in_window = ranges_around(self._starts, self._ends, addrs, np.ones_like(addrs)) >= 0
            bad &= begins_in_window
        if bad.any():
            worst = int(np.argmax(bad))
            side, done = ("source", "read") if is_read else ("destination", "written")
            raise TransferError(
                f"{side} of {num_bytes[worst]} bytes at {addrs[worst]:#x} (descriptor {worst} of "
                f"{addrs.size}) is not within the decode node's memory; nothing was {done}"
            )
        return found

    def _copy_in_parts(
        self, windows: SlotArray, moves: Descriptors, stop: Callable[[], str] | None, *, is_read: bool
    ) -> None:
        """Copy window by window, in parts. While a GPU copies one part, the next is prepared."""
        num_copied = 0
        in_flight: GpuCopy | None = None
        try:
            num_by_window = np.bincount(windows + 1)[1:]  # without the -1 of destinations elsewhere
            for window in np.flatnonzero(num_by_window).tolist():
                for part in _parts(moves.at(windows == window)):
                    if stop is not None and (reason := stop()):
                        raise TransferError(f"stopped after {num_copied} bytes: {reason}")
                    previous, in_flight = in_flight, self._start_copy(window, part, is_read=is_read)
                    _wait(previous)  # after this part has started, so that the GPU always has work
                    num_copied += part.num_bytes
        finally:
            _wait(in_flight)

    def _start_copy(self, window: int, part: Descriptors, *, is_read: bool) -> GpuCopy | None:
        """Copy to or from ``window``: what is in the GPU's pools on this side by the GPU, the rest by this
        process. Returns the copy of the GPU that is under way, or None if all bytes have landed."""
        to_here = self._starts_here[window] - self._starts[window]
        src, dst, lengths = part
        own = dst if is_read else src
        part = (
            Descriptors(src + to_here, dst, lengths) if is_read else Descriptors(src, dst + to_here, lengths)
        )

        by_gpu = np.zeros(lengths.size, np.bool_) if self._gpu is None else self._gpu.owns(own)
        copying: GpuCopy | None = None
        if self._gpu is not None and by_gpu.any():
            with _gpu_failure():
                copying = self._gpu.start_copy(*for_gpu(part.at(by_gpu)))

        by_cpu = part.at(~by_gpu)
        if by_cpu.lengths.size:
            if self._is_on_gpu[window]:
                _wait(copying)  # the caller will not: it gets no copy to wait for
                raise TransferError(
                    "the decode node's GPU cannot be read into main memory"
                    if is_read
                    else "sources in main memory cannot be written to the decode node's GPU"
                )
            copy_ranges(*by_cpu)
        return copying

    def close(self) -> None:
        """Unmap the memory once no copy is in progress. Returns at once; may be called again."""
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
            is_last = not was_closing and not self._num_copies
        if is_last:
            self._unmap_in_thread()

    def wait_until_unmapped(self, timeout_secs: float) -> None:
        self._is_unmapped.wait(timeout_secs)

    def promise_sole(self) -> None:
        """Promise to write to the decode node through this memory alone, with a CPU."""
        with contextlib.suppress(OSError):  # the decode node may have ended
            self._connection.send(encoder.encode(LaneSole()))

    def wait_for_end(self) -> None:
        """Block until the decode node has ended or this mapping is closed."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(None)
            self._connection.recv(1)

    def _unmap_in_thread(self) -> None:
        """Do ``_unmap``, which takes seconds for a large pool, and more where CUDA has registered it. Without
        a thread to spare it is done here: the decode node waits for the end of the connection."""
        try:
            threading.Thread(target=self._unmap, name="unmap", daemon=True).start()
        except RuntimeError:  # this process, or its container, has as many threads as it may
            self._unmap()

    def _unmap(self) -> None:
        """Undo all of ``__init__``, in the reverse order."""
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception:  # such as a broken CUDA context; this process can still go on to end
                log.warning("CUDA cannot release the decode node's memory", exc_info=True)
        for mapped in self.maps:
            mapped.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes wait_for_end
        self._connection.close()  # after unmapping: its end says that no write can land any more
        self._is_unmapped.set()


@contextmanager
def _gpu_failure() -> Iterator[None]:
    """Turn any error into a TransferError after which bytes may still land."""
    try:
        yield
    except Exception as error:
        reason = f"the GPU's copy to or from the decode node failed: {type(error).__name__}: {error}"
        raise TransferError(reason, may_still_land=True) from error


def _wait(copying: GpuCopy | None) -> None:
    """Block until all bytes have landed, without the interpreter lock. Raises TransferError, after which
    bytes may still land."""
    if copying is not None:
        with _gpu_failure():
            copying.wait()


def _parts(writes: Descriptors) -> Iterator[Descriptors]:
    """Split writes into parts of at most PART_BYTES and PART_RANGES."""
    writes = cut_long(writes, PART_BYTES)
    ends = np.cumsum(writes.lengths)
    first = 0
    while first < ends.size:
        limit = PART_BYTES + (int(ends[first - 1]) if first else 0)
        after = min(int(np.searchsorted(ends, limit, side="right")), first + PART_RANGES)
        yield writes.at(slice(first, after))
        first = after


def _connect(name: str, directory: str) -> socket.socket:
    """Connect to the socket of a decode node. Raises LaneError.

    When the socket's backlog is full, this waits: the kernel queues callers that block. The timeout is
    therefore set as an option: Python's own would make the socket non-blocking, and such a caller fails.
    """
    places = [str(Path(directory) / name)] if directory else []
    for address in (*places, f"\0{name}"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        timeval = struct.pack("@ll", *divmod(round(ANSWER_SECS * 1e6), 10**6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            sock.connect(address)
            sock.settimeout(ANSWER_SECS)
            return sock
        except OSError as error:
            sock.close()
            if error.errno == errno.EAGAIN:
                raise LaneError(
                    f"the decode node's socket {name} has had no room for {ANSWER_SECS:g} s: too many "
                    "processes of this machine connect to it"
                ) from error
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise LaneError(f"the decode node's socket {name} cannot be opened: {error}") from error
    where = f"in {directory} and among" if directory else "among"
    raise LaneError(
        f"the decode node's socket {name} is not {where} this machine's abstract names: it is on "
        "another machine, or in a container without a common --same-host-dir"
    )


def _introduce(sock: socket.socket, hello: LaneHello) -> tuple[tuple[Window, ...], list[int]]:
    """Say hello. Returns windows and descriptors, which the caller must close. Raises LaneError."""
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # denied; the answer says why
            sock.send(encoder.encode(hello))
        try:
            packet, descriptors, _, _ = socket.recv_fds(sock, MAX_LANE_MESSAGE_BYTES, MAX_WINDOWS)
        except ConnectionResetError:  # raised once because nobody read the hello; the answer follows
            packet, descriptors, _, _ = socket.recv_fds(sock, MAX_LANE_MESSAGE_BYTES, MAX_WINDOWS)
    except TimeoutError as error:
        raise LaneError(f"the decode node's socket gave no answer within {ANSWER_SECS:g} s") from error
    except OSError as error:
        raise LaneError(f"the decode node's socket gave no answer: {error}") from error
    try:
        answer = answer_decoder.decode(packet)
    except msgspec.MsgspecError as error:
        answer = LaneDenied(f"malformed answer: {error}" if packet else "it closed the connection")
    if isinstance(answer, LaneDenied):
        for descriptor in descriptors:
            os.close(descriptor)
        raise LaneError(f"the decode node does not hand its memory over: {answer.reason}")
    return answer.windows, descriptors


def _checked(windows: tuple[Window, ...], descriptors: Sequence[int]) -> tuple[Window, ...]:
    """Return the windows sorted by address. Raises LaneError for windows that overlap, and as ``_check_file``
    does."""
    windows = tuple(sorted(windows, key=lambda window: window.base_addr))
    for window, after in zip(windows, (*windows[1:], None), strict=True):
        end = window.base_addr + window.num_bytes
        if end >= 2**63 or (after is not None and end > after.base_addr):
            raise LaneError(
                f"memory of {window.num_bytes} bytes at {window.base_addr:#x} overlaps other memory"
            )
        if not window.cuda_handle:
            _check_file(window, descriptors)
    return windows


def _check_file(window: Window, descriptors: Sequence[int]) -> None:
    """Raise LaneError unless the window's file is there, long enough, and sealed against shrinking."""
    if window.descriptor >= len(descriptors):
        raise LaneError(f"descriptor {window.descriptor} of {len(descriptors)} is missing")
    descriptor = descriptors[window.descriptor]
    size = os.fstat(descriptor).st_size
    if size < window.num_bytes:
        raise LaneError(f"a file of {size} bytes is said to be {window.num_bytes} bytes of memory")
    seals = 0
    with contextlib.suppress(OSError):  # a kind of file without seals
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise LaneError("the decode node's memory is not sealed: it could be taken away in a write")


def _map(window: Window, descriptor: int) -> mmap.mmap:
    """Map a window's file and advise the kernel on its pages. Raises LaneError."""
    try:
        mapped = mmap.mmap(descriptor, window.num_bytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as error:
        raise LaneError(f"{window.num_bytes} bytes of the decode node cannot be mapped: {error}") from error
    advise(mapped)
    return mapped
