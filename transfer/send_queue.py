"""Who writes next to which peer: owns the batches of all rooms, their slices and their turns. Pure.

The caller has the clock, the transport and a lock around all of this. It takes a slice, writes it, and says
what came of it; each session has at most one slice in flight.

Batches of a room go out in the order of submission, cut into slices. The rooms of a peer take turns of
``SLICE_BYTES`` at most: a room that joins the line waits for that much of every other, however long they are.
A room whose source bytes are not there yet keeps its place in the line, and those behind it go first.

Every batch has exactly one completion, whether it was written, failed, or never started. Once a slice of a
room has failed, nothing behind it starts: the aux record never lands without what came before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.plan import SLICE_BYTES, Descriptors, cost


class Ready(Protocol):
    """Says when source bytes are there that something else than the CPU writes, as a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether they are; returns at once."""

    def synchronize(self) -> None:
        """Block until they are, without the interpreter lock. Not for long: the peer's other rooms wait."""


@dataclass(frozen=True)
class WriteBatch:
    """Byte ranges of one room. ``tag`` is the caller's and comes back in the completion.

    ``slices``, of ``num_bytes`` in all, are iterated in the session's thread; the source bytes must stand
    until the completion. Nothing starts after ``deadline``, by ``time.monotonic()``. A slice has
    ``timeout_secs`` from the start of its writing. ``ready`` is waited for before the source is read.
    """

    room: Room
    tag: Any
    slices: Iterable[Descriptors]
    num_bytes: int
    deadline: float = float("inf")
    timeout_secs: float = float("inf")
    ready: Ready | None = None


@dataclass(frozen=True)
class Completion:
    """The end of one batch. ``may_still_land``: see TransferError. ``num_bytes`` is 0 unless ``ok``; ``secs``
    is the time of all slices in the transport."""

    room: Room
    tag: Any
    ok: bool
    error: str
    num_bytes: int
    secs: float
    may_still_land: bool = False


@dataclass
class Outcome:
    """What came of a slice in the transport: ``error`` is empty when all of it has landed."""

    error: str = ""
    secs: float = 0.0
    may_still_land: bool = False


@dataclass(eq=False)
class _Progress:
    """A batch and how far it is. ``head``: its next slice, once that is cut."""

    batch: WriteBatch
    remaining: Iterator[Descriptors]
    head: Descriptors | None = None
    is_started: bool = False
    num_bytes_left: int = 0
    total: Outcome = field(default_factory=Outcome)

    def is_ready(self) -> bool:
        """Whether nothing has to be waited for. What cannot say fails when it is waited for."""
        if self.is_started or self.batch.ready is None:
            return True
        try:
            return self.batch.ready.query()
        except Exception:
            return True


@dataclass(eq=False)
class Slice:
    """One write to a peer, in flight from ``SendQueue.next`` to ``SendQueue.finish``. ``ready``: what to wait
    for before the source is read; then ``start`` is to be called."""

    batch: WriteBatch
    writes: Descriptors
    ready: Ready | None
    deadline: float = float("inf")

    def start(self, now: float) -> None:
        """The writing begins now."""
        self.deadline = min(now + self.batch.timeout_secs, self.batch.deadline)


@dataclass(eq=False)
class _RoomQueue:
    """Lives while the room has a batch waiting or in flight, or a completion that was not taken yet."""

    session: str
    waiting: deque[_Progress] = field(default_factory=deque)
    """The first may be written in part."""
    writing: _Progress | None = None
    slice: Slice | None = None
    """The slice of ``writing`` that is in flight."""
    credit: int = 0
    """What is left of its turn."""
    refusal: str = ""
    """Why nothing of it may start any more; empty until something failed."""
    num_untaken: int = 0
    overdue_reported: bool = False

    @property
    def is_over(self) -> bool:
        return not self.waiting and self.writing is None and not self.num_untaken


@dataclass(eq=False)
class _Peer:
    """``line``: rooms with waiting batches and none in flight; ``num_bytes``: of all that is not written."""

    line: deque[Room] = field(default_factory=deque)
    num_bytes: int = 0
    num_rooms: int = 0


class SendQueue:
    """``on_completion`` is called when ``take_completions`` has one more. ``turn_bytes``: see above."""

    def __init__(
        self, on_completion: Callable[[], None] | None = None, turn_bytes: int = SLICE_BYTES
    ) -> None:
        self._on_completion = on_completion
        self._turn_bytes = turn_bytes
        self._rooms: dict[Room, _RoomQueue] = {}
        self._peers: dict[str, _Peer] = {}
        self._completions: list[Completion] = []

    def submit(self, session: str, batch: WriteBatch) -> None:
        """Queue ``batch`` for the peer at ``session``; it fails behind a failed or cancelled one of its room.
        Raises ValueError when the room still has batches for another session."""
        room = self._rooms.get(batch.room)
        if room is None:
            room = self._rooms[batch.room] = _RoomQueue(session)
            self._peers.setdefault(session, _Peer()).num_rooms += 1
        if room.session != session:
            raise ValueError(f"room {batch.room} writes to session {room.session}, not to {session}")
        progress = _Progress(batch, iter(batch.slices), num_bytes_left=batch.num_bytes)
        if room.refusal:
            progress.num_bytes_left = 0
            self._complete(progress, room, room.refusal)
            return
        peer = self._peers[session]
        peer.num_bytes += batch.num_bytes
        room.waiting.append(progress)
        if len(room.waiting) == 1 and room.writing is None:
            room.credit = self._turn_bytes
            peer.line.append(batch.room)

    def next(self, session: str, now: float) -> Slice | None:
        """The session's next slice, which is in flight from now on; None when there is none."""
        self.expire(now)
        peer = self._peers.get(session)
        while peer is not None and peer.line:
            room_id = self._first_ready(peer)
            room = self._rooms[room_id]
            if not self._cut(room):
                continue
            peer.line.remove(room_id)
            progress = room.writing = room.waiting.popleft()
            assert progress.head is not None
            ready = None if progress.is_started else progress.batch.ready
            progress.is_started = True
            room.credit -= cost(progress.head)
            room.slice = Slice(progress.batch, progress.head, ready)
            room.slice.start(now)
            return room.slice
        return None

    def why_stop(self, in_flight: Slice, now: float) -> str:
        """Why a slice in flight is to end early, if it can; empty: it is not."""
        refusal = self._rooms[in_flight.batch.room].refusal
        return refusal or ("the write passed its deadline" if in_flight.deadline < now else "")

    def finish(self, written: Slice, outcome: Outcome) -> None:
        """The slice came back from the transport."""
        room_id = written.batch.room
        room = self._rooms[room_id]
        progress = room.writing
        assert progress is not None
        room.writing = room.slice = None
        room.overdue_reported = False
        num_bytes = written.writes.num_bytes
        self._peers[room.session].num_bytes -= num_bytes
        progress.num_bytes_left -= num_bytes
        progress.head = None
        total = progress.total
        total.secs += outcome.secs
        total.may_still_land |= outcome.may_still_land
        if outcome.error:
            self._fail(progress, room, outcome.error)
            return
        room.waiting.appendleft(progress)
        if self._cut(room) and not self._refuse_rest(room):
            peer = self._peers[room.session]
            head = room.waiting[0].head
            if head is not None and cost(head) <= room.credit:
                peer.line.appendleft(room_id)
            else:
                room.credit = self._turn_bytes
                peer.line.append(room_id)

    def take_completions(self, now: float) -> list[Completion]:
        """Those since the last call, in the order in which they happened."""
        self.expire(now)
        completions, self._completions = self._completions, []
        for completion in completions:
            room = self._rooms[completion.room]
            room.num_untaken -= 1
            if room.is_over:
                self._forget(completion.room)
        return completions

    def overdue(self, now: float) -> list[Room]:
        """Rooms with a slice in flight past its deadline, each such slice once. Nothing behind it starts any
        more; its own completion comes when the transport returns."""
        overdue = []
        for room_id, room in self._rooms.items():
            if room.slice is not None and room.slice.deadline < now and not room.overdue_reported:
                room.overdue_reported = True
                self._refuse(room, "a write of the room passed its deadline in flight")
                overdue.append(room_id)
        return overdue

    def num_pending(self, room: Room) -> int:
        """Batches of ``room`` that wait or are in flight."""
        queue = self._rooms.get(room)
        return 0 if queue is None else len(queue.waiting) + (queue.writing is not None)

    def num_bytes_pending(self, session: str) -> int:
        """Bytes that wait or are in flight to a peer, of all its rooms."""
        peer = self._peers.get(session)
        return 0 if peer is None else peer.num_bytes

    def cancel(self, room: Room) -> bool:
        """Fail what has not started of ``room``; returns whether a slice is still in flight."""
        queue = self._rooms.get(room)
        if queue is None:
            return False
        self._refuse(queue, "the room was cancelled")
        return queue.writing is not None

    def refuse_all(self, reason: str) -> None:
        """Fail what has not started of all rooms."""
        for room in self._rooms.values():
            self._refuse(room, reason)

    def expire(self, now: float) -> None:
        """Fail what waits for longer than its room may."""
        for room in self._rooms.values():
            if room.waiting and room.waiting[0].batch.deadline < now:
                self._refuse(room, "the room's time was up before the peer was free")

    def _first_ready(self, peer: _Peer) -> Room:
        """The first of the line whose bytes are there; where there is none, the first."""
        for room_id in peer.line:
            if self._rooms[room_id].waiting[0].is_ready():
                return room_id
        return peer.line[0]

    def _cut(self, room: _RoomQueue) -> bool:
        """Have the next slice of ``room`` ready; False when there is none. Batches that are over complete."""
        while room.waiting:
            progress = room.waiting[0]
            if progress.head is not None:
                return True
            try:
                progress.head = next(progress.remaining, None)
            except Exception as error:  # a bad batch must not take the thread, and so the peer, with it
                room.waiting.popleft()
                self._leave_line(progress.batch.room, room)
                self._fail(progress, room, f"{type(error).__name__}: {error}")
                return False
            if progress.head is None:
                room.waiting.popleft()
                if not room.waiting:
                    self._leave_line(progress.batch.room, room)
                self._complete(progress, room, "")
        return False

    def _leave_line(self, room_id: Room, room: _RoomQueue) -> None:
        line = self._peers[room.session].line
        if room_id in line:
            line.remove(room_id)

    def _fail(self, progress: _Progress, room: _RoomQueue, error: str) -> None:
        """The batch failed for good, and with it all that is behind it."""
        self._complete(progress, room, error)
        self._refuse(room, f"an earlier batch of the room failed: {error}")

    def _refuse(self, room: _RoomQueue, reason: str) -> None:
        """Fail the waiting batches of ``room``, and those that are still submitted until it is over."""
        room.refusal = room.refusal or reason
        self._refuse_rest(room)

    def _refuse_rest(self, room: _RoomQueue) -> bool:
        """Whether nothing of the room may start any more; then all that waits has failed."""
        if not room.refusal:
            return False
        if room.waiting:
            self._leave_line(room.waiting[0].batch.room, room)
        while room.waiting:
            self._complete(room.waiting.popleft(), room, room.refusal)
        return True

    def _complete(self, progress: _Progress, room: _RoomQueue, error: str) -> None:
        batch, total = progress.batch, progress.total
        self._peers[room.session].num_bytes -= progress.num_bytes_left
        room.num_untaken += 1
        self._completions.append(
            Completion(
                batch.room,
                batch.tag,
                not error,
                error,
                0 if error else batch.num_bytes,
                total.secs,
                total.may_still_land,
            )
        )
        if self._on_completion is not None:
            self._on_completion()

    def _forget(self, room: Room) -> None:
        session = self._rooms.pop(room).session
        self._peers[session].num_rooms -= 1
        if self._peers[session].num_rooms == 0:
            del self._peers[session]
