"""Descriptors of a process that serves: how many it may have, and how many connections they allow for."""

from __future__ import annotations

import resource

MAX_DESCRIPTORS = 1 << 20
"""More are not asked for: some container engines allow a billion, and libraries make tables of that size."""

MAX_CONNECTIONS = 8192
"""Of a server, however many descriptors there are: a silent one takes 6 kB of memory."""

FEW_CONNECTIONS = 128
"""Below that a server says, when it starts, that its limit of descriptors is too low."""

MAX_ACCEPTED_AT_ONCE = 32
"""Connections that an event loop takes from the kernel in one turn."""

_TURNS_TO_CLOSE = 4
"""Of an event loop from taking a connection to having closed the one whose place it takes: accepted, made,
heard of by the server, closed. In each of them more are taken."""

PER_ROUTED_REQUEST = 2
"""Descriptors of a request in the router: the client's connection and the one to its decode node."""

_OWN = 128
"""Of a process, for anything but clients: files, libraries, the engine, health checks."""


def raise_limit() -> int:
    """Raise this process's soft limit to the hard one, which needs no privilege. Returns the limit.

    Processes that are started from here inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = attainable()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def attainable() -> int:
    """The limit that ``raise_limit`` comes to, if it is not higher already."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)


def limit() -> int:
    """The soft limit, at which opening one more fails with EMFILE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def max_connections(descriptors: int, num_each: int = 1, num_servers: int = 1) -> int:
    """How many connections each of ``num_servers`` servers of a process may have.

    ``descriptors``: the process's limit. ``num_each``: what a connection takes with a request in flight.
    """
    for_clients = descriptors - _OWN - num_servers * MAX_ACCEPTED_AT_ONCE * _TURNS_TO_CLOSE
    return max(1, min(MAX_CONNECTIONS, for_clients // (num_each * num_servers)))
