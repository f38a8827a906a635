"""The sockets of KV events (``kv_events.py``): what a rank publishes, and the replay of what was missed.

``engine/kv_events.py`` makes the batches of one rank's events and gives them to its ``KvEventPublisher``,
whose thread encodes and sends them. Nothing waits for a subscriber: a batch for which there is no room is
dropped. Batches are numbered before that, so whoever misses one sees a gap in the numbers. A subscriber asks
the replay socket, a ROUTER, with an empty frame and the first number that it misses; it gets the batches from
there on that are still known, each as an empty frame, the number and the batch, and END_OF_REPLAY.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.protocol.kv_events import END_OF_REPLAY, SEQ_BYTES, encode_seq
from hisparse_pd.protocol.polling import Poller, Wakeup, burst

log = logging.getLogger(__name__)

MAX_REPLAY_BYTES: Final = 16 << 20
"""Most bytes of batches that can be replayed, some 3 million tokens; older ones are forgotten sooner than
buffer_steps says. A subscriber that asks for replays and does not read them may cost twice as much memory."""
_MAX_REQUEST_BYTES: Final = 256
"""Longest frame of a replay request; its last one has 8 bytes."""
_CLOSE_SECS: Final = 1.0
"""Limit for what is still queued when the publisher is closed."""
_IDLE_WAIT_SECS: Final = 10.0

EncodeBatch = Callable[[], bytes]
"""Returns an encoded batch. The publisher's thread calls it."""


class KvEventPublisher:
    """The PUB socket of one rank, its replay socket, and the thread that serves both.

    ``config``: with this rank's addresses. Raises StartError for addresses that cannot be used.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._batches: queue.Queue[tuple[int, EncodeBatch]] = queue.Queue(config.max_queue_size)
        self._next_seq = 0
        self.num_dropped = 0
        """Batches that nobody got, because too many were waiting to be sent."""
        self._history = _History(config.buffer_steps)
        self._is_closing = False
        self._wakeup = Wakeup()
        self._poller = Poller()
        self._poller.register(self._wakeup)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            _open(self._pub, config.endpoint, config.hwm, binds=config.binds)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
                # The queue to a subscriber holds a whole replay; a shorter queue would leave gaps in it. ZMQ
                # tells the sender only once for each half of a queue that messages were taken. The queue is
                # twice as long, so that a replay fits behind one that the subscriber has already taken.
                _open(self._replay, config.replay_endpoint, 2 * (config.buffer_steps + 1), binds=True)
                self._poller.register(self._replay)
        except StartError:
            self._context.destroy(linger=0)
            self._wakeup.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    @property
    def num_published(self) -> int:
        """Batches that were numbered, dropped ones included."""
        return self._next_seq

    def publish(self, encode: EncodeBatch) -> None:
        """Number a batch, and let the thread send it. It is dropped if too many wait; nothing is raised."""
        seq = self._next_seq
        self._next_seq += 1
        try:
            self._batches.put_nowait((seq, encode))
        except queue.Full:
            self.num_dropped += 1
        self._wakeup.set()

    def close(self) -> None:
        """Send what is queued, for a bounded time, and close the sockets."""
        self._is_closing = True
        self._wakeup.set()
        self._thread.join(_CLOSE_SECS)
        if not self._thread.is_alive():
            self._wakeup.close()

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._poller.wait(_IDLE_WAIT_SECS)
            self._wakeup.clear()
            is_closing = self._is_closing  # read before the queue, so that nothing queued is left
            self._send_queued()
            if self._replay is not None:
                self._answer_replays(self._replay)
            if is_closing:
                break
        self._context.destroy(linger=0)

    def _send_queued(self) -> None:
        for _ in range(self._batches.qsize()):  # no more than are there: replay requests have their turn, too
            seq, encode = self._batches.get_nowait()
            payload = encode()
            self._history.add(seq, payload)
            self._pub.send_multipart([self._topic, encode_seq(seq), payload], zmq.NOBLOCK)

    def _answer_replays(self, replay: zmq.Socket[bytes]) -> None:
        for frames in burst(replay):
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQ_BYTES:
                log.debug("dropped a malformed replay request of %d frames", len(frames))
                continue
            subscriber, _, first = frames
            replay.get(zmq.EVENTS)  # makes ZMQ count taken messages now, not up to 1 ms later
            for seq, payload in self._history.since(int.from_bytes(first, "big")):
                replay.send_multipart([subscriber, b"", encode_seq(seq), payload], zmq.NOBLOCK)
            replay.send_multipart([subscriber, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)


class _History:
    """The latest batches, by number."""

    def __init__(self, max_batches: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches = max_batches
        self._num_bytes = 0

    def add(self, seq: int, payload: bytes) -> None:
        self._batches.append((seq, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > self._max_batches or self._num_bytes > MAX_REPLAY_BYTES:
            self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, first: int) -> list[tuple[int, bytes]]:
        return [batch for batch in self._batches if batch[0] >= first]


def _open(sock: zmq.Socket[bytes], endpoint: str, hwm: int, *, binds: bool) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, hwm)
    sock.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        if binds:
            sock.bind(endpoint)
        else:
            sock.connect(endpoint)
    except zmq.ZMQError as error:
        raise StartError(f"--kv-events-config: {endpoint} cannot be used: {error}") from error
