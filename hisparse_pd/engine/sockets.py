"""Both ends of the channels between a node's fronts, which are processes that speak HTTP, and its engines.

An engine connects to a socket of each front. A message about a request goes to the front that the request's
id names; a message about the engine goes to all. On one machine the sockets are ZMQ's ipc sockets. An engine
on another machine of the node connects by tcp, encrypted and authenticated as the control channel between
nodes is, and each end notices when the other is gone. An engine's process makes an ``EngineSocket``
(``start.py``), and a front's ``RankLink`` (``serving/http/rank_link.py``) a ``FrontSocket``.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import (
    EngineLoading,
    EngineReady,
    EngineStats,
    FromEngine,
    GenerateGroup,
    Shutdown,
    ToEngine,
    front_number_of,
)
from hisparse_pd.protocol.channels import ControlKeys, Guard, Heartbeats, load_control_keys, prove_key
from hisparse_pd.protocol.polling import BURST_MESSAGES, SEND_HWM, burst

log = logging.getLogger(__name__)

_HWM = 64
"""Most messages from a front to an engine that ZMQ keeps on each side: few, because one with a prompt of a
million tokens has 4 MB.

An engine on another machine receives up to SEND_HWM, which is more than a front has in flight. At its limit
ZMQ would read no heartbeats either, and the front would take a busy engine for a lost one."""

_RECEIVED_A_TURN = 64
"""Messages that a front takes in at a time: one or two milliseconds of its loop, with the work they cause."""


class FrontGone(Exception):
    """A front on another machine is gone, so that nobody waits for this engine's answers."""


@dataclass(frozen=True)
class Crossing:
    """Settings of the channels between two machines of a node."""

    keys: ControlKeys | None
    allowed: PeerList
    heartbeats: Heartbeats

    @classmethod
    def of(cls, settings: NodeSettings) -> Crossing | None:
        """Return the crossing of a node with these settings; None if it is one machine. Raises
        ControlKeyError."""
        if settings.nnodes == 1:
            return None
        return cls(
            load_control_keys(settings.control_key_file),
            PeerList.parse(settings.allowed_peers),
            Heartbeats(settings.heartbeat_interval_secs, settings.heartbeat_timeout_secs),
        )

    def watch(self, sock: zmq.Socket[bytes], events: int = zmq.EVENT_DISCONNECTED) -> zmq.Socket[bytes]:
        """Return a socket that reports ``events`` of ``sock``. Keeps heartbeats on its connections."""
        sock.setsockopt(zmq.IPV6, 1)
        self.heartbeats.apply_to(sock)
        return sock.get_monitor_socket(events)


class FrontChannel:
    """The engine's end of the channel to one front.

    Messages that the front is too slow to take wait in ``backlog``, in order. Requests in flight bound their
    number: statistics do not join a backlog, because newer ones follow.
    """

    def __init__(self, endpoint: str, crossing: Crossing | None = None) -> None:
        self.backlog: deque[bytes] = deque()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 2000)  # the last answers still leave at shutdown
        self.socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        self.socket.setsockopt(zmq.RCVHWM, _HWM if crossing is None else SEND_HWM)
        self._losses: zmq.Socket[bytes] | None = None
        if crossing is not None:
            prove_key(self.socket, crossing.keys)
            self._losses = crossing.watch(self.socket)
        self.endpoint = endpoint
        self.socket.connect(endpoint)

    @property
    def is_lost(self) -> bool:
        """Whether the connection to a front on another machine has ended; always False on one machine."""
        return self._losses is not None and bool(self._losses.poll(0))

    def send(self, frame: bytes, *, may_be_dropped: bool = False) -> None:
        """Send now, or once the front takes more; never waits. ``may_be_dropped``: drop it instead."""
        self.flush()
        if not (self.backlog and may_be_dropped):
            self.backlog.append(frame)
            self.flush()

    def flush(self) -> None:
        try:
            while self.backlog:
                self.socket.send(self.backlog[0], zmq.NOBLOCK)
                self.backlog.popleft()
        except zmq.Again:
            return

    def close(self) -> None:
        self.flush()
        if self._losses is not None:
            self.socket.disable_monitor()
            self._losses.close()
        self.socket.close()


class EngineSocket:
    """The engine's end of the channels to all of its fronts, in their order."""

    def __init__(self, endpoints: Sequence[str], crossing: Crossing | None = None) -> None:
        """``endpoints``: ZMQ's, one a front. ``crossing``: None when the fronts are on this machine."""
        self.channels = [FrontChannel(endpoint, crossing) for endpoint in endpoints]
        self._leaving: set[int] = set()
        """The indices of fronts that have sent Shutdown."""
        self._num_turns = 0
        """Calls of ``receive``; they decide which channel is read first."""

    def receive(self) -> Iterator[ToEngine]:
        """Yield what has arrived, without waiting, at most a burst; a group counts with each of its samples.

        ``Shutdown`` is yielded once all fronts have sent it. Raises FrontGone if nothing has arrived and a
        front is lost.
        """
        self._num_turns += 1  # each channel is read first in turn, so that no front's burst keeps others out
        first = self._num_turns % len(self.channels)
        channels = self.channels[first:] + self.channels[:first]
        for channel in channels:
            channel.flush()
        num_samples = 0
        for (frame,) in burst(*(channel.socket for channel in channels)):
            message = engine_messages.to_engine_decoder.decode(frame)
            if isinstance(message, Shutdown):
                self._leaving.add(message.front_number)
                if len(self._leaving) < len(self.channels):
                    continue
            yield message
            num_samples += len(message.samples) if isinstance(message, GenerateGroup) else 1
            if num_samples >= BURST_MESSAGES:
                return
        if num_samples == 0 and (lost := [channel.endpoint for channel in channels if channel.is_lost]):
            raise FrontGone(f"the front at {lost[0]} is gone")

    def send(self, message: FromEngine) -> None:
        """Send a message about the engine to all fronts, or one about a request to the request's front.

        Never waits. Statistics for which there is no room are dropped.
        """
        frame = engine_messages.encoder.encode(message)
        if isinstance(message, EngineLoading | EngineReady | EngineStats):
            for channel in self.channels:
                channel.send(frame, may_be_dropped=isinstance(message, EngineStats))
        elif len(self.channels) == 1:
            self.channels[0].send(frame)
        else:
            self.channels[front_number_of(message.request_id)].send(frame)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


class _EngineWatch:
    """Notices the loss of the engine that a bound socket talks to, whoever else connects there and leaves.

    ZMQ's monitor reports every connection by its descriptor, also those of a port scan, which never shake
    hands. The engine's connection is the one that its first message came by.
    """

    def __init__(self, monitor: zmq.Socket[bytes]) -> None:
        """``monitor`` reports accepted and lost connections. The owner of the socket closes it."""
        self.monitor = monitor
        self._connected: set[int] = set()
        """Descriptors of the connections that there are."""
        self._engine: int | None = None
        """The descriptor of the engine's connection; None before its first message."""
        self._is_lost = False
        """Whether that connection has ended, and ``take_loss`` has not said so yet."""

    @property
    def knows_engine(self) -> bool:
        return self._engine is not None

    def note_engine(self, descriptor: int) -> None:
        """Note that a message of the engine has come by this connection."""
        self._follow()
        self._engine = descriptor
        self._is_lost = descriptor not in self._connected  # it may end before its message is read

    def take_loss(self) -> bool:
        """Return whether the engine has gone since the last call."""
        self._follow()
        is_lost, self._is_lost = self._is_lost, False
        return is_lost

    def _follow(self) -> None:
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connected.add(event["value"])
            else:
                self._connected.discard(event["value"])
                self._is_lost |= event["value"] == self._engine


class FrontSocket:
    """A front's end of the channel to one engine. Nothing here waits; its loop watches ``fileno``.

    The descriptor becomes readable when something *changes*, and receiving or sending may use that up. A
    caller that was woken by it goes on until ``is_ready`` is false.
    """

    def __init__(self, endpoint: str, crossing: Crossing | None = None) -> None:
        """``crossing``: None when the engine is on this machine. Raises OSError when it cannot be bound."""
        # A Guard guards all server sockets of its context, so it gets a context of its own.
        self._context = zmq.Context.instance() if crossing is None else zmq.Context()
        self._guard: Guard | None = None
        self._watch: _EngineWatch | None = None
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _HWM)
        self.socket.setsockopt(zmq.RCVHWM, SEND_HWM)
        if crossing is not None:
            self._guard = Guard(self._context, crossing.keys, crossing.allowed, Counter())
            self._guard.protect(self.socket)
            events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            self._watch = _EngineWatch(crossing.watch(self.socket, events))
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            remedy = "; set TMPDIR to a shorter path" if error.errno == errno.ENAMETOOLONG else ""
            raise OSError(error.errno, f"cannot listen at {endpoint} for engines: {error}{remedy}") from error

    def fileno(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def loss_fileno(self) -> int | None:
        """Descriptor that is readable when ``take_loss`` has news; None for an engine on this machine."""
        return None if self._watch is None else int(self._watch.monitor.getsockopt(zmq.FD))

    def take_loss(self) -> bool:
        """Return whether the engine has gone since the last call."""
        return self._watch is not None and self._watch.take_loss()

    def receive(self) -> Iterator[FromEngine]:
        """Yield what has arrived, at most ``_RECEIVED_A_TURN`` messages."""
        for _ in range(_RECEIVED_A_TURN):
            try:
                # On one machine the sender is not needed. Only a Frame tells it, and takes twice as long.
                if self._watch is None:
                    yield engine_messages.from_engine_decoder.decode(self.socket.recv(zmq.NOBLOCK))
                    continue
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = engine_messages.from_engine_decoder.decode(frame.bytes)
            except msgspec.MsgspecError as error:
                # Without a key any process may connect before the engine, which then tries again.
                log.warning(
                    "dropped a message that is no engine's, from %s: %s", frame.get("Peer-Address"), error
                )
                continue
            if not self._watch.knows_engine:
                self._watch.note_engine(int(frame.get(zmq.SRCFD)))
            yield message

    def send(self, message: ToEngine) -> bool:
        """Send without waiting. Returns False when there is no room for the message now."""
        try:
            self.socket.send(engine_messages.encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def is_ready(self, *, to_send: bool) -> bool:
        """Return whether something can be received or, when there is something ``to_send``, sent."""
        events = int(self.socket.getsockopt(zmq.EVENTS))
        return bool(events & (zmq.POLLIN | (zmq.POLLOUT if to_send else 0)))

    def close(self) -> None:
        if self._watch is not None:
            self.socket.disable_monitor()
            self._watch.monitor.close()
        self.socket.close()
        if self._guard is not None:
            self._context.term()
            self._guard.join()
