"""The lanes of a prefill node: over what its writes go to each decode node, chosen when that registers.

``shm``: the decode node is a process of this machine and has handed over its memory (``lane_host.py``), which
is mapped here. A write is a copy in this process then, over when the call returns, and none of its bytes can
come later. Otherwise the lane is the transport's, tcp or rdma.

A pair is on one lane, for good. If a write over the network could follow one over shared memory, the decode
node could not tell from the end of this process that nothing lands any more. Two cases are apart from that.
Memory that is not shared, as that of a GPU, is written over the network beside the lane (``is_sole`` is
False). And a decode node that was lost and comes back is opened anew: the lane first, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from protocol.lane import (
    MAX_LANE_MESSAGE_BYTES,
    MAX_WINDOWS,
    LaneDenied,
    LaneHello,
    LaneOffer,
    Window,
    answer_decoder,
    encoder,
)
from transfer.errors import TransferError
from transfer.extents import SlotArray, as_slots, ranges_around
from transfer.lane_copy import copy_ranges
from transfer.plan import cut_long

log = logging.getLogger(__name__)

OPEN_SECS = 2.0
"""For the decode node's answer, which a thread of it gives within milliseconds."""
PART_BYTES = 8 << 20
"""Copied between two questions whether to stop."""

LaneKind = Literal["shm", "tcp", "rdma"]


class LaneError(Exception):
    """Why memory of a decode node cannot be had."""


@dataclass(frozen=True)
class Lane:
    """What a pair is on, and why. ``is_refused``: on none; the lane that it was on cannot be opened again."""

    kind: LaneKind
    reason: str
    is_refused: bool = False


class Network(Protocol):
    """What lanes need of a ``TransferEngine``."""

    def write(
        self,
        session: str,
        src_addrs: ArrayLike,
        dst_addrs: ArrayLike,
        lengths: ArrayLike,
        stop: Callable[[], str] | None = None,
    ) -> None: ...

    def check_sources(self, src: SlotArray, num_bytes: SlotArray) -> None: ...


class Mapping:
    """Memory of a decode node, mapped into this process. Raises LaneError.

    Stands until it is closed and the last write is over; the decode node sees the connection end then.
    """

    def __init__(self, offer: LaneOffer, instance_id: str, directory: str) -> None:
        self._lock = threading.Lock()
        self._num_writes = 0
        self._is_closing = False
        self._connection = _connect(offer.socket, directory)
        self._maps: list[mmap.mmap] = []
        try:
            windows, descriptors = _introduce(self._connection, LaneHello(offer.token, instance_id, "cpu"))
            try:
                windows = _checked(windows, descriptors)
                self._maps = [_map(window, descriptors[window.descriptor]) for window in windows]
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except BaseException:
            self._unmap()
            raise
        self._starts = np.array([window.base_addr for window in windows], np.int64)
        self._ends = np.array([window.base_addr + window.num_bytes for window in windows], np.int64)
        self._here = np.array([_address(mapped) for mapped in self._maps], np.int64)

    def covers(self, regions: Sequence[tuple[int, int]]) -> bool:
        """Whether all regions, ``(base_addr, num_bytes)`` each, are in the mapped memory."""
        base = np.array([addr for addr, _ in regions], np.int64)
        num_bytes = np.array([size for _, size in regions], np.int64)
        return bool((ranges_around(self._starts, self._ends, base, num_bytes) >= 0).all())

    def windows_of(self, dst: SlotArray, num_bytes: SlotArray) -> SlotArray:
        """Which window each destination lies in; -1: in none. Raises TransferError for one that lies across
        the end of a window."""
        found = ranges_around(self._starts, self._ends, dst, num_bytes)
        across = (found < 0) & (ranges_around(self._starts, self._ends, dst, np.ones_like(dst)) >= 0)
        if across.any():
            worst = int(np.argmax(across))
            raise TransferError(
                f"destination of {num_bytes[worst]} bytes at {dst[worst]:#x} (descriptor {worst} of "
                f"{dst.size}) ends outside of the decode node's memory; nothing was written"
            )
        return found

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The memory stays mapped. Raises TransferError when it is let go of."""
        with self._lock:
            if self._is_closing:
                raise TransferError("this node has let go of the decode node's memory")
            self._num_writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_writes -= 1
                is_last = self._is_closing and not self._num_writes
            if is_last:
                self._unmap()

    def copy(self, src: SlotArray, dst: SlotArray, num_bytes: SlotArray, windows: SlotArray) -> None:
        """Copy to destinations in these windows of theirs; within ``writing``."""
        for window in np.unique(windows).tolist():
            is_there = windows == window
            here = dst[is_there] + (self._here[window] - self._starts[window])
            copy_ranges(src[is_there], here, num_bytes[is_there])

    def close(self) -> None:
        """Let go of the memory, once no write is in progress. May be called again."""
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
            is_last = not was_closing and not self._num_writes
        if is_last:
            self._unmap()

    def wait_for_end(self) -> None:
        """Until the decode node has ended, or the memory was let go of here."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(None)
            self._connection.recv(1)

    def _unmap(self) -> None:
        for mapped in self._maps:
            mapped.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes who waits for the end
        self._connection.close()  # after the memory: it says that no write can land any more


@dataclass(eq=False)
class _Pair:
    """``lane``: None while it is being decided. ``mapping``: of shm only, until the peer is released."""

    offer: LaneOffer | None
    regions: tuple[tuple[int, int], ...]
    lane: Lane | None = None
    mapping: Mapping | None = None
    is_sole: bool = False
    is_opening: bool = False


@dataclass
class Lanes:
    """Writes to all decode nodes, each over its lane. Any thread may call it.

    ``protocol``: the network's. ``why_off``: why shared memory is not used here, empty: it is.
    ``directory``: where the sockets of decode nodes are, beside the abstract names. ``on_decided``: called
    from any thread when ``take_decided`` has something.
    """

    network: Network
    protocol: Literal["tcp", "rdma"]
    instance_id: str
    why_off: str = ""
    directory: str = ""
    on_decided: Callable[[], None] = lambda: None
    _pairs: dict[str, _Pair] = field(default_factory=dict, init=False)
    _decided: list[str] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def register(
        self, session: str, offer: LaneOffer | None, regions: Sequence[tuple[int, int]]
    ) -> Lane | None:
        """A decode node has registered ``regions``, ``(base_addr, num_bytes)`` each. None: the lane is being
        opened, and ``take_decided`` will name the session."""
        with self._lock:
            pair = self._pairs.get(session)
            if pair is None or (pair.offer, pair.regions) != (offer, tuple(regions)):  # another process
                if pair is not None and pair.mapping is not None:
                    pair.mapping.close()
                pair = self._pairs[session] = _Pair(offer, tuple(regions))
                self._begin(session, pair)
            elif pair.lane is not None and pair.lane.kind == "shm" and pair.mapping is None:
                pair.lane = None
                self._begin(session, pair)
            return pair.lane

    def lane(self, session: str) -> Lane | None:
        """What a registered session is on; None while that is being decided, or when nobody registered it."""
        with self._lock:
            pair = self._pairs.get(session)
            return None if pair is None else pair.lane

    def take_decided(self) -> list[str]:
        """Sessions whose lane was decided since the last call, after ``register`` had returned None."""
        with self._lock:
            decided, self._decided = self._decided, []
            return decided

    def release(self, session: str) -> None:
        """The decode node is lost and nothing further starts for it. Its memory stays until the write in
        progress is over."""
        with self._lock:
            pair = self._pairs.get(session)
            if pair is not None and pair.mapping is not None:
                pair.mapping.close()
                pair.mapping = None

    def close(self) -> None:
        """Let go of all memory. What is written from now on fails."""
        with self._lock:
            sessions = list(self._pairs)
            self.why_off = "this node is shutting down"
        for session in sessions:
            self.release(session)

    def write(
        self,
        session: str,
        src_addrs: ArrayLike,
        dst_addrs: ArrayLike,
        lengths: ArrayLike,
        stop: Callable[[], str] | None = None,
    ) -> None:
        """As ``TransferEngine.write``, over the session's lane. Over shared memory nothing may still land
        after an error."""
        with self._lock:
            pair = self._pairs.get(session)
        if pair is None or not (pair.is_sole or pair.mapping is not None):
            self.network.write(session, src_addrs, dst_addrs, lengths, stop)
            return
        src, dst, num_bytes = as_slots(src_addrs), as_slots(dst_addrs), as_slots(lengths)
        if not src.size == dst.size == num_bytes.size:
            raise TransferError(f"{src.size} sources, {dst.size} destinations and {num_bytes.size} lengths")
        self.network.check_sources(src, num_bytes)
        if (mapping := pair.mapping) is None:
            raise TransferError(f"this node has let go of the memory of session {session}")
        with mapping.writing():
            windows = mapping.windows_of(dst, num_bytes)
            elsewhere = windows < 0
            if pair.is_sole and elsewhere.any():
                worst = int(np.argmax(elsewhere))
                raise TransferError(
                    f"destination of {num_bytes[worst]} bytes at {dst[worst]:#x} (descriptor {worst} of "
                    f"{dst.size}) is not in the memory of session {session}; nothing was written"
                )
            here = ~elsewhere
            _copy_in_parts(mapping, src[here], dst[here], num_bytes[here], stop)
        if elsewhere.any():
            self.network.write(session, src[elsewhere], dst[elsewhere], num_bytes[elsewhere], stop)

    # --- opening ---------------------------------------------------------------------------------------

    def _begin(self, session: str, pair: _Pair) -> None:
        """With the lock held."""
        if self.why_off or pair.offer is None:
            reason = self.why_off or "the decode node offers no shared memory"
            pair.lane = Lane(self.protocol, reason)
            self._say(session, pair.lane)
            return
        if not pair.is_opening:
            pair.is_opening = True
            name = f"lane to {session}"
            threading.Thread(target=self._open, args=(session, pair), name=name, daemon=True).start()

    def _open(self, session: str, pair: _Pair) -> None:
        """In a thread of its own: the decode node may be stopped."""
        assert pair.offer is not None
        mapping: Mapping | None = None
        try:
            mapping = Mapping(pair.offer, self.instance_id, self.directory)
            lane = Lane("shm", "both see the same memory")
        except Exception as error:
            if not isinstance(error, LaneError):
                log.exception("the lane to session %s", session)
            # Once a pair wrote over shared memory alone, the network is no way out: see above.
            reason = str(error) if isinstance(error, LaneError) else f"{type(error).__name__}: {error}"
            lane = Lane("shm" if pair.is_sole else self.protocol, reason, is_refused=pair.is_sole)
        with self._lock:
            pair.is_opening = False
            if self._pairs.get(session) is not pair or self.why_off:  # another process came in its place
                if mapping is not None:
                    mapping.close()
                return
            if mapping is not None:
                pair.mapping, pair.is_sole = mapping, mapping.covers(pair.regions)
                if not pair.is_sole:
                    lane = Lane("shm", f"both see the same memory; the rest of it over {self.protocol}")
            pair.lane = lane
            self._decided.append(session)
        self._say(session, lane)
        self.on_decided()
        if mapping is not None:
            mapping.wait_for_end()
            mapping.close()  # of a node that has ended the memory is still there while it is mapped here

    def _say(self, session: str, lane: Lane) -> None:
        log.info("decode node at %s: lane %s (%s)", session, lane.kind, lane.reason)


def _copy_in_parts(
    mapping: Mapping, src: SlotArray, dst: SlotArray, num_bytes: SlotArray, stop: Callable[[], str] | None
) -> None:
    src, dst, num_bytes = cut_long(src, dst, num_bytes, PART_BYTES)
    windows = mapping.windows_of(dst, num_bytes)
    ends = np.cumsum(num_bytes)
    first = 0
    while first < ends.size:
        num_copied = int(ends[first - 1]) if first else 0
        if stop is not None and (reason := stop()):
            raise TransferError(f"stopped after {num_copied} bytes: {reason}")
        after = max(first + 1, int(np.searchsorted(ends, num_copied + PART_BYTES, side="right")))
        part = slice(first, after)
        mapping.copy(src[part], dst[part], num_bytes[part], windows[part])
        first = after


def _connect(name: str, directory: str) -> socket.socket:
    """To the socket of a decode node. Raises LaneError."""
    places = [str(Path(directory) / name)] if directory else []
    for address in (*places, f"\0{name}"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(OPEN_SECS)
        try:
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise LaneError(f"the decode node's socket {name} cannot be opened: {error}") from error
    where = f"in {directory} and among" if directory else "among"
    raise LaneError(
        f"the decode node's socket {name} is not {where} this machine's abstract names: it is on "
        "another machine, or in a container without a common --same-host-dir"
    )


def _introduce(sock: socket.socket, hello: LaneHello) -> tuple[tuple[Window, ...], list[int]]:
    """Windows and descriptors, which are the caller's to close. Raises LaneError."""
    try:
        sock.send(encoder.encode(hello))
        packet, descriptors, _, _ = socket.recv_fds(sock, MAX_LANE_MESSAGE_BYTES, MAX_WINDOWS)
    except OSError as error:
        raise LaneError(f"the decode node's socket gave no answer within {OPEN_SECS:g} s: {error}") from error
    try:
        answer = answer_decoder.decode(packet)
    except msgspec.MsgspecError as error:
        answer = LaneDenied(f"a malformed answer: {error}" if packet else "it closed the connection")
    if isinstance(answer, LaneDenied):
        for descriptor in descriptors:
            os.close(descriptor)
        raise LaneError(f"the decode node does not hand its memory over: {answer.reason}")
    return answer.windows, descriptors


def _checked(windows: tuple[Window, ...], descriptors: Sequence[int]) -> tuple[Window, ...]:
    """By address. Raises LaneError unless each is of a file that is long enough and stays so."""
    windows = tuple(sorted(windows, key=lambda window: window.base_addr))
    for window, after in zip(windows, (*windows[1:], None), strict=True):
        end = window.base_addr + window.num_bytes
        if end >= 2**63 or (after is not None and end > after.base_addr):
            raise LaneError(
                f"memory of {window.num_bytes} bytes at {window.base_addr:#x} overlaps other memory"
            )
        if window.descriptor >= len(descriptors):
            raise LaneError(f"descriptor {window.descriptor} of {len(descriptors)} is missing")
        descriptor = descriptors[window.descriptor]
        size = os.fstat(descriptor).st_size
        if size < window.num_bytes:
            raise LaneError(f"a file of {size} bytes is said to be {window.num_bytes} bytes of memory")
        seals = 0
        with contextlib.suppress(OSError):  # no file that has seals
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise LaneError("the decode node's memory is not sealed: it could be taken away in a write")
    return windows


def _map(window: Window, descriptor: int) -> mmap.mmap:
    """Raises LaneError."""
    try:
        mapped = mmap.mmap(descriptor, window.num_bytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as error:
        raise LaneError(f"{window.num_bytes} bytes of the decode node cannot be mapped: {error}") from error
    for hint in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if (advice := getattr(mmap, hint, None)) is not None:
            with contextlib.suppress(OSError):
                mapped.madvise(advice)
    return mapped


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)
