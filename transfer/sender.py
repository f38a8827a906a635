"""Owns the threads that write to decode nodes, one for each session.

The prefill engine's loop submits batches and polls for completions; it never waits here. The threads take
slices from the ``SendQueue``, which decides their order, and write them over the session's lane (``Lanes``).
A write to a stopped peer blocks for 30 s. With a thread of its own for each session, other peers do not wait
for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.engine import TransferError
from hisparse_pd.transfer.plan import Writes
from hisparse_pd.transfer.send_queue import Completion as Completion
from hisparse_pd.transfer.send_queue import Outcome, SendQueue, Slice
from hisparse_pd.transfer.send_queue import Ready as Ready
from hisparse_pd.transfer.send_queue import WriteBatch as WriteBatch

log = logging.getLogger(__name__)

IDLE_THREAD_SECS = 60.0
"""A peer's thread without work ends after this long; the next batch starts a new one."""


class Writer(Protocol):
    """Writes to sessions as ``TransferEngine.write`` does; ``Lanes`` is one."""

    def write(self, session: str, writes: Writes, stop: Callable[[], str] | None = None) -> None: ...


class Sender:
    """Writes batches to any number of peers, for one engine loop. ``wakeup`` is called, from any thread, when
    ``poll`` has something."""

    def __init__(
        self,
        writer: Writer,
        wakeup: Callable[[], None] | None = None,
        *,
        idle_thread_secs: float = IDLE_THREAD_SECS,
    ) -> None:
        self._writer = writer
        self._idle_thread_secs = idle_thread_secs
        self._lock = threading.Lock()
        self._queue = SendQueue(wakeup)
        self._threads: dict[str, threading.Thread] = {}
        self._changed: dict[str, threading.Condition] = {}
        """Wakes a session's thread when it has a new batch or should end; all share the sender's lock."""
        self._closed = False

    def submit(self, session: str, batch: WriteBatch) -> None:
        """Call ``SendQueue.submit`` and return at once. If no thread can be started for the session, the
        room's batches fail. Raises ValueError also when the sender is closed."""
        with self._lock:
            if self._closed:
                raise ValueError(f"room {batch.room}: the sender is closed")
            self._queue.submit(session, batch)
            if session in self._threads:
                self._changed[session].notify()
                return
            try:
                self._start_thread(session)
            except RuntimeError as error:  # this process, or its container, has as many threads as it may
                self._queue.refuse(batch.room, f"no thread writes to session {session}: {error}")

    def poll(self) -> list[Completion]:
        """Return the completions since the last call, in order, without waiting."""
        with self._lock:
            return self._queue.take_completions(time.monotonic())

    def overdue(self) -> list[Room]:
        """Return the rooms with a slice in flight past its deadline, once for each such slice, without
        waiting."""
        with self._lock:
            return self._queue.overdue(time.monotonic())

    def num_pending(self, room: Room) -> int:
        """Return the number of batches of ``room`` that wait or are in flight."""
        with self._lock:
            return self._queue.num_pending(room)

    def num_bytes_pending(self, session: str) -> int:
        """Return the bytes of all rooms that wait or are in flight to a peer."""
        with self._lock:
            return self._queue.num_bytes_pending(session)

    def cancel(self, room: Room) -> bool:
        """Fail the batches of ``room`` that have not started; returns whether a slice is still in flight.
        That slice ends early, between two calls of the transport."""
        with self._lock:
            return self._queue.cancel(room)

    def close(self, timeout_secs: float) -> bool:
        """Fail the batches that have not started, and wait for the threads. Returns False when one still
        writes after the timeout; it ends when the transport returns. Completions can be polled afterwards."""
        deadline = time.monotonic() + timeout_secs
        with self._lock:
            self._closed = True
            self._queue.refuse_all("the sender was closed")
            for changed in self._changed.values():
                changed.notify()
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    # --- in the threads --------------------------------------------------------------------------------

    def _run(self, session: str) -> None:
        while (taken := self._next_slice(session)) is not None:
            outcome = Outcome()
            started = time.monotonic()
            try:
                if taken.ready is not None:
                    # The source is written by a forward, and waiting for that is not the peer's fault: the
                    # slice's time counts from here.
                    taken.ready.synchronize()
                    started = time.monotonic()
                    taken.set_deadline(started)
                self._writer.write(session, taken.writes, partial(self._why_stop, taken))
            except TransferError as failure:
                outcome.error, outcome.may_still_land = str(failure), failure.may_still_land
            except Exception as failure:  # a bad batch must not end the thread, which serves the whole peer
                log.exception("room %d: a write to session %s raised", taken.batch.room, session)
                outcome.error, outcome.may_still_land = f"{type(failure).__name__}: {failure}", True
            outcome.secs = time.monotonic() - started
            with self._lock:
                self._queue.finish(taken, outcome)

    def _why_stop(self, taken: Slice) -> str:
        # No lock is needed: the queue does not forget the room of a slice in flight, and ``why_stop`` only
        # reads the room's ``refusal``, which another thread replaces in one assignment.
        return self._queue.why_stop(taken, time.monotonic())

    def _next_slice(self, session: str) -> Slice | None:
        """Wait for the session's next slice, which is then in flight; None when the thread should end."""
        with self._lock:
            idle_until = time.monotonic() + self._idle_thread_secs
            while True:
                now = time.monotonic()
                if (taken := self._queue.next(session, now)) is not None:
                    return taken
                if self._closed or now >= idle_until:
                    del self._threads[session], self._changed[session]
                    return None
                self._changed[session].wait(idle_until - now)

    def _start_thread(self, session: str) -> None:
        """Start the thread that writes to ``session``. The caller has the lock. Raises RuntimeError."""
        thread = threading.Thread(target=self._run, args=(session,), name=f"sender {session}", daemon=True)
        thread.start()  # its first look at the queue waits for the lock
        self._threads[session], self._changed[session] = thread, threading.Condition(self._lock)
