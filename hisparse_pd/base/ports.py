"""Free ports for processes that are started with them."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

_FREE_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections, above those that Mooncake takes."""


def free_port() -> int:
    """A free port of loopback, for a process that is started with it. Raises OSError when none is free.

    For a minute the kernel keeps it from every other caller, and from whoever binds it without SO_REUSEADDR,
    which servers set: a connection of ours to itself is left in TIME_WAIT.
    """
    for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
        with contextlib.suppress(OSError):
            _reserve(port)
            return port
    raise OSError(f"no port from {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1} is free")


def is_taken(host: str, port: int) -> bool:
    """Whether a server on this machine has the port, so that another cannot listen on it at ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _reserve(port: int) -> None:
    """Raises OSError when another has the port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before bind: it would share
        server.listen(1)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            server.accept()[0].close()  # who closes first is left in TIME_WAIT
