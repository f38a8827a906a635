"""File descriptors of a server process: how many it may open, and how many connections these allow.

Nodes and the router raise their limit when they start; ``listening.py`` bounds the connections of a server.
"""

from __future__ import annotations

import resource

MAX_DESCRIPTORS = 1 << 20
"""Highest limit that a process sets for itself. Some container engines allow a billion, and libraries make
tables of that size."""

MAX_CONNECTIONS = 8192
"""Limit for a server's connections, however many descriptors there are: a silent one takes 6 kB of memory."""

FEW_CONNECTIONS = 128
"""Number of connections below which a starting server warns that its limit of descriptors is too low."""

MAX_ACCEPTED_AT_ONCE = 32
"""Connections that an event loop takes from the kernel in one turn."""

_TURNS_TO_CLOSE = 4
"""Turns of the event loop from accepting a connection until the one that it replaces is closed: accepted,
made, known to the server, closed. In each of these turns, more connections are accepted."""

PER_ROUTED_REQUEST = 2
"""Descriptors of a request in the router: the client's connection and the one to its decode node."""

_OWN_DESCRIPTORS = 128
"""Descriptors of a process that are not for clients: files, libraries, the engine, health checks."""


def raise_limit() -> int:
    """Raise this process's soft limit to the hard one, which needs no privilege. Returns the limit.

    Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = attainable_limit()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def attainable_limit() -> int:
    """Return the limit to which ``raise_limit`` raises a lower one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)


def limit() -> int:
    """Return the soft limit, beyond which opening a file fails with EMFILE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def max_connections(descriptors: int, num_each: int = 1, num_servers: int = 1) -> int:
    """Return how many connections each of a process's ``num_servers`` servers may have.

    ``descriptors``: the process's limit. ``num_each``: descriptors of a connection with a request in flight.
    """
    for_clients = descriptors - _OWN_DESCRIPTORS - num_servers * MAX_ACCEPTED_AT_ONCE * _TURNS_TO_CLOSE
    return max(1, min(MAX_CONNECTIONS, for_clients // (num_each * num_servers)))
