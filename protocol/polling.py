"""Waiting for several ZMQ channels at once, and taking in what has come in bounded bursts.

Sockets belong to the thread that made them. Nothing here blocks but ``Poller.wait``, which has a timeout.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Protocol

import zmq

SEND_HWM = 10_000
"""Messages that ZMQ keeps for a peer that is slow to take them."""
BURST_MESSAGES = 256
_BURST_BYTES = 4 << 20
"""What a channel takes in between two turns of its owner's loop, in messages and in bytes; the rest waits.

One message more than the bytes may come. 256 samples take an engine 2 ms, 4 MiB of extents 10 ms.
"""


class HasSocket(Protocol):
    """A channel of this project: its owner receives from it when its socket is readable."""

    @property
    def socket(self) -> zmq.Socket[bytes]: ...


def burst(*sockets: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """The frames of the messages that have arrived, without waiting, a bounded number of all of them."""
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
        """From any thread. A full pipe is fine: the waiter is awake already. Closed: nobody waits any more.

        A thread that is left behind at a shutdown calls it when its write or look-up comes back.
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


class HasFileno(Protocol):
    """What else can become readable, such as a Wakeup."""

    def fileno(self) -> int: ...


class Poller:
    """Waits for any of several channels."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def register(self, channel: HasSocket | HasFileno) -> None:
        self._poller.register(_pollable(channel), zmq.POLLIN)

    def unregister(self, channel: HasSocket | HasFileno) -> None:
        self._poller.unregister(_pollable(channel))

    def wait(self, timeout_secs: float) -> bool:
        """True when something can be received."""
        return bool(self._poller.poll(round(timeout_secs * 1000)))


def _pollable(channel: HasSocket | HasFileno) -> zmq.Socket[bytes] | int:
    return channel.socket if hasattr(channel, "socket") else channel.fileno()
