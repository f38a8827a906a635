"""Listening sockets of HTTP servers, and the servers on them.

A service makes its ``Listener`` first, so that a port that is taken ends it before anything slow begins. It
makes the ``HttpServer`` (uvicorn with bounded connections) once it has an application. Several fronts of a
node may share the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from hisparse_pd.serving.http import descriptors
from hisparse_pd.serving.http.certificates import Certificate
from hisparse_pd.serving.http.connections import Connections
from hisparse_pd.serving.http.handshakes import Handshake, Handshakes
from hisparse_pd.serving.http.http_connection import HttpConnection

log = logging.getLogger(__name__)

_BACKLOG = 2048
_LAST_ANSWERS_SECS = 2
"""Time that answers get to be sent when a server shuts down."""
_YIELD_SECS = 0.005
"""Time for which a process leaves a new connection to one that has fewer."""
_TICKS_A_SWEEP = 10
"""Ticks of uvicorn between two sweeps of the connections: a second."""


class Listener:
    """A listening socket for one HTTP server."""

    def __init__(self, host: str, port: int, certificate: Certificate | None = None) -> None:
        """Listen. ``host`` "::" takes IPv4 as well, ``port`` 0 is any free one, a ``certificate`` makes it
        https.

        Raises OSError if the address cannot be bound or the certificate cannot be used.
        """
        if certificate is not None:
            certificate.check()
        self._certificate = certificate
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        try:
            self.socket = socket.create_server(
                (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (while")[0]  # Python appends the address
            raise OSError(
                error.errno,
                f"cannot listen on {host}:{port}: {why}; give an address of this machine and a free port",
            ) from error
        # Connections inherit TCP_NODELAY. Without it the kernel holds back a small write, such as the first
        # token behind the headers, until the client acknowledges the one before, which may take it 40 ms.
        # asyncio sets it only for sockets that name TCP as their protocol; those of create_server do not.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self.socket.getsockname()[1]
        self._num_connections: Sequence[int] = ()
        """Each process's number of connections, in shared memory; empty if one process has the socket."""

    @property
    def scheme(self) -> str:
        return "http" if self._certificate is None else "https"

    def share(self, num_processes: int) -> None:
        """Prepare the socket for several processes. Must be called before it is handed to them."""
        self._num_connections = multiprocessing.RawArray("q", num_processes) if num_processes > 1 else ()

    def server(
        self,
        app: ASGIApp,
        lifespan: Literal["on", "off"] = "off",
        *,
        num_descriptors_each: int = 1,
        num_servers: int = 1,
        process: int = 0,
    ) -> HttpServer:
        """Make the server of this process.

        ``lifespan``: "on" if ``app`` has a start and an end of its own, which uvicorn then calls.
        ``num_descriptors_each``: descriptors of a request. ``num_servers``: servers of this process, this one
        included. ``process``: the number of this process among those that share the socket.
        """
        limit = descriptors.limit()
        connections = Connections(descriptors.max_connections(limit, num_descriptors_each, num_servers))
        if self._num_connections:
            self.socket = SharedSocket(self.socket, connections, self._num_connections, process)
        is_low = connections.limit < descriptors.FEW_CONNECTIONS
        log.log(
            logging.WARNING if is_low else logging.INFO,
            "port %d: at most %d connections (%d descriptors)%s",
            *(self.port, connections.limit, limit),
            ": raise the limit of descriptors (ulimit -n)" if is_low else "",
        )
        protocol: Any = functools.partial(HttpConnection, connections)
        handshakes: Handshakes | None = None
        if self._certificate is not None:
            handshakes = Handshakes(self._certificate.context(), connections)
            protocol = functools.partial(_handshake, handshakes, protocol)
        num_accepted_at_once = 1 if self._num_connections else descriptors.MAX_ACCEPTED_AT_ONCE
        config = _config(app, protocol, lifespan, num_accepted_at_once)
        return HttpServer(config, connections, self._certificate, handshakes)


def _config(
    app: ASGIApp, protocol: Any, lifespan: Literal["on", "off"], num_accepted_at_once: int
) -> uvicorn.Config:
    """Return uvicorn's settings. ``protocol`` makes the protocol of a new connection.

    ``num_accepted_at_once``: connections that the event loop accepts in one turn, for which asyncio takes the
    backlog. ``HttpServer.startup`` then gives the kernel the real backlog.
    """
    return uvicorn.Config(
        app,
        http=protocol,
        backlog=num_accepted_at_once,
        log_config=None,
        log_level="error",  # warnings are about clients that speak no HTTP/1.1, such as h2c probes
        access_log=False,
        lifespan=lifespan,
        ws="none",
        server_header=False,
        proxy_headers=False,  # a caller's address is that of its connection, whatever it says
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_LAST_ANSWERS_SECS,
    )


def _handshake(handshakes: Handshakes, protocol: Any, **given: Any) -> Handshake:
    """Make the protocol of a new connection with TLS; ``protocol(**given)`` takes over from it."""
    return Handshake(handshakes, functools.partial(protocol, **given))


class SharedSocket(socket.socket):
    """A socket from which several processes accept. All wake up for a connection; the one with fewest takes
    it.

    Otherwise the kernel would give nearly all of them to one process, as long as it has nothing else to do.
    """

    def __init__(
        self, sock: socket.socket, connections: Connections, num_connections: Any, process: int
    ) -> None:
        """Take ``sock`` over. ``num_connections``: each process's number of connections, in shared memory."""
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.connections = connections
        self._num_connections = num_connections
        self._process = process
        connections.on_change = self.publish
        self._is_overdue = False
        """Whether a connection was left to others for long enough. Then all that wait are accepted."""
        self._yielding: asyncio.TimerHandle | None = None
        """The time for which a connection is left to them, from when it was first refused here."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError if none waits, and while one is left to a process with
        fewer of them. Needs a running event loop.

        That process may be busy or gone, so it gets ``_YIELD_SECS``. How often this is called meanwhile does
        not matter: a loop that is busy itself comes by less often than that.
        """
        if len(self.connections.live) > min(self._num_connections) and not self._is_overdue:
            if self._yielding is None:
                loop = asyncio.get_running_loop()
                self._yielding = loop.call_later(_YIELD_SECS, self._end_yielding)
            raise BlockingIOError
        try:
            return super().accept()
        except BlockingIOError:
            self._is_overdue = False
            raise

    def _end_yielding(self) -> None:
        self._yielding = None
        if self.fileno() != -1:
            poll = select.poll()
            poll.register(self, select.POLLIN)
            self._is_overdue = bool(poll.poll(0))

    def publish(self) -> None:
        self._num_connections[self._process] = len(self.connections.live)


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: its process lets requests finish before it ends
    servers."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        certificate: Certificate | None,
        handshakes: Handshakes | None,
    ) -> None:
        """``certificate`` and ``handshakes`` are None for a server without TLS."""
        super().__init__(config)
        self.connections = connections
        self._certificate = certificate
        self.handshakes = handshakes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # connections wait in the kernel, where they take no descriptors

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_A_SWEEP == 0:
            self.connections.sweep(time.monotonic())
            if self._certificate is not None and self.handshakes is not None:
                self._certificate.refresh(self.handshakes.context)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.handshakes is not None:
            self.handshakes.drop_all()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
