"""Connections without TLS yet are cheap before their hello, bounded after it, and lock nobody out."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from hisparse_pd.serving.http import handshakes
from hisparse_pd.serving.http.certificates import Certificate
from hisparse_pd.serving.http.listening import HttpServer
from tests.tls_files import TlsFiles, make_tls_files, needs_openssl
from tests.unit import servers
from tests.unit.servers import of_clients, server_process
from tests.waiting import WAIT_SECS, until

pytestmark = [needs_openssl, pytest.mark.anyio, pytest.mark.I7, pytest.mark.I8]

LIMIT = 6
ELSEWHERE = "127.0.0.2"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode() + str(len(body)).encode()})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls_files(tmp_path_factory.mktemp("tls"))


@dataclass
class Served:
    server: HttpServer
    port: int
    files: TlsFiles

    @property
    def num_begun(self) -> int:
        assert self.server.handshakes is not None
        return len(self.server.handshakes.under_way)

    @asynccontextmanager
    async def stranger(
        self, data: bytes = b"", source: str = "127.0.0.1"
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a raw connection and send ``data``. Returns once the server has the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))
        name = writer.get_extra_info("sockname")
        try:
            await until(lambda: name in {c.client for c in of_clients(self.server.connections)})
            writer.write(data)
            yield reader, writer
        finally:
            writer.close()

    async def get(self, source: str = "127.0.0.1") -> str:
        transport = httpx.AsyncHTTPTransport(verify=self.files.trusting(), local_address=source)
        async with httpx.AsyncClient(transport=transport, timeout=WAIT_SECS) as client:
            return (await client.post(f"https://127.0.0.1:{self.port}/", content=b"x" * 10)).text


@asynccontextmanager
async def serving(files: TlsFiles, limit: int = LIMIT) -> AsyncIterator[Served]:
    async with servers.serving(app, Certificate(files.cert, files.key)) as (server, port):
        server.connections.limit = limit
        yield Served(server, port, files)


def hello() -> bytes:
    """Return the first bytes that a TLS client sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


async def ended(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(WAIT_SECS):
        try:
            await reader.read()
        except ConnectionResetError:
            return


async def test_who_says_no_hello_makes_room_and_costs_no_other_address(files: TlsFiles) -> None:
    async with serving(files) as served, AsyncExitStack() as stack:
        early, _ = await stack.enter_async_context(served.stranger())
        strangers = [
            await stack.enter_async_context(served.stranger((b"", hello()[:100])[i % 2], ELSEWHERE))
            for i in range(3 * LIMIT)
        ]
        assert len(served.server.connections.live) == LIMIT
        assert served.num_begun == 0
        for reader, _ in strangers[: 2 * LIMIT]:
            await ended(reader)
        assert await served.get() == "https10"
        assert not early.at_eof()


async def test_handshakes_that_have_begun_are_bounded(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 3)
    async with serving(files, limit=100) as served, AsyncExitStack() as stack:
        mine, _ = await stack.enter_async_context(served.stranger(hello()))
        await until(lambda: served.num_begun == 1)
        strangers = [await stack.enter_async_context(served.stranger(hello(), ELSEWHERE)) for _ in range(20)]
        for reader, _ in strangers:  # the last ones have no less to say to it
            await asyncio.wait_for(reader.read(1), WAIT_SECS)
        assert served.num_begun == 3
        assert await served.get() == "https10"
        assert await served.get(ELSEWHERE) == "https10"
        assert len(await asyncio.wait_for(mine.read(1), WAIT_SECS)) == 1
        assert not mine.at_eof()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x02",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\0\x05hello",
    ],
    ids=["http", "no version", "empty", "too long", "no hello"],
)
async def test_what_is_no_hello_ends_at_once(files: TlsFiles, data: bytes) -> None:
    async with serving(files) as served, served.stranger(data) as (reader, _):
        await ended(reader)
        await until(lambda: not served.server.connections.live)
        assert served.num_begun == 0


async def test_a_hello_may_come_in_drips_and_has_its_time(files: TlsFiles) -> None:
    async with serving(files) as served, served.stranger() as (reader, writer):
        for byte in hello():
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await asyncio.wait_for(reader.readexactly(1), WAIT_SECS)) == b"\x16"
        assert served.num_begun == 1
        served.server.connections.now += handshakes.HANDSHAKE_SECS
        await ended(reader)
        assert not served.server.connections.live


async def test_many_clients_at_once_are_all_served(files: TlsFiles) -> None:
    async with serving(files, limit=100) as served:
        assert await asyncio.gather(*(served.get() for _ in range(40))) == ["https10"] * 40


SERVER = """
    import asyncio, resource, sys
    from pathlib import Path
    from hisparse_pd.serving.http.certificates import Certificate
    from hisparse_pd.serving.http.listening import Listener
    from tests.unit.http.test_handshakes import app

    resource.setrlimit(resource.RLIMIT_NOFILE, (1500, 1500))
    listener = Listener("127.0.0.1", 0, Certificate(Path(sys.argv[1]), Path(sys.argv[2])))
    print(listener.port, flush=True)
    asyncio.run(listener.server(app).serve(sockets=[listener.socket]))
"""


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def test_thousands_of_silent_connections_cost_little_and_lock_nobody_out(
    tmp_path: Path, files: TlsFiles
) -> None:
    said = (b"", hello()[:100])
    with (
        server_process(tmp_path, SERVER, files.cert, files.key) as (process, port),
        ExitStack() as stack,
    ):
        client = stack.enter_context(httpx.Client(verify=files.trusting(), timeout=WAIT_SECS))
        url = f"https://127.0.0.1:{port}/"
        assert client.post(url).text == "https0"
        before = resident_mib(process.pid)
        for number in range(2000):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_SECS))
            stranger.sendall(said[number % 2])
        assert httpx.post(url, verify=files.trusting(), timeout=WAIT_SECS).text == "https0"
        assert resident_mib(process.pid) - before < 40, "each may have 30 kB"
