"""Decides which slice is written next to each decode node: owns batches, slices and turns of all rooms.

``Sender`` is the caller; it has the clock, the transport and a lock around all of this. It submits batches,
takes a slice with ``next``, writes it, and reports the outcome with ``finish``; each session has at most one
slice in flight. Nothing here waits or writes.

A batch is a caller's bytes for one room, such as one chunk's KV. A slice is the part of a batch that one call
of ``Lanes.write`` writes. A turn is what a room writes before the next room of its peer may: slices whose
cost (``plan.cost``) is up to ``SLICE_BYTES`` together. Where room A with 80 MiB came before room B with 10
MiB, the peer gets 32 MiB of A, B, 32 MiB of A, 16 MiB of A. A room that joins the line thus waits for one
turn of every other room, however many bytes that room has. A room whose source bytes are not ready keeps its
place in the line, and the rooms behind it go first.

Every batch has exactly one completion, whether it was written, failed, or never started. Once a slice of a
room has failed, nothing behind it starts: the aux record never lands without the room's earlier writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.plan import SLICE_BYTES, Descriptors, cost


class Ready(Protocol):
    """Tells when source bytes that a device writes are ready; a ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Return at once whether the bytes are ready."""

    def synchronize(self) -> None:
        """Block until the bytes are ready, without the interpreter lock. The peer's other rooms wait too."""


@dataclass(frozen=True)
class WriteBatch:
    """Byte ranges of one room. ``tag`` belongs to the caller and comes back in the completion.

    ``slices`` have ``num_bytes`` together and are iterated in the session's thread; the source bytes must
    stay unchanged until the completion. Nothing starts after ``deadline``, a time of ``time.monotonic()``.
    Each slice has ``timeout_secs`` from the start of its writing. ``ready`` is awaited before the source is
    read.
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
    is the time that its slices took in the transport."""

    room: Room
    tag: Any
    ok: bool
    error: str
    num_bytes: int
    secs: float
    may_still_land: bool = False


@dataclass
class Outcome:
    """The result of writing a slice. ``error``: empty when all of it has landed."""

    error: str = ""
    secs: float = 0.0
    may_still_land: bool = False


@dataclass(eq=False)
class _Progress:
    """A batch and its progress."""

    batch: WriteBatch
    remaining: Iterator[Descriptors]
    """Slices that are not cut yet."""
    head: Descriptors | None = None
    """The first slice that has not come back from the transport: cut, or in flight. None: not cut yet."""
    is_started: bool = False
    num_bytes_left: int = 0
    total: Outcome = field(default_factory=Outcome)
    """The sum of its slices' outcomes."""

    def is_ready(self) -> bool:
        """Return whether the batch can be written without waiting. A batch whose ``query`` fails counts
        as ready: ``synchronize`` then raises the error, with which the batch fails."""
        if self.is_started or self.batch.ready is None:
            return True
        try:
            return self.batch.ready.query()
        except Exception:
            return True


@dataclass(eq=False)
class Slice:
    """One write to a peer, in flight from ``SendQueue.next`` to ``SendQueue.finish``.

    ``ready``: what the caller of ``next`` awaits before the source is read. It then calls ``set_deadline``
    again, so that the wait does not count as writing. None if there is nothing to await, or an earlier slice
    of the batch has awaited it. ``deadline``: when the write has to be over, a time of ``time.monotonic()``.
    """

    batch: WriteBatch
    writes: Descriptors
    ready: Ready | None
    deadline: float = float("inf")

    def set_deadline(self, now: float) -> None:
        """Set the deadline of a write that begins at ``now``, behind any wait for ``ready``."""
        self.deadline = min(now + self.batch.timeout_secs, self.batch.deadline)


@dataclass(eq=False)
class _InFlight:
    """A room's slice in flight."""

    slice: Slice
    progress: _Progress
    """The slice's batch, which is not among the waiting ones meanwhile."""
    is_overdue_reported: bool = False
    """Whether ``overdue`` has named the room for this slice."""


@dataclass(eq=False)
class _RoomQueue:
    """A room's batches, while one of them waits or is in flight or its completion was not taken yet."""

    room: Room
    session: str
    waiting: deque[_Progress] = field(default_factory=deque)
    """Batches in order; the first may be written in part."""
    in_flight: _InFlight | None = None
    credit: int = 0
    """Cost that the room's turn has left; below 0 after a slice that costs more than a whole turn."""
    refusal: str = ""
    """Why no slice of the room may start any more; empty until something failed."""
    num_untaken: int = 0
    """Completions that ``take_completions`` has not returned yet."""

    @property
    def is_over(self) -> bool:
        return not self.waiting and self.in_flight is None and not self.num_untaken


@dataclass(eq=False)
class _Peer:
    """The rooms that write to one session."""

    line: deque[Room] = field(default_factory=deque)
    """Rooms with waiting batches and none in flight, in the order of their turns."""
    num_bytes: int = 0
    """Bytes of all its batches that are not written yet."""
    num_rooms: int = 0


class SendQueue:
    """The queue of one engine. ``on_completion`` is called for each new completion. ``turn_bytes``: highest
    cost of a room's turn."""

    def __init__(
        self, on_completion: Callable[[], None] | None = None, turn_bytes: int = SLICE_BYTES
    ) -> None:
        self._on_completion = on_completion
        self._turn_bytes = turn_bytes
        self._rooms: dict[Room, _RoomQueue] = {}
        self._peers: dict[str, _Peer] = {}
        self._completions: list[Completion] = []

    def submit(self, session: str, batch: WriteBatch) -> None:
        """Queue ``batch`` for the peer at ``session``; it fails if an earlier batch of its room failed or was
        cancelled. Raises ValueError when the room still has batches for another session."""
        queue = self._rooms.get(batch.room)
        if queue is None:
            queue = self._rooms[batch.room] = _RoomQueue(batch.room, session)
            self._peers.setdefault(session, _Peer()).num_rooms += 1
        if queue.session != session:
            raise ValueError(f"room {batch.room} writes to session {queue.session}, not to {session}")
        progress = _Progress(batch, iter(batch.slices), num_bytes_left=batch.num_bytes)
        if queue.refusal:
            progress.num_bytes_left = 0  # none of its bytes count for the peer
            self._complete(progress, queue, queue.refusal)
            return
        peer = self._peers[session]
        peer.num_bytes += batch.num_bytes
        queue.waiting.append(progress)
        if len(queue.waiting) == 1 and queue.in_flight is None:
            queue.credit = self._turn_bytes
            peer.line.append(batch.room)

    def next(self, session: str, now: float) -> Slice | None:
        """Return the session's next slice, which is in flight from now on, or None."""
        self.expire(now)
        peer = self._peers.get(session)
        while peer is not None and peer.line:
            room = self._first_ready(peer)
            queue = self._rooms[room]
            if not self._cut(queue):
                continue  # the room has left the line
            peer.line.remove(room)
            progress = queue.waiting.popleft()
            assert progress.head is not None
            ready = None if progress.is_started else progress.batch.ready
            progress.is_started = True
            queue.credit -= cost(progress.head)
            taken = Slice(progress.batch, progress.head, ready)
            taken.set_deadline(now)
            queue.in_flight = _InFlight(taken, progress)
            return taken
        return None

    def why_stop(self, in_flight: Slice, now: float) -> str:
        """Return why a slice in flight should end early; empty if it should not."""
        refusal = self._rooms[in_flight.batch.room].refusal
        return refusal or ("the write passed its deadline" if in_flight.deadline < now else "")

    def finish(self, written: Slice, outcome: Outcome) -> None:
        """Note that a slice came back from the transport. An error fails its batch and all behind it;
        otherwise the room goes on with its next slice, in this turn or in its next one."""
        queue = self._rooms[written.batch.room]
        assert queue.in_flight is not None
        progress, queue.in_flight = queue.in_flight.progress, None

        num_bytes = written.writes.num_bytes  # these no longer wait, whether they have landed or not
        self._peers[queue.session].num_bytes -= num_bytes
        progress.num_bytes_left -= num_bytes
        progress.head = None
        total = progress.total
        total.secs += outcome.secs
        total.may_still_land |= outcome.may_still_land
        if outcome.error:
            self._fail(progress, queue, outcome.error)
            return

        queue.waiting.appendleft(progress)
        # Cutting comes first: it completes a wholly written batch even of a room that was refused meanwhile.
        has_more = self._cut(queue)
        if has_more and queue.refusal:
            self._fail_waiting(queue)
        elif has_more:
            self._rejoin_line(queue)

    def _rejoin_line(self, queue: _RoomQueue) -> None:
        """Put a room whose next slice is cut into the line: first while its turn goes on, else last."""
        line = self._peers[queue.session].line
        head = queue.waiting[0].head
        if head is not None and cost(head) <= queue.credit:
            line.appendleft(queue.room)
        else:
            queue.credit = self._turn_bytes
            line.append(queue.room)

    def take_completions(self, now: float) -> list[Completion]:
        """Return the completions since the last call, in order."""
        self.expire(now)
        completions, self._completions = self._completions, []
        for completion in completions:
            queue = self._rooms[completion.room]
            queue.num_untaken -= 1
            if queue.is_over:
                self._forget(completion.room)
        return completions

    def overdue(self, now: float) -> list[Room]:
        """Return the rooms that have a slice in flight past its deadline, once for each such slice. Nothing
        behind it starts any more; its own completion comes when the transport returns."""
        overdue = []
        for room, queue in self._rooms.items():
            in_flight = queue.in_flight
            if in_flight is None or in_flight.is_overdue_reported or in_flight.slice.deadline >= now:
                continue
            in_flight.is_overdue_reported = True
            self._refuse(queue, "a write of the room passed its deadline in flight")
            overdue.append(room)
        return overdue

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any room or peer."""
        return not self._rooms and not self._peers

    def num_pending(self, room: Room) -> int:
        """Return the number of batches of ``room`` that wait or are in flight."""
        queue = self._rooms.get(room)
        return 0 if queue is None else len(queue.waiting) + (queue.in_flight is not None)

    def num_bytes_pending(self, session: str) -> int:
        """Return the bytes of all rooms that wait or are in flight to a peer."""
        peer = self._peers.get(session)
        return 0 if peer is None else peer.num_bytes

    def cancel(self, room: Room) -> bool:
        """Fail the batches of ``room`` that have not started; returns whether a slice is still in flight."""
        queue = self._rooms.get(room)
        if queue is None:
            return False
        self._refuse(queue, "the room was cancelled")
        return queue.in_flight is not None

    def refuse(self, room: Room, reason: str) -> None:
        """Fail the batches of ``room`` that have not started, for ``reason``."""
        if (queue := self._rooms.get(room)) is not None:
            self._refuse(queue, reason)

    def refuse_all(self, reason: str) -> None:
        """Fail the batches of all rooms that have not started."""
        for queue in self._rooms.values():
            self._refuse(queue, reason)

    def expire(self, now: float) -> None:
        """Fail all waiting batches of each room whose first waiting batch is past its deadline: all batches
        of a room have the same deadline."""
        for queue in self._rooms.values():
            if queue.waiting and queue.waiting[0].batch.deadline < now:
                self._refuse(queue, "the room's time was up before the peer was free")

    def _first_ready(self, peer: _Peer) -> Room:
        """Return the first room of the line whose bytes are ready, or else the first room."""
        for room in peer.line:
            if self._rooms[room].waiting[0].is_ready():
                return room
        return peer.line[0]

    def _cut(self, queue: _RoomQueue) -> bool:
        """See that the room's first batch has its next slice cut, and complete batches that have no further
        slices. Returns whether there is a slice; if not, the room has left the line."""
        while queue.waiting:
            progress = queue.waiting[0]
            if progress.head is not None:
                return True
            try:
                progress.head = next(progress.remaining, None)
            except Exception as error:  # a bad batch must not end the thread, which serves the whole peer
                queue.waiting.popleft()
                self._leave_line(queue)
                self._fail(progress, queue, f"{type(error).__name__}: {error}")
                return False
            if progress.head is None:
                queue.waiting.popleft()
                if not queue.waiting:
                    self._leave_line(queue)
                self._complete(progress, queue, "")
        return False

    def _leave_line(self, queue: _RoomQueue) -> None:
        line = self._peers[queue.session].line
        if queue.room in line:
            line.remove(queue.room)

    def _fail(self, progress: _Progress, queue: _RoomQueue, error: str) -> None:
        """Fail a batch and all batches behind it."""
        self._complete(progress, queue, error)
        self._refuse(queue, f"an earlier batch of the room failed: {error}")

    def _refuse(self, queue: _RoomQueue, reason: str) -> None:
        """Fail the room's waiting batches, and all that are submitted before the room is over. The first
        reason stays."""
        queue.refusal = queue.refusal or reason
        self._fail_waiting(queue)

    def _fail_waiting(self, queue: _RoomQueue) -> None:
        """Fail the waiting batches of a room that has a refusal."""
        if queue.waiting:
            self._leave_line(queue)
        while queue.waiting:
            self._complete(queue.waiting.popleft(), queue, queue.refusal)

    def _complete(self, progress: _Progress, queue: _RoomQueue, error: str) -> None:
        """Make the completion of a batch. ``error``: empty if all of it was written."""
        batch, total = progress.batch, progress.total
        self._peers[queue.session].num_bytes -= progress.num_bytes_left
        queue.num_untaken += 1
        self._completions.append(
            Completion(
                batch.room,
                batch.tag,
                ok=not error,
                error=error,
                num_bytes=0 if error else batch.num_bytes,
                secs=total.secs,
                may_still_land=total.may_still_land,
            )
        )
        if self._on_completion is not None:
            self._on_completion()

    def _forget(self, room: Room) -> None:
        session = self._rooms.pop(room).session
        self._peers[session].num_rooms -= 1
        if self._peers[session].num_rooms == 0:
            del self._peers[session]
