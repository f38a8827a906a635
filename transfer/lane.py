"""The lanes of a prefill node: how its writes reach each decode node, chosen when that node registers.

The prefill engine makes one ``Lanes`` and calls ``register`` for each Register; the sender's threads call
``write``. A lane is one of two kinds:

- ``shm``: the decode node is a process of this machine and shares its memory (``lane_host.py``), which is
  mapped here (``lane_memory.py``). A write is a copy by this process, or by its GPU if the KV is on one, and
  is over when the call returns. Memory that the decode node does not share is written over the network.
- The transport's, ``tcp`` or ``rdma``: everything is written over the network.

What the decode node holds is read over the same lane: by threads of a ``Sender`` (``LaneReader``), or, where
a GPU reads all of it, on a stream of the engine's (``pinned``).

The choice stands for as long as both processes live, unless the decode node is not registered for long
(``forget_all_but``). Where a CPU writes and all memory is shared, the shared memory is the pair's only way
(``is_sole``). The kernel tells the decode node when this process has ended, and from then on nothing can
land. It cannot say that of writes over the network, nor of a GPU's, which may outlive their process: the
slots of such pairs wait out the quarantine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.errors import TransferError
from hisparse_pd.transfer.lane_memory import LaneError, Mapping
from hisparse_pd.transfer.plan import SLICE_BYTES, Reads, Writes, as_descriptors

if TYPE_CHECKING:
    from hisparse_pd.core.memory.peer import GpuWriter

log = logging.getLogger(__name__)

GPU_SLICE_BYTES: Final = 256 << 20
"""Bytes of a room's turn on a lane where a GPU copies, instead of ``SLICE_BYTES``. Such a turn takes 5 ms,
which is long beside the 0.2 ms between two turns, in which nothing is copied."""

GPU_READ_BYTES: Final = 512 << 20
"""The same for reads. They wait for no writes, and a request begins only when all of its reads are over."""

OPEN_SECS = 60.0
"""Limit for opening a decode node's memory. CUDA registers 90 GB of 4 KiB pages in that time, and some seven
times as much of huge ones."""

CLOSE_SECS = 5.0
"""Limit for unmapping a decode node's memory at shutdown; after that the kernel does it."""

FORGET_SECS = 600.0
"""Time from the end of the last write to a node that is not registered until its pair is forgotten. Nothing
of a failed write lands so late: the transport's own timeouts are over by then."""

LaneKind = Literal["shm", "tcp", "rdma"]


@dataclass(frozen=True)
class Lane:
    """A pair's lane, and why it was chosen. ``refusal``: why no KV can go over it after all, or empty."""

    kind: LaneKind
    reason: str
    refusal: str = ""


@dataclass(eq=False)
class _Pair:
    """This node and one decode node."""

    offer: LaneOffer | None
    began_at: float
    """When it registered, a time of ``time.monotonic``."""
    lane: Lane | None = None
    """None while it is being chosen."""
    mapping: Mapping | None = None
    """The decode node's memory, for shm only."""
    covers_all: bool = False
    """Whether ``mapping`` has all that the decode node registered."""
    is_sole: bool = False
    """Whether all writes go through ``mapping`` and are made by a CPU."""
    num_moves: int = 0
    """Writes and reads under way."""
    last_used_at: float = field(default_factory=time.monotonic)
    """When the decode node registered last, or the last write or read ended, whichever is later."""


class _Opened(NamedTuple):
    """The result of opening a decode node's memory."""

    lane: Lane
    mapping: Mapping | None
    """None if the memory cannot be opened. Where only a part of it is mapped and no network works for the
    rest, there is a mapping as well, but ``lane`` is refused, and so nothing is written."""
    covers_all: bool
    """Whether all that the decode node registered is mapped."""


@dataclass
class Lanes:
    """Writes to all decode nodes and reads from them, each over its lane. Any thread may call it.

    ``protocol``: the network's. ``why_off``: why this node does not use shared memory; empty if it does.
    ``directory``: where decode nodes have sockets, beside the abstract names. ``on_decided``: called from any
    thread when ``take_decided`` has something. ``gpu``: the GPU that has the KV; None for main memory.
    """

    network: TransferEngine
    protocol: Literal["tcp", "rdma"]
    instance_id: str
    why_off: str = ""
    directory: str = ""
    on_decided: Callable[[], None] = lambda: None
    gpu: GpuWriter | None = None
    pairs: dict[str, _Pair] = field(default_factory=dict, init=False)
    """Pairs by session. Those on shared memory are removed when their decode node has ended, and those on the
    network by ``forget_all_but``."""
    _decided: list[str] = field(default_factory=list, init=False)
    """See ``take_decided``."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def register(
        self, session: str, offer: LaneOffer | None, regions: Sequence[tuple[int, int]]
    ) -> Lane | None:
        """Choose the lane of a decode node that registered ``regions``, ``(base_addr, num_bytes)`` each. A
        new offer at a known session means that the decode node's process has been replaced. Returns None
        while its memory is being opened: ``take_decided`` will name the session, unless the decode node
        registers again after OPEN_SECS, which makes the lane the network's and returns it. Returns None, too,
        if no thread can be started that opens it; the next call tries again."""
        with self._lock:
            pair = self.pairs.get(session)
            is_new = pair is None or pair.offer != offer
            if pair is None or is_new:
                if pair is not None and pair.mapping is not None:
                    pair.mapping.close()
                pair = self.pairs[session] = _Pair(offer, time.monotonic())
            pair.last_used_at = time.monotonic()
            if pair.lane is None and (reason := self._why_network(pair)):
                self._decide(session, pair, self.over_network(reason))
            elif is_new and offer is not None:
                # In a thread of its own: the decode node may be stopped, and CUDA takes its time.
                args, name = (session, pair, offer, tuple(regions)), f"lane to {session}"
                try:
                    threading.Thread(target=self._open, args=args, name=name, daemon=True).start()
                except RuntimeError as error:  # this process, or its container, has as many threads as it may
                    log.warning("no thread opens the memory of the decode node at %s: %s", session, error)
                    del self.pairs[session]  # the decode node soon registers again
            return pair.lane

    def forget_all_but(self, registered: Collection[str]) -> None:
        """Forget the pairs on the network that have not been used for FORGET_SECS, but for those of these
        sessions. A pair is kept while a write may still land, even if its node is lost: were shared memory
        then chosen, the decode node would hear that nothing lands any more."""
        with self._lock:
            latest = time.monotonic() - FORGET_SECS
            for session, pair in tuple(self.pairs.items()):
                is_idle = pair.num_moves == 0 and pair.last_used_at <= latest
                is_on_network = pair.lane is not None and pair.mapping is None
                if is_idle and is_on_network and session not in registered:
                    del self.pairs[session]

    def lane(self, session: str) -> Lane | None:
        """Return the lane of a session; None while it is being chosen, and for an unknown session."""
        with self._lock:
            pair = self.pairs.get(session)
            return None if pair is None else pair.lane

    def write_bytes(self, session: str) -> int:
        """Return the highest cost (``plan.cost``) of one write to a session."""
        return GPU_SLICE_BYTES if self._is_copied_by_gpu(session) else SLICE_BYTES

    def read_bytes(self, session: str) -> int:
        """Return the highest cost of one read from a session."""
        return GPU_READ_BYTES if self._is_copied_by_gpu(session) else SLICE_BYTES

    def pinned(self, session: str) -> Mapping | None:
        """Return a decode node's memory, pinned (``Mapping.pin``), if this node's GPU reads all of it; None
        otherwise, and once it is closed."""
        with self._lock:
            pair = self.pairs.get(session)
        if self.gpu is None or pair is None or pair.mapping is None or not pair.covers_all:
            return None
        try:
            pair.mapping.pin()
        except TransferError:
            return None
        return pair.mapping

    def _is_copied_by_gpu(self, session: str) -> bool:
        lane = self.lane(session)
        return self.gpu is not None and lane is not None and lane.kind == "shm"

    def take_decided(self) -> list[str]:
        """Return the sessions whose lane was chosen since the last call, after ``register`` returned None."""
        with self._lock:
            decided, self._decided = self._decided, []
            return decided

    def close(self) -> None:
        """Unmap all memory, and wait at most CLOSE_SECS a mapping for it. No write may follow."""
        with self._lock:
            mappings = [pair.mapping for pair in self.pairs.values() if pair.mapping is not None]
            self.pairs.clear()
        for mapping in mappings:
            mapping.close()
        for mapping in mappings:
            mapping.wait_until_unmapped(CLOSE_SECS)

    def write(self, session: str, writes: Writes, stop: Callable[[], str] | None = None) -> None:
        """Write over the session's lane, as ``TransferEngine.write`` does. After an error over shared memory,
        bytes may still land only if a GPU copied them."""
        self._move(session, writes, stop, is_read=False)

    def read(self, session: str, reads: Reads, stop: Callable[[], str] | None = None) -> None:
        """Read over the session's lane, as ``TransferEngine.read`` does. After an error over shared memory,
        bytes may still land only if a GPU copied them."""
        self._move(session, reads, stop, is_read=True)

    def _move(self, session: str, moves: Writes, stop: Callable[[], str] | None, *, is_read: bool) -> None:
        """Write or read: over shared memory, and what lies in none of it over the network."""
        network = self.network
        over_network = network.read if is_read else network.write
        with self._used(session) as pair:
            if (mapping := pair.mapping) is None:
                over_network(session, moves, stop)
                return
            columns = as_descriptors(moves)
            check_own = network.check_destinations if is_read else network.check_sources
            check_own(columns)
            over_memory = mapping.read if is_read else mapping.write
            elsewhere = over_memory(columns, stop, may_be_elsewhere=not pair.is_sole)
            if elsewhere.any():
                over_network(session, columns.at(elsewhere), stop)

    @contextmanager
    def _used(self, session: str) -> Iterator[_Pair]:
        """Yield the pair of a session whose lane is chosen, and keep it meanwhile. Raises TransferError."""
        with self._lock:
            pair = self.pairs.get(session)
            if pair is None or pair.lane is None:
                reason = "it has ended or was never registered; nothing was moved"
                raise TransferError(f"session {session} has no lane: {reason}")
            pair.num_moves += 1
        try:
            yield pair
        finally:
            with self._lock:
                pair.num_moves -= 1
                pair.last_used_at = time.monotonic()

    # --- choosing --------------------------------------------------------------------------------------

    def _why_network(self, pair: _Pair) -> str:
        """Return why the pair uses the network; empty while the decode node's memory may still be opened."""
        if self.why_off or pair.offer is None:
            return self.why_off or "the decode node offers no shared memory"
        if time.monotonic() - pair.began_at <= OPEN_SECS:
            return ""
        remedy = "; `hisparse-pd doctor` says what pages shared memory has" if self.gpu is not None else ""
        return f"the decode node's memory was not open within {OPEN_SECS:g} s{remedy}"

    def over_network(self, reason: str) -> Lane:
        """Return the network's lane, chosen for ``reason``; refused if this node has no working network."""
        fault = self.network.fault
        return Lane(self.protocol, reason, refusal=f"{reason}; {fault}" if fault else "")

    def _decide(self, session: str, pair: _Pair, lane: Lane) -> None:
        """Set and log a pair's lane. The caller has the lock."""
        pair.lane = lane
        kind = "none" if lane.refusal else lane.kind
        log.info("decode node at %s: lane %s (%s)", session, kind, lane.refusal or lane.reason)

    def _open(self, session: str, pair: _Pair, offer: LaneOffer, regions: Sequence[tuple[int, int]]) -> None:
        """Open the decode node's memory, and unmap it when that node has ended: the life of a thread."""
        opened = self._try_mapping(session, offer, regions)
        is_in_time = self._take(session, pair, opened)
        if is_in_time:
            self.on_decided()
        if opened.mapping is None:
            return
        if is_in_time:
            opened.mapping.wait_for_end()
            with self._lock:
                if self.pairs.get(session) is pair:
                    del self.pairs[session]
        opened.mapping.close()  # while it is mapped here, the memory outlives its node

    def _try_mapping(self, session: str, offer: LaneOffer, regions: Sequence[tuple[int, int]]) -> _Opened:
        """Map the decode node's memory. Returns the network's lane where that fails."""
        mapping: Mapping | None = None
        covers_all = False
        try:
            mapping = Mapping(offer, self.instance_id, self.directory, self.gpu)
            covers_all = mapping.covers(regions)
            rest = "" if covers_all else f"; the rest of it over {self.protocol}"
            lane = Lane("shm", f"both see the same memory{rest}")
            if not covers_all and self.network.fault:
                lane = self.over_network("the decode node shares a part of its memory only")
        except LaneError as error:  # such as a decode node on another machine
            lane = self.over_network(str(error))
        except Exception as error:
            log.exception("the lane to session %s", session)
            lane = self.over_network(f"{type(error).__name__}: {error}")
        return _Opened(lane, mapping, covers_all)

    def _take(self, session: str, pair: _Pair, opened: _Opened) -> bool:
        """Decide the pair's lane. Returns False, and changes nothing, where that comes too late."""
        with self._lock:
            # Meanwhile the node was replaced (a new offer), the network was taken after OPEN_SECS, or
            # the lanes were closed.
            if self.pairs.get(session) is not pair or pair.lane is not None:
                return False
            pair.mapping, pair.covers_all = opened.mapping, opened.covers_all
            pair.is_sole = opened.covers_all and self.gpu is None
            if opened.mapping is not None and pair.is_sole:
                opened.mapping.promise_sole()
            self._decide(session, pair, opened.lane)
            self._decided.append(session)
            return True


@dataclass(frozen=True)
class LaneReader:
    """Reads over ``lanes`` where a ``Sender`` would write: its batches are then reads."""

    lanes: Lanes

    def write(self, session: str, writes: Reads, stop: Callable[[], str] | None = None) -> None:
        self.lanes.read(session, writes, stop)
