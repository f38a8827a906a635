"""HTTP servers that tests run: within the test's loop, or as a process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

from starlette.types import ASGIApp

from hisparse_pd.serving.http.certificates import Certificate
from hisparse_pd.serving.http.connections import Connections
from hisparse_pd.serving.http.handshakes import Handshake
from hisparse_pd.serving.http.http_connection import HttpConnection
from hisparse_pd.serving.http.listening import HttpServer, Listener
from tests.waiting import WAIT_SECS, until

REPO = Path(__file__).parents[2]


def established(connections: Connections) -> list[HttpConnection]:
    """Return a server's connections, without those in their TLS handshake."""
    return [each for each in connections.live if isinstance(each, HttpConnection)]


def of_clients(connections: Connections) -> list[HttpConnection | Handshake]:
    """Return a server's connections, those in their TLS handshake too."""
    return [each for each in connections.live if isinstance(each, HttpConnection | Handshake)]


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of loopback that is nobody else's until the end, whether a server listens on it or not.

    While none does, connections to it are refused. Only who names the port can listen on it: the socket that
    holds it does not listen, and both set SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@asynccontextmanager
async def serving(
    app: ASGIApp,
    certificate: Certificate | None = None,
    lifespan: Literal["on", "off"] = "off",
    port: int = 0,
) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serve ``app`` on ``port``, or on any free one; yield the started server and its port."""
    listener = Listener("127.0.0.1", port, certificate)
    server = listener.server(app, lifespan)
    task = asyncio.create_task(server.serve(sockets=[listener.socket]))
    try:
        await until(lambda: server.started or task.done(), "the server has started")
        yield server, listener.port
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_SECS)
        listener.socket.close()


@contextmanager
def server_process(
    tmp_path: Path, source: str, *arguments: object
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a program that prints the port that it serves; yield the process and the port."""
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(source))
    with subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(REPO)},
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()
