"""The router's connections to nodes: each ends with its request, wherever in it that is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpcore
import httpx
import pytest

from hisparse_pd.settings import RouterSettings
from router.connect import CaFileError, OwnConnections, tls_context
from tests.tls_files import TlsFiles, make_tls_files, needs_openssl

WAIT_SECS = 60.0
ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nmore\r\n"


class Node:
    """Answers with the beginning of a stream, and knows which connections stand."""

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


@asynccontextmanager
async def node_and_client(tls: TlsFiles | None = None) -> AsyncIterator[tuple[Node, httpx.AsyncClient, str]]:
    node = Node()
    server = await asyncio.start_server(node.serve, "127.0.0.1", 0, ssl=tls and tls.serving())
    url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    transport = OwnConnections(tls.trusting()) if tls else OwnConnections()
    async with server, httpx.AsyncClient(transport=transport, timeout=WAIT_SECS) as client:
        yield node, client, url


async def ask(client: httpx.AsyncClient, url: str) -> None:
    async with client.stream("GET", url) as response:
        async for _ in response.aiter_raw():
            pass


@pytest.fixture(params=["http", pytest.param("https", marks=needs_openssl)])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    return make_tls_files(tmp_path) if request.param == "https" else None


@pytest.mark.I8
def test_no_connection_outlives_a_request_that_is_cancelled_at_any_moment(tls: TlsFiles | None) -> None:
    """Also between a connection's making and its first byte, and again while it is being closed."""

    async def main() -> None:
        async with node_and_client(tls) as (node, client, url):
            for num_steps in range(60):
                for num_more in (0, 1, 3):
                    asking = asyncio.create_task(ask(client, url))
                    for _ in range(num_steps):
                        await asyncio.sleep(0)
                    asking.cancel()
                    for _ in range(num_more):
                        await asyncio.sleep(0)
                    asking.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await asking
            whole = asyncio.create_task(ask(client, url))
            while not node.open:
                await asyncio.sleep(0)
            whole.cancel()
            await asyncio.wait_for(node.all_closed.wait(), WAIT_SECS)
            assert node.num_accepted > 60

    asyncio.run(main())


def test_connections_end_with_their_answers(tls: TlsFiles | None) -> None:
    async def main() -> None:
        async with node_and_client(tls) as (node, client, url):
            async with client.stream("GET", url) as response:
                assert await anext(response.aiter_raw()) == b"more"
                assert len(node.open) == 1
            await asyncio.wait_for(node.all_closed.wait(), WAIT_SECS)

    asyncio.run(main())


def test_errors_are_the_librarys() -> None:
    async def main() -> None:
        async with node_and_client() as (_, client, url):
            pass
        async with httpx.AsyncClient(transport=OwnConnections()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)

    asyncio.run(main())


@needs_openssl
def test_a_node_that_is_not_trusted_gets_nothing(tmp_path: Path) -> None:
    ours, others = make_tls_files(tmp_path / "ours"), make_tls_files(tmp_path / "others")

    async def main() -> None:
        async with node_and_client(ours) as (node, _, url):
            async with httpx.AsyncClient(transport=OwnConnections(others.trusting())) as client:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get(url)
            async with httpx.AsyncClient(transport=OwnConnections()) as client:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get(url)
            assert node.num_accepted == 0

    asyncio.run(main())


@needs_openssl
def test_a_node_that_never_agrees_on_tls_is_given_up(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)

    async def main() -> None:
        left = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1 << 16):
                pass
            writer.close()
            left.set()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            timeout = httpx.Timeout(WAIT_SECS, connect=0.2)
            async with httpx.AsyncClient(transport=OwnConnections(tls.trusting()), timeout=timeout) as client:
                with pytest.raises(httpx.ConnectTimeout):
                    await client.get(url)
            await asyncio.wait_for(left.wait(), WAIT_SECS)

    asyncio.run(main())


@needs_openssl
def test_which_nodes_are_trusted(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    plain = RouterSettings(prefill=(("http://p:1", 1),), decode=("http://d:1",))
    assert tls_context(plain).cert_store_stats()["x509_ca"] == 0
    secure = RouterSettings(prefill=(("http://p:1", 1),), decode=("https://d:1",), node_ca_file=tls.cert)
    assert tls_context(secure).cert_store_stats()["x509_ca"] == 1
    for path in (tmp_path / "missing", tls.key):
        with pytest.raises(CaFileError, match="node_ca_file"):
            tls_context(secure.model_copy(update={"node_ca_file": path}))


def test_a_connection_that_nobody_waits_for_is_closed_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, is_made, is_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Stream(httpcore.AsyncNetworkStream):
        async def aclose(self) -> None:
            is_closed.set()

    async def connect(*args: object) -> Stream:
        begun.set()
        await is_made.wait()
        return Stream()

    async def main() -> None:
        monkeypatch.setattr("router.connect.connect", connect)
        async with httpx.AsyncClient(transport=OwnConnections()) as client:
            asking = asyncio.create_task(client.get("http://127.0.0.1:1/"))
            await begun.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            is_made.set()
            await asyncio.wait_for(is_closed.wait(), WAIT_SECS)

    asyncio.run(main())
