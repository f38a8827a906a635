"""The connections that an HTTP server keeps: how many, and which one is closed to make room for a new one.

``Listener`` (``listening.py``) makes one ``Connections`` for each server. Its connections (``HttpConnection``
and, before TLS, ``Handshake``) register themselves, and report whether they wait. A connection waits while
the server can do nothing for it before its client does something: send the head or the body of a request, or
read its answer. Each such wait has a limit (``http_connection.py``, ``handshakes.py``). A connection beyond
what the descriptors allow takes the place of one that waits: the oldest one of the address that has most of
these. Where none waits, its request is answered with a 503.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

MAX_STEP_SECS = 2.0
"""Limit for the advance of ``Connections.now`` between two sweeps. After a long turn of the event loop, data
may have come that the server has not read yet, and clients must not be closed for the server's own delay."""


class KeptConnection(Protocol):
    """A connection that a server keeps, in its TLS handshake or behind it."""

    address: str
    """The client's address, from ``address_of``."""

    def expire(self, now: float) -> str | None:
        """Close the connection if its time is up. Returns the reason, None if it stays."""

    def drop(self) -> None:
        """Close the connection without waiting for what its client has not read."""


K = TypeVar("K", bound=KeptConnection)


class ConnectionsByAddress(Generic[K]):
    """Connections by the address of their client, those of an address in the order in which they came."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[K, None]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, connection: K) -> None:
        """Add a connection; one that is there already keeps its place."""
        same_address = self._by_address.setdefault(connection.address, {})
        self._num += connection not in same_address
        same_address.setdefault(connection)

    def discard(self, connection: K) -> None:
        """Remove a connection if it is there."""
        same_address = self._by_address.get(connection.address, {})
        if connection not in same_address:
            return
        del same_address[connection]
        self._num -= 1
        if not same_address:
            del self._by_address[connection.address]

    def oldest_of_most(self) -> K:
        """Return the oldest connection of the address that has most. There must be one."""
        most = max(self._by_address.values(), key=len)
        return next(iter(most))


@dataclass(eq=False)
class Connections:
    """The connections of one server, at most ``limit``."""

    limit: int
    now: float = 0.0
    """Clock for the limits of connections: seconds of serving, in which a long turn of the event loop counts
    as ``MAX_STEP_SECS``."""
    live: set[KeptConnection] = field(default_factory=set)
    waiting: ConnectionsByAddress[KeptConnection] = field(default_factory=ConnectionsByAddress)
    """Live connections that wait for their clients, the longest wait first."""
    closed: Counter[str] = field(default_factory=Counter)
    """Number of connections that were closed or refused since the last report, by the reason."""
    on_change: Callable[[], None] = lambda: None
    """Called when the number of connections has changed."""
    _swept_at: float = float("inf")  # the first sweep advances nothing

    def admit(self, connection: KeptConnection) -> bool:
        """Take a new connection, which waits for its client. Returns whether there is room for it.

        Where there is not, all other connections are being served, and this one stays until it is refused.
        """
        self.live.add(connection)
        self.on_change()
        if len(self.live) > self.limit and self.waiting:
            self.closed["closed for a new one"] += 1
            self.waiting.oldest_of_most().drop()  # which forgets it here, at once
        self.waiting.add(connection)
        return len(self.live) <= self.limit

    def forget(self, connection: KeptConnection) -> None:
        """Take out a connection that has ended, or that goes on under another protocol."""
        self.live.discard(connection)
        self.on_change()
        self.waiting.discard(connection)

    def set_waiting(self, connection: KeptConnection, is_waiting: bool) -> None:
        """Note whether a connection waits for its client from now on; one that was forgotten does not."""
        if is_waiting and connection in self.live:
            self.waiting.add(connection)
        else:
            self.waiting.discard(connection)

    def sweep(self, now: float) -> None:
        """Close connections whose time is up, and log how many. Called about once a second.

        ``now``: the time of ``time.monotonic``.
        """
        self.now += min(max(now - self._swept_at, 0.0), MAX_STEP_SECS)
        self._swept_at = now
        for connection in tuple(self.live):
            if (reason := connection.expire(self.now)) is not None:
                self.closed[reason] += 1
        if self.closed:
            counts = ", ".join(f"{count} {reason}" for reason, count in self.closed.items())
            log.warning("connections: %s; %d of at most %d are left", counts, len(self.live), self.limit)
            self.closed.clear()


def address_of(client: tuple[str, int] | None) -> str:
    """Return the address under which ``Connections`` counts a client: for IPv6 its /64, which is one
    host's."""
    if not client:
        return ""
    try:
        ip = ipaddress.ip_address(client[0])
    except ValueError:
        return client[0]
    if ip.version == 6 and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)
