"""The KV transport in the test's hands, in place of Mooncake and the sender's threads."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from hisparse_pd.protocol.lane import SOCKET_PREFIX, LaneOffer
from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.lane import Lane
from hisparse_pd.transfer.plan import DESCRIPTOR_COST_BYTES, Descriptors
from hisparse_pd.transfer.send_queue import Completion, Outcome, SendQueue, Slice, WriteBatch
from hisparse_pd.transfer.transport import TCP

SLICE_COST = 2 * DESCRIPTOR_COST_BYTES
"""Two ranges, so that most batches are several slices."""


class SafetyViolation(AssertionError):
    """Bytes landed where they must not, or a request runs on bytes that are not its own."""


class WriteFate(Enum):
    WRITTEN = auto()
    SLOW = auto()
    """A part lands, and no answer comes yet."""
    FAILED = auto()
    FAILED_MIDWAY = auto()


@dataclass(frozen=True)
class Piece:
    """The bytes of one descriptor. ``src_addr``: read only when they land; None: ``content`` was read before.

    ``sender``: whose they are.
    """

    sender: SimSender
    room: Room
    session: str
    src_addr: int | None
    dst_addr: int
    content: bytes
    lands_until: float = float("inf")

    def read(self) -> bytes:
        return self.content if self.src_addr is None else ctypes.string_at(self.src_addr, len(self.content))

    def in_socket(self) -> Piece:
        """The same, read by now: all that is left of them when their sender dies."""
        return replace(self, src_addr=None, content=self.read())


class SimTransfer:
    """In place of a ``TransferEngine``: names a session and remembers what was registered."""

    transport = TCP

    def __init__(self, session: str) -> None:
        self.session = session

    def register(self, memory: torch.Tensor) -> int:
        return memory.data_ptr()

    def renew(self, session: str, instance_id: str) -> None:
        pass

    def close(self) -> None:
        pass


class SimLaneHost:
    """In place of a ``LaneHost``: is told when a prefill node lets its memory go."""

    def __init__(self, *_: object, **__: object) -> None:
        self._ended: list[str] = []
        self.offer = LaneOffer(f"{SOCKET_PREFIX}{id(self):016x}", secrets.token_bytes(32))

    def let_go(self, instance_id: str) -> None:
        self._ended.append(instance_id)

    def take_ended(self) -> list[str]:
        ended, self._ended = self._ended, []
        return ended


class SimLanes:
    """In place of ``Lanes``: keeps a decode node's memory until its own end. ``host``: of the present decode
    node; None: over the network."""

    def __init__(self, instance_id: str, host: Callable[[], SimLaneHost] | None) -> None:
        self.is_shared = host is not None
        self._instance_id = instance_id
        self._host = host
        self._held: dict[str, SimLaneHost] = {}

    def register(self, session: str, offer: LaneOffer | None, regions: object) -> Lane:
        # A registration may be of a decode node that is dead by now.
        if self._host is not None and self._host().offer == offer:
            self._held[session] = self._host()
        return self.lane(session)

    def lane(self, session: str) -> Lane:
        return Lane("shm" if self.is_shared else "tcp", "")

    def forget_all_but(self, registered: object) -> None:
        """Keep everything: the test ends soon."""

    def write_bytes(self, session: str) -> int:
        return SLICE_COST

    read_bytes = write_bytes

    def pinned(self, session: str) -> None:
        """Return nothing: no GPU reads here."""

    def take_decided(self) -> list[str]:
        return []

    def die(self) -> None:
        """The kernel lets go of everything."""
        for host in self._held.values():
            host.let_go(self._instance_id)
        self._held.clear()


class SimSender:
    """In place of a ``Sender``: its queue, with slices and turns of a few ranges, and no threads.

    A slice is in flight from ``start`` to ``finish``, which only the test calls. ``reads``: whether its
    batches are reads, whose sources may change once nobody wants them any more."""

    def __init__(self, clock: Callable[[], float], *, reads: bool = False) -> None:
        self._clock = clock
        self._reads = reads
        self._queue = SendQueue(turn_bytes=SLICE_COST)
        self._by_session: dict[str, Slice | None] = {}
        self._as_submitted: dict[tuple[Room, int], bytes] = {}
        """What each source address of a room held when it was submitted."""
        self._over: set[Room] = set()
        """Rooms of which nothing may start any more."""

    @property
    def in_flight(self) -> dict[Room, Slice]:
        return {taken.batch.room: taken for taken in self._by_session.values() if taken is not None}

    @property
    def between_slices(self) -> list[Room]:
        """Rooms that have written a part of a batch, and wait for their next turn."""
        rooms = self._queue._rooms.items()
        return [room for room, queue in rooms if queue.waiting and queue.waiting[0].is_started]

    def submit(self, session: str, batch: WriteBatch) -> None:
        self._by_session.setdefault(session, None)
        for writes in () if self._reads else batch.slices:
            for src_addr, content in _read(writes):
                self._as_submitted[batch.room, src_addr] = content
        self._queue.submit(session, batch)

    def cancel(self, room: Room) -> bool:
        self._over.add(room)
        is_in_flight = self._queue.cancel(room)
        assert is_in_flight == (room in self.in_flight)
        assert self._queue.num_pending(room) == is_in_flight, "what is not in flight waits for an abort"
        return is_in_flight

    def num_pending(self, room: Room) -> int:
        return self._queue.num_pending(room)

    def num_bytes_pending(self, session: str) -> int:
        return self._queue.num_bytes_pending(session)

    def poll(self) -> list[Completion]:
        return self._queue.take_completions(self._clock())

    def overdue(self) -> list[Room]:
        overdue = self._queue.overdue(self._clock())
        self._over.update(overdue)
        return overdue

    def close(self, timeout_secs: float) -> bool:
        self._queue.refuse_all("closed")
        return not self.in_flight

    def start(self) -> None:
        for session, taken in self._by_session.items():
            if taken is None:
                started = self._queue.next(session, self._clock())
                self._by_session[session] = started
                if started is not None and started.batch.room in self._over:
                    raise SafetyViolation(f"room {started.batch.room}: a slice starts behind its end")

    def pieces(self, room: Room) -> list[Piece]:
        """Return the pieces of the slice in flight."""
        taken = self.in_flight[room]
        (session,) = (session for session, other in self._by_session.items() if other is taken)
        pieces = []
        for dst_addr, (src_addr, content) in zip(
            taken.writes.dst_addrs.tolist(), _read(taken.writes), strict=True
        ):
            if content != self._as_submitted[room, src_addr]:
                raise SafetyViolation(
                    f"room {room}: source of {taken.batch.tag} was changed under the transport"
                )
            pieces.append(Piece(self, room, session, src_addr, dst_addr, content))
        return pieces

    def moves(self, room: Room) -> tuple[str, list[tuple[int, int, int]]]:
        """Return the session of the slice in flight, and each source, destination and length of it."""
        taken = self.in_flight[room]
        (session,) = (session for session, other in self._by_session.items() if other is taken)
        return session, list(zip(*(column.tolist() for column in taken.writes), strict=True))

    def finish(self, room: Room, *, ok: bool, lands_late: bool = True) -> None:
        taken = self.in_flight[room]
        (session,) = (session for session, other in self._by_session.items() if other is taken)
        self._by_session[session] = None
        if not ok:
            self._over.add(room)
        error = "" if ok else "the transport failed"
        may_still_land = lands_late and not ok
        self._queue.finish(taken, Outcome(error, 0.0, may_still_land))


def _read(writes: Descriptors) -> list[tuple[int, bytes]]:
    """Each source address and what it holds."""
    return [
        (addr, ctypes.string_at(addr, length))
        for addr, length in zip(writes.src_addrs.tolist(), writes.lengths.tolist(), strict=True)
    ]
