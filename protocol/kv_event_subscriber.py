"""A subscriber of KV events (``kv_events.py``): what ranks publish, in order and without gaps.

A router has one ``KvEventSubscriber``. Its thread follows any number of ranks; a ``_Stream`` has one rank's
sockets, and an ``Order`` what comes next. A stream asks for a replay when it begins to follow a rank, when it
sees a gap, and when it has heard nothing for a while, because a gap shows only when a later batch comes. It
keeps the batches that are published meanwhile. If batches cannot be replayed, the owner is told to forget all
that it knows of the rank, and the stream goes on with the next batch. A rank that starts again counts from 0,
so its numbers are lower than the expected one. If the rank has published as many batches as before when it is
heard again, the restart does not show: an owner that knows of a restart calls ``follow`` again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import zmq

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.protocol.kv_events import (
    END_OF_REPLAY,
    SEQ_BYTES,
    BlockChange,
    BlockChanges,
    block_changes_decoder,
    encode_seq,
)
from hisparse_pd.protocol.polling import Poller, Wakeup, burst

log = logging.getLogger(__name__)

REPLAY_SECS: Final = 10.0
"""Time without a batch after which a replay is given up."""
SILENCE_SECS: Final = 10.0
"""Time without a batch after which a rank is asked for missed batches. Those that it published before the
subscription reached it, or last before a pause, show no gap until the next batch comes."""
RETRY_SECS: Final = 10.0
"""Time after which a rank whose sockets have failed, as without descriptors, is tried again."""
_MAX_BATCH_BYTES: Final = 8 << 20
_MAX_WAITING: Final = 1_000
"""Limit of a rank's batches that ZMQ queues, and of those that wait for the end of a replay."""
_POLL_SECS: Final = 1.0

S = TypeVar("S")


class Feed(NamedTuple):
    """The addresses at which one rank publishes."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


class KvEventSubscriber(Generic[S]):
    """Follows sources, each of which is a rank. ``S`` is what names one.

    The thread calls ``on_changes`` with a source and what it has published, and ``on_lost`` with a source of
    which everything known is to be forgotten.
    """

    def __init__(
        self, on_changes: Callable[[S, Sequence[BlockChange]], None], on_lost: Callable[[S], None]
    ) -> None:
        self._on_changes = on_changes
        self._on_lost = on_lost
        self._orders: queue.SimpleQueue[tuple[S, Feed | None]] = queue.SimpleQueue()
        """Sources with their addresses, or None to leave them; the thread carries them out."""
        self._streams: dict[S, _Stream] = {}
        self._failed: dict[S, tuple[Feed, float]] = {}
        """Sources whose sockets have failed, with the time at which each is tried again."""
        self._is_closing = False
        self._wakeup = Wakeup()
        self._poller = Poller()
        self._poller.register(self._wakeup)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kv event subscriber", daemon=True)
        self._thread.start()

    def follow(self, source: S, feed: Feed) -> None:
        """Begin to follow a source, or begin anew."""
        self._orders.put((source, feed))
        self._wakeup.set()

    def leave(self, source: S) -> None:
        """Follow a source no longer."""
        self._orders.put((source, None))
        self._wakeup.set()

    def close(self) -> None:
        self._is_closing = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            self._poller.wait(_POLL_SECS)
            self._wakeup.clear()
            self._carry_out_orders()
            self._try_failed_again()
            for source, stream in tuple(self._streams.items()):
                self._receive(source, stream)
        self._context.destroy(linger=0)

    def _receive(self, source: S, stream: _Stream) -> None:
        """Hand on what is new of a source. One whose sockets fail is left, and followed again later."""
        try:
            found = stream.receive()
        except zmq.ZMQError as error:
            self._leave(source)
            self._note_failure(source, stream.feed, error)
            return
        for changes in found:
            if changes is None:
                self._on_lost(source)
            else:
                self._on_changes(source, changes.events)

    def _leave(self, source: S) -> None:
        if (stream := self._streams.pop(source, None)) is not None:
            stream.close()
            self._on_lost(source)

    def _carry_out_orders(self) -> None:
        while not self._orders.empty():
            source, feed = self._orders.get()
            self._leave(source)
            self._failed.pop(source, None)
            if feed is not None:
                self._begin(source, feed)

    def _try_failed_again(self) -> None:
        for source, (feed, due_at) in tuple(self._failed.items()):
            if time.monotonic() >= due_at:
                self._begin(source, feed)

    def _begin(self, source: S, feed: Feed) -> None:
        try:
            self._streams[source] = _Stream(self._context, self._poller, feed)
        except zmq.ZMQError as error:
            self._note_failure(source, feed, error)
            return
        if self._failed.pop(source, None) is not None:
            log.info("the KV events at %s are followed now", feed.endpoint)

    def _note_failure(self, source: S, feed: Feed, error: zmq.ZMQError) -> None:
        """Have a source tried again later. The log says so at the first of several failures in a row."""
        if source not in self._failed:
            log.warning(
                "the KV events at %s are not followed: %s; they are tried again every %g s",
                feed.endpoint,
                error,
                RETRY_SECS,
            )
        self._failed[source] = feed, time.monotonic() + RETRY_SECS


class _Stream:
    """The events of one rank: the sockets that they come by, and the number that comes next."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: Poller, feed: Feed) -> None:
        """Raises ZMQError for an address that cannot be used."""
        self._context = context
        self._poller = poller
        self.feed = feed
        self._order = Order()
        self._logged = LogLimiter()
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_until = 0.0
        self._silent_at = 0.0
        self._sub = self._connect(zmq.SUB, feed.endpoint)
        try:
            self._sub.subscribe(feed.topic.encode())
            self._ask_again(0)
        except zmq.ZMQError:
            self.close()  # messages that nobody reads would wake the thread again and again
            raise

    def receive(self) -> list[BlockChanges | None]:
        """Return what is new, in order; None where all that was known is lost. Raises ZMQError if it cannot
        go on."""
        found: list[BlockChanges | None] = []
        replay = self._replay
        if replay is not None:
            for frames in burst(replay):
                self._replay_until = time.monotonic() + REPLAY_SECS
                if len(frames) == 3 and frames[1] == END_OF_REPLAY:
                    found += self._end_replay()
                    break
                if len(frames) == 3 and (batch := self._decoded(*frames[1:])):
                    found += self._order.replayed(*batch)
            else:
                if time.monotonic() > self._replay_until:
                    found += self._end_replay()
        for frames in burst(self._sub):
            self._silent_at = time.monotonic() + SILENCE_SECS
            if len(frames) == 3 and (batch := self._decoded(*frames[1:])):
                found += self._order.published(*batch)
        if self._replay is None and time.monotonic() > self._silent_at:
            self._order.suspect_gap()
        if (first := self._order.take_gap()) is not None:
            found += self._ask_again(first)
        return found

    def close(self) -> None:
        self._disconnect(self._sub)
        if self._replay is not None:
            self._disconnect(self._replay)

    def _ask_again(self, first: int) -> list[BlockChanges | None]:
        """Ask for what was published from ``first`` on. Returns what is new if nobody can be asked."""
        if self.feed.replay_endpoint is None:
            return self._end_replay()
        # A socket of its own for each replay: what comes late of an earlier one is nobody's.
        self._replay = self._connect(zmq.DEALER, self.feed.replay_endpoint)
        self._replay.send_multipart([b"", encode_seq(first)], zmq.NOBLOCK)
        self._replay_until = time.monotonic() + REPLAY_SECS
        return []

    def _end_replay(self) -> list[BlockChanges | None]:
        if self._replay is not None:
            self._disconnect(self._replay)
            self._replay = None
        self._silent_at = time.monotonic() + SILENCE_SECS
        return self._order.end_replay()

    def _decoded(self, seq: bytes, payload: bytes) -> tuple[int, BlockChanges] | None:
        try:
            if len(seq) != SEQ_BYTES:
                raise msgspec.DecodeError(f"a number of {len(seq)} bytes")
            return int.from_bytes(seq, "big"), block_changes_decoder.decode(payload)
        except msgspec.MsgspecError as error:
            if self._logged.permits():
                log.warning("dropped malformed KV events from %s: %s", self.feed.endpoint, error)
            return None

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
        sock.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        sock.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            sock.connect(endpoint)
        except zmq.ZMQError:
            sock.close()
            raise
        self._poller.register(sock)
        return sock

    def _disconnect(self, sock: zmq.Socket[bytes]) -> None:
        self._poller.unregister(sock)
        sock.close()


class Order:
    """The order of one rank's batches. It begins in a replay from number 0, and knows no sockets.

    Each method returns what is new: batches in the order of their numbers, and None where all that was known
    before is lost.
    """

    def __init__(self) -> None:
        self._next = 0
        self._last_ts = 0.0
        self._is_replaying = True
        self._gap: int | None = None
        self._waiting: deque[tuple[int, BlockChanges]] = deque(maxlen=_MAX_WAITING)
        """Events that were published during a replay; if some have no room, that is one more gap."""

    def take_gap(self) -> int | None:
        """Return the first number to ask for again, once for each gap."""
        gap, self._gap = self._gap, None
        return gap

    def suspect_gap(self) -> None:
        """Begin a replay of what may have been missed. Nothing is lost if it brings nothing."""
        self._is_replaying, self._gap = True, self._next

    def published(self, seq: int, changes: BlockChanges) -> list[BlockChanges | None]:
        """Take in what the rank publishes."""
        if self._is_replaying:
            self._waiting.append((seq, changes))
            return []
        if seq == self._next:
            return self._accept(seq, changes)
        if seq < self._next and changes.ts <= self._last_ts:  # a replay had it, too
            return []
        found: list[BlockChanges | None] = []
        if seq < self._next:  # the rank has started anew, and counts from 0
            self._next = 0
            found.append(None)
        self._is_replaying, self._gap = True, self._next
        self._waiting.append((seq, changes))
        return found

    def replayed(self, seq: int, changes: BlockChanges) -> list[BlockChanges | None]:
        """Take in a batch of the replay."""
        if seq < self._next:
            return []
        lost: list[BlockChanges | None] = [] if seq == self._next else [None]
        return lost + self._accept(seq, changes)

    def end_replay(self) -> list[BlockChanges | None]:
        """Go on with what was published meanwhile: the replay is complete, or does not come."""
        self._is_replaying = False
        waiting = list(self._waiting)
        self._waiting.clear()
        found: list[BlockChanges | None] = []
        for seq, changes in waiting:
            if seq < self._next or self._is_replaying:
                found += self.published(seq, changes)
            else:
                found += self.replayed(seq, changes)  # what lies between can be had from nobody
        return found

    def _accept(self, seq: int, changes: BlockChanges) -> list[BlockChanges | None]:
        self._next, self._last_ts = seq + 1, changes.ts
        return [changes]
