"""The router's connections to nodes: each ends with its request, wherever in it that is cancelled."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.router.connect import NO_TLS, Call, tls_context
from tests.tls_files import TlsFiles, make_tls_files, needs_openssl
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.anyio
ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nmore\r\n"


class Node:
    """A node that answers with the beginning of a stream, and knows its open connections."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.all_closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self.open.add(writer)
        self.all_closed.clear()
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        self.open.discard(writer)
        if not self.open:
            self.all_closed.set()


def url_of(server: asyncio.Server, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def node_and_url(tls: TlsFiles | None = None) -> AsyncIterator[tuple[Node, str]]:
    node = Node()
    server = await asyncio.start_server(node.serve, "127.0.0.1", 0, ssl=tls and tls.serving())
    async with server:
        yield node, url_of(server, "https" if tls else "http")


async def chunks(
    url: str, trusted: TlsFiles | None = None, connect_secs: float = WAIT_SECS
) -> AsyncIterator[bytes]:
    """Yield the chunks of the answer to a call."""
    with closing(Call(url, WAIT_SECS)) as call:
        await call.connect(trusted.trusting() if trusted else NO_TLS, connect_secs)
        await call.ask("GET", "/", [])
        while chunk := await call.read():
            yield chunk


async def ask(url: str, trusted: TlsFiles | None = None, connect_secs: float = WAIT_SECS) -> None:
    async with aclosing(chunks(url, trusted, connect_secs)) as body:  # type: ignore[type-var]
        async for _ in body:
            pass


@pytest.fixture(params=["http", pytest.param("https", marks=needs_openssl)])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    return make_tls_files(tmp_path) if request.param == "https" else None


@pytest.mark.I8
async def test_no_connection_outlives_a_request_that_is_cancelled_at_any_moment(tls: TlsFiles | None) -> None:
    """This also holds between connecting and the first byte, and for a second cancellation while it
    closes."""
    async with node_and_url(tls) as (node, url):
        for num_steps in range(60):
            for num_more in (0, 1, 3):
                asking = asyncio.create_task(ask(url, tls))
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                asking.cancel()
                for _ in range(num_more):
                    await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
        whole = asyncio.create_task(ask(url, tls))
        while not node.open:
            await asyncio.sleep(0)
        whole.cancel()
        await asyncio.wait_for(node.all_closed.wait(), WAIT_SECS)
        assert node.num_accepted > 60


@pytest.mark.I8
async def test_what_nobody_reads_is_not_taken_in() -> None:
    """As soon as it is read, all of it comes, however much that is."""
    content = bytes(20 << 20)
    has_sent = asyncio.Event()

    async def sends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        has_sent.set()
        writer.close()

    async with await asyncio.start_server(sends, "127.0.0.1", 0) as server:
        body = chunks(url_of(server))
        received = await anext(body)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(has_sent.wait(), 0.2)
        async for chunk in body:
            received += chunk
        assert received == content


class PausableTransport(asyncio.Transport):
    """A connection into which the test puts what the node sends."""

    is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


@pytest.mark.I8
async def test_a_call_stops_reading_from_its_socket_until_what_came_is_read() -> None:
    call, transport, piece = Call("http://node", WAIT_SECS), PausableTransport(), bytes(1 << 17)
    call.connection_made(transport)
    with closing(call):
        asking = asyncio.create_task(call.ask("GET", "/", []))
        await asyncio.sleep(0)
        call.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
        await asking
        call.data_received(piece)
        assert not transport.is_paused
        call.data_received(piece)
        assert transport.is_paused
        assert await call.read() == 2 * piece
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        assert not transport.is_paused
        call.data_received(piece)
        assert await reading == piece


async def test_connections_end_with_their_answers(tls: TlsFiles | None) -> None:
    async with node_and_url(tls) as (node, url):
        async with aclosing(chunks(url, tls)) as body:  # type: ignore[type-var]
            assert await anext(body) == b"more"
            assert len(node.open) == 1
        await asyncio.wait_for(node.all_closed.wait(), WAIT_SECS)


@needs_openssl
async def test_a_node_that_is_not_trusted_gets_nothing(tmp_path: Path) -> None:
    ours, others = make_tls_files(tmp_path / "ours"), make_tls_files(tmp_path / "others")

    async with node_and_url(ours) as (node, url):
        for trusted in (others, None):
            with pytest.raises(ssl.SSLCertVerificationError, match="CERTIFICATE_VERIFY_FAILED"):
                await ask(url, trusted)
        assert node.num_accepted == 0


@needs_openssl
async def test_a_node_that_never_agrees_on_tls_is_given_up(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    left = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass
        writer.close()
        left.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        with pytest.raises(TimeoutError):
            await ask(url_of(server, "https"), tls, connect_secs=0.2)
        await asyncio.wait_for(left.wait(), WAIT_SECS)


@needs_openssl
def test_which_nodes_are_trusted(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    plain = RouterSettings(prefill=(("http://p:1", 1),), decode=("http://d:1",))
    assert tls_context(plain).cert_store_stats()["x509_ca"] == 0
    secure = RouterSettings(prefill=(("http://p:1", 1),), decode=("https://d:1",), node_ca_file=tls.cert)
    assert tls_context(secure).cert_store_stats()["x509_ca"] == 1
    for path in (tmp_path / "missing", tls.key):
        with pytest.raises(StartError, match="--node-ca-file"):
            tls_context(secure.model_copy(update={"node_ca_file": path}))


async def test_a_connection_that_nobody_waits_for_is_closed_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_be_made = asyncio.Event(), asyncio.Event()
    create_connection = asyncio.BaseEventLoop.create_connection

    async def slow(loop: Any, *given: Any, **named: Any) -> Any:
        begun.set()
        await may_be_made.wait()
        return await create_connection(loop, *given, **named)

    async with node_and_url() as (node, url):
        monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", slow)
        asking = asyncio.create_task(ask(url))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        may_be_made.set()
        while not node.num_accepted:
            await asyncio.sleep(0)
        await asyncio.wait_for(node.all_closed.wait(), WAIT_SECS)


async def test_a_connection_that_fails_when_nobody_waits_for_it_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_fail, has_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    async def fails(*given: Any, **named: Any) -> Any:
        begun.set()
        await may_fail.wait()
        loop.call_soon(has_failed.set)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", fails)
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    try:
        asking = asyncio.create_task(ask("http://127.0.0.1:1"))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        may_fail.set()
        await has_failed.wait()
        gc.collect()  # what nobody asked for is reported when the task is forgotten
        await asyncio.sleep(0)
        gc.collect()
    finally:
        loop.set_exception_handler(handler)
    assert reported == []


CONTENT = b"data: 1\n\ndata: \r\n0\r\n\r\n2\n\n" * 3
OF_A_LENGTH = b"content-length: %d\r\n\r\n" % len(CONTENT) + CONTENT
IN_CHUNKS = b"transfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%X%s\r\n%s\r\n" % (len(part), extension, part)
    for part, extension in ((CONTENT[:1], b""), (CONTENT[1:60], b";a=b"), (CONTENT[60:], b""))
)
TO_ITS_END = b"\r\n" + CONTENT


async def body_of(*pieces: bytes) -> bytes:
    """Return the body, piece by piece as it is read, of a node that sends this and closes the connection."""

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(says, "127.0.0.1", 0) as server:
        return b"".join([chunk async for chunk in chunks(url_of(server))])


@pytest.mark.parametrize("answer", [OF_A_LENGTH, IN_CHUNKS + b"0 \t;a=b\r\nx-trailer: 1\r\n\r\n", TO_ITS_END])
async def test_a_body_may_be_cut_anywhere(answer: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\n"

    assert await body_of(head + answer) == CONTENT
    assert await body_of(head, *(answer[at : at + 1] for at in range(len(answer)))) == CONTENT


async def test_an_answer_without_a_head_is_an_error() -> None:
    for said in (b"", b"HTTP/1.1 200"):
        with pytest.raises(ConnectionError, match="the connection is closed"):
            await body_of(said)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (OF_A_LENGTH[:-1], "the connection is closed"),
        (IN_CHUNKS, "the connection is closed"),
        (IN_CHUNKS[:-9], "the connection is closed"),
        (IN_CHUNKS + b"no length" + bytes(5000), "begins no chunk"),
        (IN_CHUNKS + b"no length\r\n", "begins no chunk"),
        (
            IN_CHUNKS.replace(b"\r\n\r\n1\r\n", b"\r\n\r\n" + b"0" * 30 + b"1\r\n") + bytes(5000),
            "begins no chunk",
        ),
    ],
)
async def test_a_body_that_is_broken_off_or_none_is_an_error(answer: bytes, expected: str) -> None:
    with pytest.raises(ConnectionError, match=expected):
        await body_of(b"HTTP/1.1 200 OK\r\n" + answer)
