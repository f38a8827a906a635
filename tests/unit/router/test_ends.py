"""The end of a relayed answer: a client that has all of it may leave, and nothing of the request stays
open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.router.attempt import Attempt
from hisparse_pd.router.body import RequestBody
from hisparse_pd.router.connect import Call, RawHeaders
from hisparse_pd.router.drain import Drain
from hisparse_pd.router.errors import RouterError
from hisparse_pd.router.metrics import RouterMetrics
from hisparse_pd.router.node_calls import NodeAnswer, NodeCalls
from hisparse_pd.router.nodes import Node, NodePool, Pair
from hisparse_pd.router.relay import Relay, RelayedRequest
from hisparse_pd.router.request_ids import RequestIds
from hisparse_pd.router.resumable_stream import ResumableStream
from hisparse_pd.router.server import RelayEndpoint
from hisparse_pd.router.stream_journal import JournalBudget, StreamJournal
from hisparse_pd.serving.api.bodies import Endpoint

pytestmark = pytest.mark.anyio

SETTINGS = RouterSettings(prefill=(("http://p:1", 1),), decode=("http://d:1",))
BODY = b'{"prompt": "x"}'
BUDGET = JournalBudget(0)


async def take_turns(num: int = 20) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def reading() -> Callable[[], Awaitable[bytes]]:
    """Return the ``read`` of an answer of two chunks."""
    chunks = [b"ab", b"cd"]

    async def read() -> bytes:
        if chunks:
            return chunks.pop(0)
        await take_turns()
        return b""

    return read


class SlowToClose:
    """A relay whose requests take a while to end."""

    def __init__(self, headers: RawHeaders) -> None:
        self._headers = headers
        self.is_closed = False

    async def open(self, *request: Any, span: None) -> NodeAnswer:
        stack: AsyncExitStack = request[-1]
        stack.push_async_callback(self._close)
        return NodeAnswer(200, self._headers, reading())

    async def _close(self) -> None:
        await take_turns()
        self.is_closed = True


@pytest.mark.parametrize("headers", [[(b"content-length", b"4")], []], ids=["length", "chunked"])
async def test_who_leaves_with_the_last_byte_has_had_the_answer(headers: RawHeaders) -> None:
    metrics, relay = RouterMetrics(NodePool([], [], SETTINGS.policy), BUDGET), SlowToClose(headers)
    router = SimpleNamespace(settings=SETTINGS, drain=Drain(), metrics=metrics, relay=relay, tracer=None)
    has_all = asyncio.Event()
    requests = [{"type": "http.request", "body": BODY, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await has_all.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        num_bytes = sum(len(part.get("body", b"")) for part in sent)
        if message["type"] == "http.response.body" and (
            num_bytes == 4 if headers else not message["more_body"]
        ):
            has_all.set()

    endpoint = RelayEndpoint(router, Endpoint.COMPLETIONS)  # type: ignore[arg-type]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"15")]}
    await RequestIds(endpoint)(scope, receive, send)
    assert not sent[-1]["more_body"]
    assert relay.is_closed
    assert b'requests_total{endpoint="/v1/completions",status="200"} 1.0' in metrics.render()


@pytest.mark.I8
@pytest.mark.parametrize("num_turns", range(1, 4))
async def test_a_search_ends_whenever_its_request_is_cancelled(num_turns: int) -> None:
    """Nothing stays open at its pair, either."""
    pool = NodePool.from_settings(SETTINGS)
    relay = Relay(pool, NodeCalls(1.0), never, RouterMetrics(pool, BUDGET), BUDGET, SETTINGS)
    relayed = RelayedRequest(
        relay, Endpoint.COMPLETIONS, RequestBody.parse(BODY, Endpoint.COMPLETIONS), [], None
    )
    prefill, node = pool.nodes
    attempt = Attempt(Pair(prefill, node, room=1), Call(node.url, 1.0), pool, lambda: False)
    stream = ResumableStream(attempt, StreamJournal(0, BUDGET), pool, takes_turns_to_end, b"")
    attempt.answer = NodeAnswer(200, [], ends_early)
    relayed.attempt, relayed.stream = attempt, stream
    reading_on = asyncio.create_task(stream.read())
    await take_turns(2)
    assert node.num_in_flight == 1
    reading_on.cancel()
    await take_turns(1)
    closing = asyncio.create_task(relayed.close())
    await take_turns(num_turns)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert node.num_in_flight == 0


async def ends_early() -> bytes:
    return b""


async def takes_turns_to_end(attempt: Attempt, error: RouterError) -> Attempt:
    try:
        await asyncio.Event().wait()
    finally:
        await take_turns()
    return attempt


async def never(node: Node) -> None:
    raise AssertionError("no check is due")
