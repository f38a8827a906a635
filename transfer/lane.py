"""The lanes of a prefill node: over what its writes go to each decode node, chosen when that registers.

``shm``: the decode node is a process of this machine and has handed over its memory (``lane_host.py``), which
is mapped here. A write is a copy by this process then, over when the call returns, and none of its bytes can
come later. Where the KV is on a GPU, that copies: to main memory, which is registered with CUDA here as well,
and to the decode node's GPU. Otherwise the lane is the transport's, tcp or rdma.

Where a CPU writes, a pair that began on shared memory stays there. If a write over the network could follow
one over shared memory, the decode node could not tell from the end of this process that nothing lands any
more. So a decode node that was lost and comes back is opened anew, or refused. Memory that is not shared is
written over the network beside the lane, and a GPU's writes may outlive their process: such pairs (their
``is_sole`` is False) wait out the quarantine, and may take the network, as they do until CUDA has registered
the memory. So does a pair whose decode node did not hear it at first: it is on the network until a later try.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.lane import LaneOffer
from transfer.errors import TransferError
from transfer.extents import SlotArray, as_write
from transfer.lane_memory import Gpu, Landing, LaneBusyError, LaneError, Mapping
from transfer.plan import SLICE_BYTES, cut_long
from transfer.sender import Writer

log = logging.getLogger(__name__)

PART_BYTES: Final = 32 << 20
PART_RANGES: Final = 4096
"""Copied between two questions whether to stop, at most. A GPU copies one part while the next is made up."""
GPU_SLICE_BYTES: Final = 256 << 20
"""A room's turn on a lane that a GPU writes to, instead of ``SLICE_BYTES``: 5 ms, against 0.2 ms in which
nothing is copied between two."""

RETRY_SECS = 5.0
"""Between two tries to open memory of a decode node that does not hear."""

CLOSE_SECS = 5.0
"""For letting go of a decode node's memory at the end; the kernel does it otherwise."""

LaneKind = Literal["shm", "tcp", "rdma"]


@dataclass(frozen=True)
class Lane:
    """What a pair is on, and why. ``is_refused``: on none; the lane that it was on cannot be opened again."""

    kind: LaneKind
    reason: str
    is_refused: bool = False


class Network(Writer, Protocol):
    """What lanes need of a ``TransferEngine``."""

    def check_sources(self, src: SlotArray, num_bytes: SlotArray) -> None: ...


@dataclass(eq=False)
class _Pair:
    """``lane``: None while it is being decided. ``mapping``: of shm only, until the peer is released."""

    offer: LaneOffer | None
    regions: tuple[tuple[int, int], ...]
    lane: Lane | None = None
    mapping: Mapping | None = None
    is_sole: bool = False
    was_on_network: bool = False
    """It has been, with the memory not open: what was sent then may still land, so it is not ``is_sole``."""
    is_opening: bool = False
    was_released: bool = False
    has_ended: bool = False
    """The decode node's process has; it does not come back."""


@dataclass
class Lanes:
    """Writes to all decode nodes, each over its lane. Any thread may call it.

    ``protocol``: the network's. ``why_off``: why shared memory is not used here, empty: it is. ``gpu``: what
    the KV here is on, None: it is in main memory.
    ``directory``: where the sockets of decode nodes are, beside the abstract names. ``on_decided``: called
    from any thread when ``take_decided`` has something.
    """

    network: Network
    protocol: Literal["tcp", "rdma"]
    instance_id: str
    why_off: str = ""
    directory: str = ""
    on_decided: Callable[[], None] = lambda: None
    gpu: Gpu | None = None
    _pairs: dict[str, _Pair] = field(default_factory=dict, init=False)
    _decided: list[str] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _is_closed: threading.Event = field(default_factory=threading.Event, init=False)

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
            elif pair.was_released or (pair.lane is not None and pair.lane.is_refused):
                pair.was_released, pair.lane = False, None
                self._begin(session, pair)
            return pair.lane

    def lane(self, session: str) -> Lane | None:
        """What a registered session is on; None while that is being decided, or when nobody registered it."""
        with self._lock:
            pair = self._pairs.get(session)
            return None if pair is None else pair.lane

    def slice_bytes(self, session: str) -> int:
        """What one write to it is to cost at most (``plan.cost``)."""
        lane = self.lane(session)
        return (
            GPU_SLICE_BYTES
            if self.gpu is not None and lane is not None and lane.kind == "shm"
            else SLICE_BYTES
        )

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
            if pair is None:
                return
            if pair.mapping is not None:
                pair.mapping.close()
                pair.mapping, pair.was_released = None, True
            # Of others it has to be remembered what was decided.
            if pair.has_ended or pair.offer is None or self.why_off:
                del self._pairs[session]

    def close(self) -> None:
        """Let go of all memory, waiting a bounded time for that. Nothing may be written any more."""
        with self._lock:
            self.why_off = "this node is shutting down"
            self._is_closed.set()
            sessions = list(self._pairs)
            mappings = [pair.mapping for pair in self._pairs.values() if pair.mapping is not None]
        for session in sessions:
            self.release(session)
        for mapping in mappings:
            mapping.wait_until_unmapped(CLOSE_SECS)

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
        src, dst, num_bytes = as_write(src_addrs, dst_addrs, lengths)
        self.network.check_sources(src, num_bytes)
        if (mapping := pair.mapping) is None:
            raise TransferError(f"this node has let go of the memory of session {session}")
        with mapping.writing():
            windows = mapping.windows_of(dst, num_bytes)
            elsewhere = windows < 0
            is_split = bool(elsewhere.any())
            if pair.is_sole and is_split:
                worst = int(np.argmax(elsewhere))
                raise TransferError(
                    f"destination of {num_bytes[worst]} bytes at {dst[worst]:#x} (descriptor {worst} of "
                    f"{dst.size}) is not in the memory of session {session}; nothing was written"
                )
            _copy_in_parts(mapping, windows, src, dst, num_bytes, stop)
        if is_split:
            self.network.write(session, src[elsewhere], dst[elsewhere], num_bytes[elsewhere], stop)

    # --- opening ---------------------------------------------------------------------------------------

    def _begin(self, session: str, pair: _Pair) -> None:
        """With the lock held."""
        if self.why_off or pair.offer is None:
            reason = self.why_off or "the decode node offers no shared memory"
            pair.lane = Lane(self.protocol, reason)
            self._say(session, pair.lane)
            return
        if self.gpu is not None:
            pair.lane = Lane(self.protocol, "until the decode node's memory is registered with CUDA")
        if not pair.is_opening:
            pair.is_opening = True
            name = f"lane to {session}"
            threading.Thread(target=self._open, args=(session, pair), name=name, daemon=True).start()

    def _open(self, session: str, pair: _Pair) -> None:
        """In a thread of its own: the decode node may be stopped."""
        while not self._try_to_open(session, pair):
            self._is_closed.wait(RETRY_SECS)

    def _try_to_open(self, session: str, pair: _Pair) -> bool:
        """False: the decode node does not hear, and the pair is on the network for now."""
        assert pair.offer is not None
        mapping: Mapping | None = None
        is_busy = False
        try:
            mapping = Mapping(pair.offer, self.instance_id, self.directory, self.gpu)
            lane = Lane("shm", "both see the same memory")
        except Exception as error:
            if not isinstance(error, LaneError):
                log.exception("the lane to session %s", session)
            # Once a pair wrote over shared memory alone, the network is no way out: see above.
            reason = str(error) if isinstance(error, LaneError) else f"{type(error).__name__}: {error}"
            is_busy = isinstance(error, LaneBusyError) and not pair.is_sole
            if is_busy:
                reason += f"; it is tried again every {RETRY_SECS:g} s"
            lane = Lane("shm" if pair.is_sole else self.protocol, reason, is_refused=pair.is_sole)
        with self._lock:
            is_news = pair.lane != lane
            pair.is_opening = is_busy
            if self._pairs.get(session) is not pair or self.why_off:  # another process came in its place
                if mapping is not None:
                    mapping.close()
                return True
            if mapping is not None:
                covers_all = mapping.covers(pair.regions)
                pair.mapping = mapping
                pair.is_sole = covers_all and self.gpu is None and not pair.was_on_network
                if pair.is_sole:
                    mapping.promise_sole()
                if not covers_all:
                    lane = Lane("shm", f"both see the same memory; the rest of it over {self.protocol}")
            elif not pair.is_sole:
                pair.was_on_network = True
            pair.lane = lane
            if is_news:
                self._decided.append(session)
        if is_news:
            self._say(session, lane)
            self.on_decided()
        if is_busy:
            return False
        if mapping is not None:
            mapping.wait_for_end()
            with self._lock:
                pair.has_ended = pair.mapping is mapping
            mapping.close()  # of a node that has ended the memory is still there while it is mapped here
        return True

    def _say(self, session: str, lane: Lane) -> None:
        log.info("decode node at %s: lane %s (%s)", session, lane.kind, lane.reason)


def _copy_in_parts(
    mapping: Mapping,
    windows: SlotArray,
    src: SlotArray,
    dst: SlotArray,
    num_bytes: SlotArray,
    stop: Callable[[], str] | None,
) -> None:
    """Copy what is in a window. While a GPU copies one part, the next is made up."""
    num_copied = 0
    in_flight: Landing | None = None
    try:
        for window in np.flatnonzero(np.bincount(windows + 1)[1:]).tolist():
            for part in _parts(windows == window, src, dst, num_bytes):
                if stop is not None and (reason := stop()):
                    raise TransferError(f"stopped after {num_copied} bytes: {reason}")
                before, in_flight = in_flight, mapping.start_copy(window, *part)
                if before is not None:
                    before.wait()
                num_copied += int(part[2].sum())
    finally:
        if in_flight is not None:
            in_flight.wait()


def _parts(
    is_in: NDArray[np.bool_], src: SlotArray, dst: SlotArray, num_bytes: SlotArray
) -> Iterator[tuple[SlotArray, SlotArray, SlotArray]]:
    """What ``is_in`` says of a write, in parts of PART_BYTES and PART_RANGES at most."""
    if not is_in.all():
        src, dst, num_bytes = src[is_in], dst[is_in], num_bytes[is_in]
    src, dst, num_bytes = cut_long(src, dst, num_bytes, PART_BYTES)
    ends = np.cumsum(num_bytes)
    first = 0
    while first < ends.size:
        limit = PART_BYTES + (int(ends[first - 1]) if first else 0)
        after = min(int(np.searchsorted(ends, limit, side="right")), first + PART_RANGES)
        part = slice(first, after)
        yield src[part], dst[part], num_bytes[part]
        first = after
