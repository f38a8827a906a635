"""Real HTTP servers on loopback that answer as nodes do, and a real router before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.router.drain import Drain
from hisparse_pd.router.nodes import NodeKind
from hisparse_pd.router.server import create_app
from tests.unit import servers
from tests.waiting import NEVER_SECS, WAIT_SECS

Behaviour = Callable[["FakeNode", Send], Awaitable[None]]


@asynccontextmanager
async def serving(app: Any, port: int = 0) -> AsyncIterator[str]:
    """Serve an ASGI application on ``port``, or on any free one. Yields its URL."""
    lifespan: Literal["on", "off"] = "on" if isinstance(app, Starlette) else "off"
    async with servers.serving(app, lifespan=lifespan, port=port) as (_, port):
        yield f"http://127.0.0.1:{port}"


@dataclass
class FakeNode:
    """A node that answers as ``behaviour`` says, and records its requests and whether its client left early.

    A prefill node needs a behaviour for the router's questions about the node; it gets no other requests.
    """

    behaviour: Behaviour
    models: tuple[str, ...] = ("tiny",)
    loads: list[int] = field(default_factory=lambda: [0])
    """Number of requests of each rank."""
    healthy: bool = True
    health: bytes = b""
    """Body of its /health while it is healthy."""
    trouble: bytes = b""
    """Body of its /health while it is not healthy."""
    requests: list[tuple[str, httpx.Headers, bytes]] = field(default_factory=list)
    says: bytes | None = None
    """Answer to questions about its load, its models and itself, if it is not to tell the truth."""
    num_without_info: int = 0
    """Next questions about itself that it does not answer."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """The router's own questions: path and Authorization header."""
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    close: Callable[[], Awaitable[None]] = field(default=lambda: asyncio.sleep(0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            self.asked.append((scope["path"], Request(scope).headers.get("authorization")))
        match scope["path"]:
            case "/health":
                await (answer(send, self.health, 200) if self.healthy else answer(send, self.trouble, 503))
            case "/server_info" if self.num_without_info:
                self.num_without_info -= 1
                await answer(send, b"", 503)
            case "/get_load" | "/v1/models" | "/server_info" | "/model_info" | "/tokenizer_info" if (
                self.says is not None
            ):
                await answer(send, self.says)
            case "/get_load":
                loads = [{"dp_rank": rank, "num_reqs": load} for rank, load in enumerate(self.loads)]
                await answer(send, json.dumps(loads).encode())
            case "/v1/models":
                data = [{"id": name, "object": "model"} for name in self.models]
                await answer(send, json.dumps({"object": "list", "data": data}).encode())
            case "/server_info" | "/model_info" | "/tokenizer_info" as path:
                await answer(send, json.dumps({"asked": path, "port": scope["server"][1]}).encode())
            case path:
                request = Request(scope, receive)
                self.requests.append((path, httpx.Headers(request.headers.raw), await request.body()))
                working: asyncio.Task[None] = asyncio.create_task(self.behaviour(self, send))  # type: ignore[arg-type]
                leaving = asyncio.create_task(disconnected(receive))
                await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
                if working.done():
                    await working  # an exception behind the start of an answer makes uvicorn cut it off
                else:
                    self.client_left.set()
                    working.cancel()

    def body(self, number: int = -1) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.requests[number][2])
        return decoded


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(
    send: Send, body: bytes, status: int = 200, content_type: str = "application/json", **headers: str
) -> None:
    await start(send, status, content_type, **headers)
    await send({"type": "http.response.body", "body": body})


async def start(
    send: Send, status: int = 200, content_type: str = "text/event-stream", **headers: str
) -> None:
    raw = [(b"content-type", content_type.encode())]
    raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    message: Message = {"type": "http.response.start", "status": status, "headers": raw}
    await send(message)


async def write(send: Send, chunk: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": more})


async def computes(node: FakeNode, send: Send) -> None:
    """Behaviour of a prefill node, which the router sends no requests."""
    await answer(send, b"", 404)


class CutConnection(Exception):
    """Raised by a behaviour to close the node's end of the connection."""


def at_first(first: Behaviour, then: Behaviour) -> Behaviour:
    """Make a behaviour from one for the first request and one for those after it."""

    async def behaviour(node: FakeNode, send: Send) -> None:
        await (first if len(node.requests) == 1 else then)(node, send)

    return behaviour


async def never(node: FakeNode, send: Send) -> None:
    await asyncio.Event().wait()


def says(body: bytes, status: int = 200, content_type: str = "application/json") -> Behaviour:
    async def behaviour(node: FakeNode, send: Send) -> None:
        await answer(send, body, status, content_type)

    return behaviour


EVENTS = [b'data: {"text": "\xc3\xa4"}\n\n', b": ping\n\n", b"data: [DO", b"NE]\n\n"]


async def streams(node: FakeNode, send: Send) -> None:
    await start(send)
    for event in EVENTS:
        await write(send, event)
        await asyncio.sleep(0.01)
    await write(send, b"", more=False)


async def in_two_steps(node: FakeNode, send: Send) -> None:
    await start(send)
    await write(send, b"data: 1\n\n")
    await node.release.wait()
    await write(send, b"data: 2\n\n", more=False)


async def breaks_off(node: FakeNode, send: Send) -> None:
    await start(send)
    await write(send, b"data: 1\n\n")
    raise CutConnection


OK = says(b"{}")
FIRST_BOOTSTRAP_PORT = 7000


@dataclass
class Cluster:
    prefill: list[FakeNode]
    decode: list[FakeNode]
    client: httpx.AsyncClient

    @property
    def nodes(self) -> list[FakeNode]:
        return [*self.prefill, *self.decode]

    def prefill_of(self, body: dict[str, Any]) -> FakeNode:
        """Return the prefill node that the body of a decode node's request names."""
        port = body["bootstrap_port"]
        number: int = (port[0] if isinstance(port, list) else port) - FIRST_BOOTSTRAP_PORT
        return self.prefill[number]

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text

    async def until_counted(self, line: str) -> None:
        """Wait until ``line`` is among the metrics."""

        async def is_counted() -> bool:
            return line in await self.metrics()

        await eventually(is_counted)

    async def until_health(self, status: int) -> None:
        async def is_status() -> bool:
            return (await self.client.get("/health")).status_code == status

        await eventually(is_status)


@asynccontextmanager
async def cluster(
    prefill: list[Behaviour] | Behaviour = computes,
    decode: list[Behaviour] | Behaviour = streams,
    drain: Drain | None = None,
    num_ranks: int = 1,
    prefill_says: Sequence[bytes] = (),
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Yield fake nodes behind a real router; each prefill node has ``num_ranks``. ``prefill_says``: the
    ``says`` of prefill nodes.

    In the end, no prefill node may have been sent a body.
    """
    nodes = {
        NodeKind.PREFILL: [FakeNode(b) for b in (prefill if isinstance(prefill, list) else [prefill])],
        NodeKind.DECODE: [FakeNode(b) for b in (decode if isinstance(decode, list) else [decode])],
    }
    for node in nodes[NodeKind.PREFILL]:
        node.loads = [0] * num_ranks
    for node, text in zip(nodes[NodeKind.PREFILL], prefill_says, strict=False):
        node.says = text
    all_nodes = [node for of_kind in nodes.values() for node in of_kind]
    running = [AsyncExitStack() for _ in all_nodes]
    ports = ExitStack()  # a node that is closed is missed, and no server of another test answers for it
    try:
        for node, server in zip(all_nodes, running, strict=True):
            port = ports.enter_context(servers.held_port())
            node.url = await server.enter_async_context(serving(node, port))
            node.close = server.aclose
        fixed = {
            "health_interval_secs": NEVER_SECS,
            "request_timeout_secs": NEVER_SECS,
            "resume_timeout_secs": 0.0,
        }
        router_settings = RouterSettings(
            prefill=tuple(
                (node.url, FIRST_BOOTSTRAP_PORT + i) for i, node in enumerate(nodes[NodeKind.PREFILL])
            ),
            decode=tuple(node.url for node in nodes[NodeKind.DECODE]),
            **{**fixed, **settings},
        )
        async with (
            serving(create_app(router_settings, drain)) as url,
            httpx.AsyncClient(base_url=url, timeout=WAIT_SECS, trust_env=False) as client,
        ):
            yield Cluster(nodes[NodeKind.PREFILL], nodes[NodeKind.DECODE], client)
            sent = [request for node in nodes[NodeKind.PREFILL] for request in node.requests]
            assert [path for path, _, _ in sent if path != "/status"] == []
            assert not any(body for _, _, body in sent)
    finally:
        await asyncio.gather(*(server.aclose() for server in running))
        ports.close()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_SECS):
        while not await condition():
            await asyncio.sleep(0.02)


def error_of(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "code"}
    return str(error["message"])
