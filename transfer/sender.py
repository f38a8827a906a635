"""Owns the threads that write to peers: one a session, because a write to a stopped peer blocks for 30 s.

The engine loop submits batches and polls for completions; it never waits here. Every submitted batch has
exactly one completion, whether it was written, failed, or never started. Batches of one room go out in the
order of submission; the rooms of one peer take turns. A batch that fails in the transport is written once
more, whole, before its deadline: it may have been the connection. Once a batch of a room has failed for good,
the batches behind it do not start: what lands last (the aux record) never lands without what came before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from protocol.messages import Room
from transfer.engine import TransferError

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""Of a batch. A connection that broke is made anew by the second; a peer that is gone is not brought back."""

IDLE_THREAD_SECS = 60.0
"""A peer's thread without work ends after this long; the next batch starts a new one."""


class Writer(Protocol):
    """What a sender needs of a ``TransferEngine``; see its ``write``."""

    def write(
        self,
        session: str,
        src_addrs: ArrayLike,
        dst_addrs: ArrayLike,
        lengths: ArrayLike,
        stop: Callable[[], str] | None = None,
    ) -> None: ...


class Ready(Protocol):
    """Says when source bytes are there that something else than the CPU writes, as a ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Block until they are, without the interpreter lock. Not for long: the peer's other rooms wait."""


@dataclass(frozen=True)
class WriteBatch:
    """Byte ranges of one room, written together. ``tag`` is the caller's and comes back in the completion.

    Addresses and lengths: int64 [num_descriptors]. The source bytes must stand until the completion.
    ``deadline``: on ``time.monotonic()``'s clock, in seconds; not before that of the room's batch before.
    ``ready``: waited for before the source is read; None: the bytes are there.
    """

    room: Room
    tag: Any
    src_addrs: ArrayLike
    dst_addrs: ArrayLike
    lengths: ArrayLike
    deadline: float = float("inf")
    ready: Ready | None = None


@dataclass(frozen=True)
class Completion:
    """The end of one batch. ``may_still_land``: see TransferError; False for a batch that never started.

    A batch that went well after a retry is ``ok`` and may still land: its first attempt. ``num_bytes`` is 0
    unless ``ok``; ``secs`` is the time in the transport, of all attempts.
    """

    room: Room
    tag: Any
    ok: bool
    error: str
    num_bytes: int
    secs: float
    may_still_land: bool = False
    num_retries: int = 0


@dataclass
class _Outcome:
    """What came of a batch in the transport: ``error`` is empty when all of it has landed."""

    error: str = ""
    secs: float = 0.0
    may_still_land: bool = False
    num_retries: int = 0


@dataclass
class _RoomQueue:
    """Lives while the room has a batch waiting or in flight, or a completion that was not polled yet."""

    session: str
    waiting: deque[WriteBatch] = field(default_factory=deque)
    writing: WriteBatch | None = None
    refusal: str = ""  # why no further batch may start; empty until one failed
    num_unpolled: int = 0
    overdue_reported: bool = False

    @property
    def is_over(self) -> bool:
        return not self.waiting and self.writing is None and not self.num_unpolled


@dataclass
class _Session:
    """A peer's thread and what it waits for. Lives as long as the thread."""

    changed: threading.Condition
    thread: threading.Thread
    turns: deque[Room] = field(default_factory=deque)  # rooms with waiting batches and none in flight


def _reason_to_stop(room: _RoomQueue, batch: WriteBatch) -> str:
    return room.refusal or ("the batch passed its deadline" if batch.deadline < time.monotonic() else "")


class Sender:
    """Writes batches to any number of peers, for one engine loop.

    ``wakeup`` is called, from any thread, when ``poll`` has something: the loop can wait for that together
    with its sockets (``protocol.channels.Wakeup.set``).
    """

    def __init__(
        self,
        engine: Writer,
        wakeup: Callable[[], None] | None = None,
        *,
        idle_thread_secs: float = IDLE_THREAD_SECS,
    ) -> None:
        self._engine = engine
        self._wakeup = wakeup
        self._idle_thread_secs = idle_thread_secs
        self._lock = threading.Lock()
        self._rooms: dict[Room, _RoomQueue] = {}
        self._sessions: dict[str, _Session] = {}
        self._completions: list[Completion] = []
        self._closed = False

    def submit(self, session: str, batch: WriteBatch) -> None:
        """Queue ``batch`` for the peer at ``session``; returns at once.

        A batch that follows a failed or cancelled one of its room, before the completion of that was polled,
        completes as failed. Raises ValueError when the sender is closed, or when the room still has batches
        for another session.
        """
        with self._lock:
            if self._closed:
                raise ValueError(f"room {batch.room}: the sender is closed")
            room = self._rooms.setdefault(batch.room, _RoomQueue(session))
            if room.session != session:
                raise ValueError(f"room {batch.room} writes to session {room.session}, not to {session}")
            if room.refusal:
                self._complete(batch, room, _Outcome(room.refusal))
                return
            peer = self._sessions.get(session) or self._start_thread(session)
            room.waiting.append(batch)
            if len(room.waiting) == 1 and room.writing is None:
                peer.turns.append(batch.room)
                peer.changed.notify()

    def poll(self) -> list[Completion]:
        """The completions since the last call, in the order in which they happened; never waits."""
        with self._lock:
            self._refuse_expired()
            completions, self._completions = self._completions, []
            for completion in completions:
                room = self._rooms[completion.room]
                room.num_unpolled -= 1
                if room.is_over:
                    del self._rooms[completion.room]
            return completions

    def overdue(self) -> list[Room]:
        """Rooms with a batch in flight past its deadline, each such batch once; never waits.

        What is in flight cannot be taken back: its completion comes when the transport returns. The batches
        behind it do not start any more.
        """
        now = time.monotonic()
        overdue = []
        with self._lock:
            for room_id, room in self._rooms.items():
                if room.writing is not None and room.writing.deadline < now and not room.overdue_reported:
                    room.overdue_reported = True
                    self._refuse(room, "a batch of the room passed its deadline in flight")
                    overdue.append(room_id)
        return overdue

    def in_flight(self, room: Room) -> bool:
        """Whether a write of ``room`` is in progress: its source and destination must stay untouched."""
        with self._lock:
            queue = self._rooms.get(room)
            return queue is not None and queue.writing is not None

    def num_pending(self, room: Room) -> int:
        """Batches of ``room`` that wait or are in flight."""
        with self._lock:
            queue = self._rooms.get(room)
            return 0 if queue is None else len(queue.waiting) + (queue.writing is not None)

    def cancel(self, room: Room) -> bool:
        """Fail the batches of ``room`` that have not started; returns whether one is still in flight.

        A long batch in flight ends early, between two parts of it.
        """
        with self._lock:
            queue = self._rooms.get(room)
            if queue is None:
                return False
            self._refuse(queue, "the room was cancelled")
            return queue.writing is not None

    def close(self, timeout_secs: float) -> bool:
        """Fail what has not started and wait for the threads; False when one still writes after the timeout.

        Completions can be polled afterwards. A thread that is left behind ends when the transport returns.
        """
        deadline = time.monotonic() + timeout_secs
        with self._lock:
            self._closed = True
            for room in self._rooms.values():
                self._refuse(room, "the sender was closed")
            for peer in self._sessions.values():
                peer.changed.notify()
            threads = [peer.thread for peer in self._sessions.values()]
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    # --- in the threads --------------------------------------------------------------------------------

    def _run(self, session: str) -> None:
        while (taken := self._next_batch(session)) is not None:
            room, batch = taken
            outcome = _Outcome()
            started = time.monotonic()
            try:
                if batch.ready is not None:
                    batch.ready.synchronize()
                    started = time.monotonic()
                self._write(session, room, batch, outcome)
            except Exception as failure:  # a bad batch must not take the thread, and so the peer, with it
                log.exception("room %d: a write to session %s raised", batch.room, session)
                outcome.error, outcome.may_still_land = f"{type(failure).__name__}: {failure}", True
            outcome.secs = time.monotonic() - started
            with self._lock:
                self._complete(batch, room, outcome)
                if outcome.error:
                    self._refuse(room, f"an earlier batch of the room failed: {outcome.error}")
                room.writing = None
                room.overdue_reported = False
                if room.waiting:
                    self._sessions[session].turns.append(batch.room)

    def _write(self, session: str, room: _RoomQueue, batch: WriteBatch, outcome: _Outcome) -> None:
        """Write ``batch``, again if need be; what comes of it goes to ``outcome``."""
        stop = partial(_reason_to_stop, room, batch)
        while True:
            try:
                self._engine.write(session, batch.src_addrs, batch.dst_addrs, batch.lengths, stop=stop)
            except TransferError as failure:
                outcome.may_still_land |= failure.may_still_land
                again = f"in {outcome.num_retries + 1} attempts: " if outcome.num_retries else ""
                outcome.error = f"{again}{failure}"
                # What the transport did not even take would not be taken again.
                if not failure.may_still_land or outcome.num_retries + 1 == MAX_ATTEMPTS or stop():
                    return
                log.warning("room %d: writing %s once more: %s", batch.room, batch.tag, failure)
                outcome.num_retries += 1
            else:
                outcome.error = ""
                return

    def _next_batch(self, session: str) -> tuple[_RoomQueue, WriteBatch] | None:
        """Wait for the session's next batch and mark it as in flight; None when the thread is to end."""
        with self._lock:
            idle_until = time.monotonic() + self._idle_thread_secs
            peer = self._sessions[session]
            while True:
                self._refuse_expired()
                if peer.turns:
                    room = self._rooms[peer.turns.popleft()]
                    room.writing = room.waiting.popleft()
                    return room, room.writing
                remaining = idle_until - time.monotonic()
                if self._closed or remaining <= 0:
                    del self._sessions[session]
                    return None
                peer.changed.wait(remaining)

    # --- with the lock held ------------------------------------------------------------------------------

    def _start_thread(self, session: str) -> _Session:
        thread = threading.Thread(target=self._run, args=(session,), name=f"sender {session}", daemon=True)
        peer = self._sessions[session] = _Session(threading.Condition(self._lock), thread)
        thread.start()
        return peer

    def _refuse_expired(self) -> None:
        now = time.monotonic()
        for room in self._rooms.values():
            if room.waiting and room.waiting[0].deadline < now:
                self._refuse(room, "a batch of the room passed its deadline before the peer was free")

    def _refuse(self, room: _RoomQueue, reason: str) -> None:
        """Fail the waiting batches of ``room``, and those that are still submitted until it is over."""
        room.refusal = room.refusal or reason
        if room.waiting and room.writing is None:  # only then the room is in line for a turn
            self._sessions[room.session].turns.remove(room.waiting[0].room)
        while room.waiting:
            self._complete(room.waiting.popleft(), room, _Outcome(room.refusal))

    def _complete(self, batch: WriteBatch, room: _RoomQueue, outcome: _Outcome) -> None:
        room.num_unpolled += 1
        self._completions.append(
            Completion(
                batch.room,
                batch.tag,
                not outcome.error,
                outcome.error,
                0 if outcome.error else int(np.sum(batch.lengths)),
                outcome.secs,
                outcome.may_still_land,
                outcome.num_retries,
            )
        )
        if self._wakeup is not None:
            self._wakeup()
