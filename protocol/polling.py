"""Waits for several ZMQ channels at once, and receives their messages in bounded bursts.

An engine's loop waits on one ``Poller`` for its control channels and fronts, and for the ``Wakeup`` by which
other threads end the wait early. Sockets belong to the thread that made them. Only ``Poller.wait`` blocks,
and it has a timeout.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import zmq

SEND_HWM = 10_000
"""Most messages that ZMQ queues for a slow peer."""
BURST_MESSAGES = 256
"""Most messages that a channel receives in one turn of its owner's loop: 256 samples take an engine 2 ms."""
_BURST_BYTES = 4 << 20
"""Most bytes that a channel receives in one turn, to which the last message may add: 4 MiB of extents take an
engine 10 ms."""


def burst(*sockets: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yield the frames of messages that have arrived, without waiting: from all sockets together at most
    BURST_MESSAGES, and none once they exceed _BURST_BYTES. ``channels.py`` and ``engine/sockets.py`` receive
    with it."""
    num_messages = num_bytes = 0
    for sock in sockets:
        while num_messages < BURST_MESSAGES and num_bytes <= _BURST_BYTES:
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            yield frames
            num_messages += 1
            num_bytes += sum(map(len, frames))


class Wakeup:
    """A file descriptor that another thread can make readable, to end a ``Poller.wait`` early."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def set(self) -> None:
        """Wake the waiter. Any thread may call this.

        Errors are ignored. A full pipe means that the waiter is awake already. A closed one means that nobody
        waits any more; a thread whose write or look-up outlives the shutdown finds it closed.
        """
        try:
            self._sender.send(b"\0")
        except OSError:
            return

    def clear(self) -> None:
        try:
            while self._receiver.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class HasSocket(Protocol):
    """A channel whose owner receives from it when its socket is readable."""

    @property
    def socket(self) -> zmq.Socket[bytes]: ...


class HasFileno(Protocol):
    """Anything with a file descriptor that can become readable, such as a Wakeup."""

    def fileno(self) -> int: ...


Pollable: TypeAlias = zmq.Socket[bytes] | HasSocket | HasFileno


class Poller:
    """Waits for any of several channels."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def register(self, channel: Pollable) -> None:
        self._poller.register(_polled(channel), zmq.POLLIN)

    def unregister(self, channel: Pollable) -> None:
        self._poller.unregister(_polled(channel))

    def wait(self, timeout_secs: float) -> bool:
        """Return whether something can be received, after at most ``timeout_secs``."""
        return bool(self._poller.poll(round(timeout_secs * 1000)))


def _polled(channel: Pollable) -> zmq.Socket[bytes] | int:
    if isinstance(channel, zmq.Socket):
        return channel
    return channel.socket if hasattr(channel, "socket") else channel.fileno()
