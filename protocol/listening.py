"""The sockets of HTTP servers, taken before anything slow begins."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

_BACKLOG = 2048
_LAST_ANSWERS_SECS = 2


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
