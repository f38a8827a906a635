"""One request on its pair: two legs, one answer. One leg, where the prefill node can answer alone.

Both nodes get the same body at once. The decode node's answer goes to the client. The prefill node's answer
matters only while the client has nothing: an error of it ends the room, because the decode node would wait
for it in vain. Once the first byte is out, the decode node speaks for the room.

A request whose client has nothing yet goes to another pair when a node cannot be reached, when its prefill
node failed with it, or when one is not ready or has a full queue: a prompt that is computed twice does no
harm.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from hisparse_pd.vocabulary import DECODE_NODE_FAILED, PREFILL_NODE_FAILED
from router.body import Endpoint, RequestBody
from router.connect import Call, RawHeaders
from router.errors import LocalFault, NodeRefused, NodeUnreachable, RouterError
from router.node_calls import Answer, NodeCalls, headers_to_node
from router.nodes import Node, NodeKind, NodePool, Pair

if TYPE_CHECKING:
    from hisparse_pd.tracing import RequestSpan

log = logging.getLogger(__name__)

DECODE_SAYS_WHY_SECS = 1.0
"""For a decode node's own answer, once the prefill node has said that it gave the room up."""

_PASSED_HEADERS = (b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", b"x-request-timing")
_BAD_GATEWAY, _UNAVAILABLE = 502, 503
_QUEUE_FULL = 429
_PREFILL_FAILED = frozenset((_BAD_GATEWAY, _UNAVAILABLE, _QUEUE_FULL))
"""Status of a prefill leg that another prefill node may do better: died, cut off, shutting down, full."""


class Relay:
    """Sends requests to pairs, up to ``max_retries`` times again.

    ``on_retry`` is told each time which node failed with the request; None: one could not be reached.
    ``passes_authorization``: the client's key is for the nodes, not for the router.
    """

    def __init__(
        self,
        pool: NodePool,
        calls: NodeCalls,
        on_retry: Callable[[Node | None], None] = lambda blamed: None,
        *,
        max_retries: int = 1,
        passes_authorization: bool = True,
    ) -> None:
        self._pool = pool
        self._calls = calls
        self._on_retry = on_retry
        self._max_retries = max_retries
        self._passed_headers = (
            *_PASSED_HEADERS,
            *((b"authorization", b"x-api-key") if passes_authorization else ()),
        )

    async def open(
        self,
        endpoint: Endpoint,
        body: RequestBody,
        client_headers: RawHeaders,
        stack: AsyncExitStack,
        span: RequestSpan | None = None,
    ) -> Answer:
        """Choose a pair, or a prefill node alone, and wait for the first bytes of the answer.

        What is open then belongs to ``stack``: closing it closes both legs. A node that cannot be reached is
        marked unhealthy. Its request goes to another pair under a new room, as does one that its prefill node
        failed with or its decode node is not ready for. Raises RouterError.
        """
        headers = headers_to_node(client_headers, self._passed_headers)
        excluded: set[Node] = set()
        kinds = (NodeKind.PREFILL,) if body.is_prefill_only else tuple(NodeKind)
        for num_retries in itertools.count():
            pair = self._pool.pick(excluded, body.prompt, kinds)
            exchange = _Exchange(self._calls, self._pool, pair)
            if span is not None:
                span.set({"hisparse_pd.room": pair.room, "hisparse_pd.retries": num_retries, **_names(pair)})
            content = body.with_bootstrap(pair.prefill.host, pair.prefill.bootstrap_port, pair.room)
            try:
                answer = await exchange.start(endpoint, content, headers)
            except RouterError as error:
                await exchange.close()
                error.node_headers = pair.headers
                for node, trouble in exchange.unreachable.items():
                    self._pool.mark_unhealthy(node, trouble)
                    excluded.add(node)
                if (blamed := exchange.blamed.get(error)) is not None:
                    # For this request; its health check judges the node. A write that failed may have been
                    # the connection alone: where there is no other node, the same one tries again.
                    others = excluded | {blamed}
                    if error.status != _BAD_GATEWAY or self._pool.has(kinds, others):
                        excluded = others
                elif not isinstance(error, NodeUnreachable):
                    raise
                if num_retries == self._max_retries or not self._pool.has(kinds, excluded):
                    raise
                log.warning("%s: %s; trying another pair", endpoint, error)
                self._on_retry(blamed)
                if span is not None:
                    span.event("retry", {"exception.message": str(error), **_names(pair)})
            except BaseException:
                await exchange.close()
                raise
            else:
                stack.push_async_callback(exchange.close)
                return answer
        raise RuntimeError("itertools.count ended")

    async def ask_one(
        self, path: str, content: bytes, client_headers: RawHeaders, stack: AsyncExitStack
    ) -> Answer:
        """The answer of one healthy node, of either kind, for what needs no pair; ``stack`` keeps it open.

        Another node is asked where one cannot be reached or does not serve. Raises RouterError.
        """
        headers = headers_to_node(client_headers, self._passed_headers)
        nodes = sorted((node for node in self._pool.nodes if node.healthy), key=lambda n: n.num_in_flight)
        if not nodes:
            states = "; ".join(f"{node.url}: {node.trouble}" for node in self._pool.nodes)
            raise RouterError(503, f"no healthy node ({states}); try again later")
        for node, num_left in zip(nodes, range(min(len(nodes) - 1, self._max_retries), -1, -1), strict=False):
            try:
                call = await self._calls.send(node, path, content, headers, stack)
                return await self._calls.answer(node, call, {node.kind.header: node.url})
            except RouterError as error:
                if isinstance(error, NodeUnreachable):
                    self._pool.mark_unhealthy(node, str(error))
                elif error.status != _UNAVAILABLE:
                    raise
                if num_left == 0:
                    raise
                log.warning("%s: %s; asking another node", path, error)
        raise RuntimeError("there is a last node")


class _Exchange:
    """The two legs of one room, or the only one. ``close`` ends them, whatever their state, and may be called
    twice."""

    def __init__(self, calls: NodeCalls, pool: NodePool, pair: Pair) -> None:
        self._calls = calls
        self._pool = pool
        self._pair = pair
        self._prefill: asyncio.Task[None] | None = None
        self._decode: asyncio.Task[Answer] | None = None
        self._stack = AsyncExitStack()
        self.unreachable: dict[Node, str] = {}
        self.blamed: dict[RouterError, Node] = {}
        """Errors that say that a node failed with this request, and another one may not."""

    async def start(self, endpoint: Endpoint, content: bytes, headers: RawHeaders) -> Answer:
        """The answer for the client, as soon as its first bytes are here. Raises RouterError."""
        if self._pair.decode is None:
            async with self._blaming_prefill():
                return await self._open(self._pair.prefill, endpoint, content, headers)
        self._prefill = asyncio.create_task(self._deliver(endpoint, content, headers))
        self._decode = asyncio.create_task(self._open_decode(self._pair.decode, endpoint, content, headers))
        await asyncio.wait((self._prefill, self._decode), return_when=asyncio.FIRST_COMPLETED)
        if not self._decode.done():
            await self._prefill  # raises what ended it; a delivered room goes on
            await asyncio.wait((self._decode,))
        return await self._decode

    async def close(self) -> None:
        tasks = [task for task in (self._prefill, self._decode) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # whoever is cancelled here, as when the client leaves now
            await self._stack.aclose()

    @asynccontextmanager
    async def _blaming_prefill(self) -> AsyncIterator[None]:
        """Round what is asked of the prefill node, which another one may do better."""
        try:
            yield
        except (NodeUnreachable, LocalFault):
            raise
        except RouterError as error:
            if isinstance(error, NodeRefused) and error.node_code == DECODE_NODE_FAILED and self._pair.decode:
                await self._wait_for_decode()
                self.blamed[error] = self._pair.decode
            elif error.status in _PREFILL_FAILED:
                self.blamed[error] = self._pair.prefill
            raise

    async def _wait_for_decode(self) -> None:
        """A decode node that gave the room up tells both sides, and says best itself why."""
        if self._decode is not None:
            await asyncio.wait((self._decode,), timeout=DECODE_SAYS_WHY_SECS)

    async def _deliver(self, endpoint: Endpoint, content: bytes, headers: RawHeaders) -> None:
        """Send the prefill leg and read its answer to the end. Raises RouterError unless it is a success."""
        node = self._pair.prefill
        async with self._blaming_prefill(), AsyncExitStack() as stack:
            stack.enter_context(self._pool.working(node, self._pair.room))
            call = await self._send(node, endpoint, content, headers, stack)
            if not call.is_success:
                raise await self._calls.refusal(node, call)
            async for _ in self._calls.raw_chunks(node, call):
                pass  # the room is delivered when the body ends

    async def _open_decode(
        self, node: Node, endpoint: Endpoint, content: bytes, headers: RawHeaders
    ) -> Answer:
        try:
            return await self._open(node, endpoint, content, headers)
        except NodeRefused as refusal:
            if _is_about_prefill(refusal):
                self.blamed[refusal] = self._pair.prefill
            elif refusal.status in (_UNAVAILABLE, _QUEUE_FULL):
                self.blamed[refusal] = node  # not ready yet, or no longer, or full
            raise

    async def _open(self, node: Node, endpoint: Endpoint, content: bytes, headers: RawHeaders) -> Answer:
        """Send the leg that has the answer and wait for its first bytes; ``_stack`` keeps it open."""
        self._stack.enter_context(self._pool.working(node, self._pair.room))
        call = await self._send(node, endpoint, content, headers, self._stack)
        return await self._calls.answer(node, call, self._pair.headers)

    async def _send(
        self, node: Node, endpoint: Endpoint, content: bytes, headers: RawHeaders, stack: AsyncExitStack
    ) -> Call:
        try:
            return await self._calls.send(node, endpoint, content, headers, stack)
        except NodeUnreachable as error:
            self.unreachable[node] = str(error)
            raise


def _names(pair: Pair) -> dict[str, str]:
    """The attributes of a trace that name the nodes."""
    return {f"hisparse_pd.{kind}_node": url for kind, url in pair.urls.items()}


def _is_about_prefill(refusal: NodeRefused) -> bool:
    """Of a decode node's refusal; its 502 is about the transfer to it."""
    return refusal.node_code == PREFILL_NODE_FAILED or refusal.status == _BAD_GATEWAY
