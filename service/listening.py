"""The sockets of HTTP servers, taken before anything slow begins."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from service import descriptors
from service.connections import Connection, Connections

log = logging.getLogger(__name__)

_BACKLOG = 2048
_LAST_ANSWERS_SECS = 2
_TICKS_A_SWEEP = 10
"""uvicorn ticks ten times a second."""


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

    def server(
        self,
        app: ASGIApp,
        lifespan: Literal["on", "off"] = "off",
        *,
        num_descriptors_each: int = 1,
        num_servers: int = 1,
        num_processes: int = 1,
    ) -> HttpServer:
        """``num_descriptors_each``: of a request; ``num_servers``: of this process, this one included;
        ``num_processes``: that accept from this socket.
        """
        limit = descriptors.limit()
        connections = Connections(descriptors.max_connections(limit, num_descriptors_each, num_servers))
        log.info("port %d: at most %d connections (%d descriptors)", self.port, connections.limit, limit)
        protocol: Any = functools.partial(Connection, connections)
        config = uvicorn.Config(
            app,
            http=protocol,
            # One by one where others accept as well: who has much to do takes fewer.
            backlog=descriptors.MAX_ACCEPTED_AT_ONCE if num_processes == 1 else 1,
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
        return HttpServer(config, connections)


class HttpServer(uvicorn.Server):
    """Leaves signals to its process, which lets requests finish before any server of it ends."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # in the kernel, where waiting takes none of our descriptors

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_A_SWEEP == 0:
            self.connections.sweep(time.monotonic())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
