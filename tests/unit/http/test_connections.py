"""Clients that connect and make a server wait: each has a time limit, and together they lock nobody out."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hisparse_pd.serving.http import connections, descriptors
from hisparse_pd.serving.http.connections import Connections
from hisparse_pd.serving.http.framing import MAX_SMALL_CHUNKS, SMALL_CHUNK_BYTES
from hisparse_pd.serving.http.http_connection import (
    BODY_WINDOW_BYTES,
    BODY_WINDOW_SECS,
    HEAD_SECS,
    UNREAD_SECS,
    HttpConnection,
)
from hisparse_pd.serving.http.listening import HttpServer
from tests.unit import servers
from tests.unit.servers import established, server_process
from tests.waiting import WAIT_SECS, until

pytestmark = [pytest.mark.anyio, pytest.mark.I7, pytest.mark.I8]

LIMIT = 6
GET = b"GET /hello HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"


class Client:
    """A raw connection from an address of loopback."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server_end: HttpConnection
    ) -> None:
        self._reader, self._writer = reader, writer
        self._num_unheard = 0
        take_in = server_end.data_received

        def count_and_take_in(data: bytes) -> None:
            self._num_unheard -= len(data)
            take_in(data)

        server_end.data_received = count_and_take_in  # type: ignore[method-assign]

    def send(self, data: bytes) -> None:
        self._num_unheard += len(data)
        self._writer.write(data)

    async def say(self, data: bytes) -> None:
        """Send ``data``, and return once the server has read it."""
        self.send(data)
        await until(lambda: self._num_unheard == 0, "the server has read what was sent")

    async def read(self) -> bytes:
        """Return all that comes until the other end closes."""
        try:
            return await asyncio.wait_for(self._reader.read(), WAIT_SECS)
        except ConnectionResetError:
            return b""

    async def read_head(self) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), WAIT_SECS)

    def close(self) -> None:
        self._writer.close()


class Served:
    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.connections = server.connections
        self.port = port
        self.release = asyncio.Event()
        self.clients: list[Client] = []

    async def connect(self, data: bytes = b"", source: str = "127.0.0.1", **options: int) -> Client:
        """Connect a new client and send ``data``. Returns once the server has read it."""
        opened = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0), **options)
        client = Client(*opened, await self.server_end(opened[1].get_extra_info("sockname")))
        self.clients.append(client)
        await client.say(data)
        return client

    async def server_end(self, client: tuple[str, int]) -> HttpConnection:
        """Return the connection of the client with this address and port, once the server has it."""

        def found() -> list[HttpConnection]:
            return [each for each in established(self.connections) if each.client == client]

        await until(found, "the server has the connection")
        return found()[0]

    def pass_time(self, secs: float) -> None:
        self.connections.now += secs
        self.connections.sweep(time.monotonic())

    async def get(self, path: str = "/hello") -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECS) as client:
            return await client.get(url)


@asynccontextmanager
async def serving(limit: int = LIMIT) -> AsyncIterator[Served]:
    async def hello(request: Request) -> Response:
        return PlainTextResponse("hello")

    async def echo(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def wait(request: Request) -> Response:
        await served.release.wait()
        return PlainTextResponse("waited")

    async def pour(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            while not served.release.is_set():
                yield b"x" * (1 << 20)
                await asyncio.sleep(0)  # to a client that is gone it would not wait

        return StreamingResponse(chunks())

    routes = [Route(f"/{f.__name__}", f, methods=["GET", "POST"]) for f in (hello, echo, wait, pour)]
    async with servers.serving(Starlette(routes=routes)) as (server, port):
        server.connections.limit = limit
        served = Served(server, port)
        try:
            yield served
        finally:
            for client in served.clients:
                client.close()
            served.release.set()


# --- time limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "more", "answer"),
    [
        (b"", [], b""),
        (b"GET /hello HT", [], b"HTTP/1.1 408 "),
        (b"GET /hello HTTP/1.1\r\n", [b"x: a\r\n", b"y: b\r\n", b"z: c\r\n"], b"HTTP/1.1 408 "),
        (POST, [], b"HTTP/1.1 408 "),
        (POST, [b"x", b"x", b"x"], b"HTTP/1.1 408 "),
    ],
    ids=["silent", "half a head", "a head in drips", "half a body", "a body in drips"],
)
async def test_a_request_that_is_not_sent_is_not_waited_for(
    first: bytes, more: list[bytes], answer: bytes
) -> None:
    async with serving() as served:
        client = await served.connect(first)
        for drip in more:
            served.pass_time(max(HEAD_SECS, BODY_WINDOW_SECS) / 4)
            await client.say(drip)
        assert len(served.connections.live) == 1
        served.pass_time(max(HEAD_SECS, BODY_WINDOW_SECS))
        got = await client.read()
        assert got.startswith(answer) if answer else got == b""
        if answer:
            assert b"must" in got
        await until(lambda: not served.server.server_state.connections)
        assert not served.connections.live


async def test_a_head_after_an_answer_has_its_time_from_its_first_byte() -> None:
    async with serving() as served:
        client = await served.connect(GET)
        await client.read_head()
        served.pass_time(2 * HEAD_SECS)
        assert len(served.connections.live) == 1, "uvicorn's own limit holds between requests"
        await client.say(b"GET /he")
        served.pass_time(HEAD_SECS / 2)
        assert len(served.connections.live) == 1
        served.pass_time(HEAD_SECS)
        assert b"HTTP/1.1 408 " in await client.read()


async def test_a_long_body_and_a_long_answer_have_all_the_time_they_use() -> None:
    async with serving() as served:
        body, waits = (
            await served.connect(POST),
            await served.connect(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n"),
        )
        num_left = 1_000_000
        while num_left:
            piece = min(num_left, 4 * BODY_WINDOW_BYTES)
            await body.say(b"x" * piece)
            num_left -= piece
            served.pass_time(BODY_WINDOW_SECS)
        assert b"200 OK" in await body.read_head()
        served.release.set()
        assert b"200 OK" in await waits.read_head()


def is_full(connection: HttpConnection) -> bool:
    """Whether the kernel takes nothing more from the connection."""
    return not select.select([], [connection.transport.get_extra_info("socket")], [], 0)[1]


async def test_an_answer_that_nobody_reads_ends() -> None:
    async with serving() as served:
        with socket.create_connection(("127.0.0.1", served.port)) as reads_nothing:
            connection = await served.server_end(reads_nothing.getsockname())
            reads_nothing.sendall(b"GET /pour HTTP/1.1\r\nhost: a\r\n\r\n")
            await until(lambda: connection.flow.write_paused and is_full(connection), "the buffers are full")
            served.pass_time(0)
            served.pass_time(UNREAD_SECS / 2)
            assert served.connections.live
            served.pass_time(UNREAD_SECS)
            await until(lambda: not served.server.server_state.connections)


def test_what_the_server_stood_still_for_is_nobodys_silence() -> None:
    held = Connections(LIMIT)
    held.sweep(1000.0)
    held.sweep(1001.0)
    assert held.now == 1.0
    held.sweep(1061.0)
    assert held.now == 1.0 + connections.MAX_STEP_SECS
    assert connections.MAX_STEP_SECS < HEAD_SECS / 2


# --- what is no HTTP, or too dear ----------------------------------------------------------------------

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("said", "status", "why"),
    [
        (b"GET /hello HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "illegal request line"),
        (b"x" * 60_000 + b"\r\n\r\n", 400, "xxx…"),
        (b"GET /hello HTTP/1.1\r\nx: ".ljust((1 << 16) + 1, b"a"), 431, "65536 bytes"),
        (b"GET /hello HTTP/1.1\r\nhost: a\r\nx: " + b"a" * (1 << 16) + b"\r\n\r\n", 431, "65536 bytes"),
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n", 501, "Transfer-Encoding"),
        (CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n", 400, "send one of them"),
        (CHUNKED + b"\r\nno length\r\n", 400, "no length"),
        (CHUNKED + b"\r\n" + b"1\r\nx\r\n" * (MAX_SMALL_CHUNKS + 9), 400, f"{SMALL_CHUNK_BYTES} bytes each"),
    ],
)
async def test_what_cannot_be_read_is_answered_with_the_reason(said: bytes, status: int, why: str) -> None:
    async with serving() as served:
        head, _, body = (await (await served.connect(said)).read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert why in json.loads(body)["error"]["message"]
        assert sum(served.connections.closed.values()) == 1


async def test_a_body_that_breaks_behind_its_answer_only_ends_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as served:
        client = await served.connect(CHUNKED.replace(b"echo", b"nothing") + b"\r\n")
        assert b"404 Not Found" in await client.read_head()
        client.send(b"no length\r\n")
        assert b"HTTP/1.1" not in await client.read()
        assert not caplog.records


async def test_a_long_body_may_come_in_many_chunks() -> None:
    async with serving() as served:
        body = (b"%x\r\n%b\r\n" % (SMALL_CHUNK_BYTES, b"x" * SMALL_CHUNK_BYTES)) * 3 * MAX_SMALL_CHUNKS
        client = await served.connect(
            CHUNKED + b"\r\n" + b"1\r\nx\r\n" * MAX_SMALL_CHUNKS + body + b"0\r\n\r\n"
        )
        assert b"200 OK" in await client.read_head()


# --- how many there are ------------------------------------------------------------------------------


async def test_who_says_nothing_makes_room_for_who_does() -> None:
    async with serving() as served:
        strangers = [await served.connect((b"", b"GET / HT", POST)[i % 3]) for i in range(3 * LIMIT)]
        assert len(served.connections.live) == LIMIT
        assert (await served.get()).text == "hello"
        for early in strangers[: 2 * LIMIT]:
            assert await early.read() == b""


async def test_the_silence_of_one_address_costs_no_other() -> None:
    async with serving() as served:
        slow = await served.connect(POST)
        idle = await served.connect(GET)
        await idle.read_head()
        for _ in range(3 * LIMIT):
            await served.connect(source="127.0.0.2")
        assert len(served.connections.live) == LIMIT
        slow.send(b"x" * 1_000_000)
        assert b"200 OK" in await slow.read_head()
        idle.send(GET)
        assert b"200 OK" in await idle.read_head()


async def test_who_reads_nothing_makes_room_too() -> None:
    async with serving() as served:
        for _ in range(LIMIT):
            await served.connect(b"GET /pour HTTP/1.1\r\nhost: a\r\n\r\n")
        await until(lambda: all(c.flow.write_paused for c in established(served.connections)))
        assert (await served.get()).text == "hello"


async def test_a_request_beside_as_many_as_there_may_be_is_refused_with_the_bound() -> None:
    async with serving() as served:
        waits = [await served.connect(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n") for _ in range(LIMIT)]
        await until(lambda: not served.connections.waiting)
        early = await served.connect()
        refused = await served.get()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert f"its limit of {LIMIT} connections" in refused.json()["error"]["message"]
        assert "ulimit -n" in refused.json()["error"]["message"]
        assert await early.read() == b"", "it was silent when another one came"
        later = await served.connect()
        served.release.set()
        for client in waits:
            assert b"200 OK" in await client.read_head()
            client.close()
        await until(lambda: len(served.connections.live) == 1)
        later.send(GET)
        assert b"200 OK" in await later.read_head(), "there is room by the time of its request"


SERVER = """
    import asyncio, resource, sys
    from hisparse_pd.serving.http.listening import Listener

    async def hello(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    resource.setrlimit(resource.RLIMIT_NOFILE, (320, 320))
    listener = Listener("127.0.0.1", 0)
    own = [open("/dev/null") for _ in range(110)]
    print(listener.port, flush=True)
    asyncio.run(listener.server(hello).serve(sockets=[listener.socket]))
"""


def test_more_silent_connections_than_there_are_descriptors_lock_nobody_out(tmp_path: Path) -> None:
    """They come at once to a server with 320 descriptors, 110 of which it uses itself.

    It never runs out of them: without a descriptor, a loop accepts nobody for a second.
    """
    with server_process(tmp_path, SERVER) as (server, port), ExitStack() as stack:
        server.send_signal(signal.SIGSTOP)
        for number in range(700):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS))
            stranger.sendall((b"", b"GET / HTTP/1.1\r\nx: ")[number % 2])
        server.send_signal(signal.SIGCONT)
        for _ in range(3):
            assert httpx.get(f"http://127.0.0.1:{port}/", timeout=WAIT_SECS, trust_env=False).text == "hello"
        server.kill()
        assert server.stderr is not None
        assert "Too many open files" not in server.stderr.read()


# --- descriptors -------------------------------------------------------------------------------------


def test_connections_leave_descriptors_for_all_else() -> None:
    for limit in (512, 1024, 4096, 20_000, 1 << 20):
        for num_each, num_servers in ((1, 1), (1, 2), (3, 1)):
            most = descriptors.max_connections(limit, num_each, num_servers)
            assert 1 <= most <= descriptors.MAX_CONNECTIONS
            accepted = 4 * descriptors.MAX_ACCEPTED_AT_ONCE
            assert num_servers * (most * num_each + accepted) + 128 <= limit
    assert descriptors.max_connections(64) == 1


def test_the_soft_limit_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert descriptors.raise_limit() == min(hard, descriptors.MAX_DESCRIPTORS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (descriptors.limit(), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
