"""Finds free ports for processes that are yet to be started: the services of ``hisparse-pd pair``, and
tests'."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

FREE_PORTS = range(20_000, 32_768)
"""Ports below those that Linux gives to outgoing connections, and above those that Mooncake uses."""


def free_port() -> int:
    """Return a free port of loopback, for a process that is started with it. Raises OSError if none is free.

    The port's end of a loopback connection is left in TIME_WAIT. For a minute the kernel therefore gives the
    port to no other caller, nor to anyone who binds it without SO_REUSEADDR, which servers set.
    """
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        with contextlib.suppress(OSError):
            reserve(port)
            return port
    raise OSError(f"no port from {FREE_PORTS.start} to {FREE_PORTS.stop - 1} is free")


def reserve(port: int) -> None:
    """Keep a port of loopback for a process that is started with it, as ``free_port`` says, by leaving the
    port's end of a connection in TIME_WAIT. Raises OSError if the port is taken."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        # After bind: before it, the option would let two servers share the port.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.listen(1)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            server.accept()[0].close()  # the side that closes first is left in TIME_WAIT


def is_taken(host: str, port: int) -> bool:
    """Whether a server on this machine has the port, so that another cannot listen on it at ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
