"""The sockets of HTTP servers, taken before anything slow begins; free ports to start processes with."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

_BACKLOG = 2048
_LAST_ANSWERS_SECS = 2
_FREE_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections, above those that Mooncake takes."""


class Listener:
    """A socket that listens, for one HTTP server."""

    def __init__(self, host: str, port: int) -> None:
        """``port`` 0 takes any free one. Raises OSError when the address cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.port: int = self.socket.getsockname()[1]

    def server(self, app: ASGIApp, lifespan: Literal["on", "off"] = "off") -> HttpServer:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # its warnings are about clients that speak no HTTP/1.1, such as h2c probes
            access_log=False,
            lifespan=lifespan,
            ws="none",
            server_header=False,
            proxy_headers=False,  # a caller's address is that of its connection, whatever it says
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_LAST_ANSWERS_SECS,
        )
        return HttpServer(config)


class HttpServer(uvicorn.Server):
    """Leaves signals to its process, which lets requests finish before any server of it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


def _reserve(port: int) -> None:
    """Raises OSError when another has the port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before bind: it would share
        server.listen(1)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            server.accept()[0].close()  # who closes first is left in TIME_WAIT
