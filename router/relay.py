"""One request on its pair: two legs, one answer. One leg, where the prefill node can answer alone.

Both nodes get the same body at once. The decode node's answer goes to the client. The prefill node's answer
matters only while the client has nothing: an error of it ends the room, because the decode node would wait
for it in vain. Once the first byte is out, the decode node speaks for the room.

A request whose client has nothing yet goes to another pair when a node cannot be reached, when its prefill
node failed with it, or when one is not ready or has a full queue: a prompt that is computed twice does no
harm. When its decode node is lost, or leaves, it goes to another pair whatever the client has: a stream goes
on behind what its journal says was shown, any other answer begins anew.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from hisparse_pd.base.settings import RouterSettings
from hisparse_pd.base.vocabulary import DECODE_NODE_FAILED, ENGINE_LOST, MOVED, PREFILL_NODE_FAILED
from hisparse_pd.router.body import RequestBody
from hisparse_pd.router.connect import Call, RawHeaders
from hisparse_pd.router.errors import (
    LocalFault,
    NodeFailed,
    NodeRefused,
    NodeUnreachable,
    RouterError,
    StreamEnded,
)
from hisparse_pd.router.journal import Journal, JournalBudget, Losses
from hisparse_pd.router.metrics import RouterMetrics
from hisparse_pd.router.node_calls import Answer, NodeCalls, headers_to_node
from hisparse_pd.router.nodes import LEAVING, Node, NodeKind, NodePool, Pair
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.frame import PING_SECS, PINGS
from hisparse_pd.serving.http.http_errors import ErrorShape

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import RequestSpan

log = logging.getLogger(__name__)

DECODE_SAYS_WHY_SECS = 1.0
"""For a decode node's own answer, once the prefill node has said that it gave the room up."""

DECODE_SILENCE_SECS = 3 * PING_SECS
"""After which a decode node hangs: at work it says something in each PING_SECS."""

_SEARCH_PING_SECS = 5.0
"""In which a client hears something while its stream looks for another pair, and waits there: its node may
have been silent for long before it was given up, and proxies cut what says nothing for a minute."""

_FIRST_PAUSES_SECS = (0.0, 0.1, 0.2, 0.4)
_LAST_PAUSE_SECS = 0.8
"""Between two looks for a pair that goes on with a request."""
_PASSED_HEADERS = (b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", b"x-request-timing")
_SERVER_ERROR, _BAD_GATEWAY, _UNAVAILABLE = 500, 502, 503
_QUEUE_FULL = 429
_PREFILL_FAILED = frozenset((_BAD_GATEWAY, _UNAVAILABLE, _QUEUE_FULL))
"""Status of a prefill leg that another prefill node may do better: died, cut off, shutting down, full."""


class Relay:
    """Sends requests to pairs, up to ``settings.max_retries`` times again.

    ``check`` asks a node for its health and tells the pool. A client's key is for the nodes where the router
    has no keys of its own. A request whose decode node was lost looks for another pair for
    ``settings.resume_timeout_secs``.
    """

    def __init__(
        self,
        pool: NodePool,
        calls: NodeCalls,
        check: Callable[[Node], Awaitable[None]],
        metrics: RouterMetrics,
        journals: JournalBudget,
        settings: RouterSettings,
    ) -> None:
        self.pool = pool
        self.calls = calls
        self.check = check
        self.metrics = metrics
        self.journals = journals
        self.max_retries = settings.max_retries
        self.resume_timeout_secs = settings.resume_timeout_secs
        self._passed_headers = (
            *_PASSED_HEADERS,
            *((b"authorization", b"x-api-key") if settings.api_key_file is None else ()),
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
        passage = _Passage(self, endpoint, body, headers, span)
        stack.push_async_callback(passage.close)
        return await passage.open()

    async def ask_one(
        self, path: str, content: bytes, client_headers: RawHeaders, stack: AsyncExitStack
    ) -> Answer:
        """The answer of one healthy node, of either kind, for what needs no pair; ``stack`` keeps it open.

        Another node is asked where one cannot be reached or does not serve. Raises RouterError.
        """
        headers = headers_to_node(client_headers, self._passed_headers)
        nodes = sorted((node for node in self.pool.nodes if node.healthy), key=lambda n: n.num_in_flight)
        if not nodes:
            states = "; ".join(f"{node.url}: {node.trouble}" for node in self.pool.nodes)
            raise RouterError(503, f"no healthy node ({states}); try again later")
        for node, num_left in zip(nodes, range(min(len(nodes) - 1, self.max_retries), -1, -1), strict=False):
            try:
                call = self.calls.call(node, stack)
                await self.calls.send(node, call, path, content, headers)
                return await self.calls.answer(node, call, {node.kind.header: node.url})
            except RouterError as error:
                if isinstance(error, NodeUnreachable):
                    self.pool.mark_unhealthy(node, str(error))
                elif error.status != _UNAVAILABLE:
                    raise
                if num_left == 0:
                    raise
                log.warning("%s: %s; asking another node", path, error)
        raise RuntimeError("there is a last node")


class _Passage:
    """One request on its way: the pairs that have it, one after the other, and what was shown of its answer.

    ``close`` ends what is open and may be called twice.
    """

    def __init__(
        self,
        relay: Relay,
        endpoint: Endpoint,
        body: RequestBody,
        headers: RawHeaders,
        span: RequestSpan | None,
    ) -> None:
        self._relay = relay
        self._pool = relay.pool
        self._endpoint = endpoint
        self._body = body
        self._headers = headers
        self._span = span
        self._kinds = (NodeKind.PREFILL,) if body.is_prefill_only else tuple(NodeKind)
        self._excluded: set[Node] = set()
        self._exchange: _Exchange | None = None
        self._num_retries = 0
        self._losses = Losses()
        self._num_resumes = 0
        self._resume: _Resume | None = None
        """Of the pair that is looked for."""
        self._read_node: Callable[[], Awaitable[bytes]]
        """Of the answer that the client gets now, with the journal's lines."""
        self._going_on: asyncio.Task[None] | None = None
        """While no node has the stream that the client reads."""
        self._journal: Journal | None = None
        if not body.is_prefill_only and relay.journals.max_bytes:
            # Of an answer that is not streamed there will be no records: it begins anew.
            self._journal = Journal(body.num_bytes if body.is_streamed else 0, relay.journals)

    async def open(self) -> Answer:
        """The answer once its first bytes are here. Raises RouterError."""
        answer = await self._answer()
        if self._journal is None or not answer.is_journaled:
            return answer
        self._read_node = answer.read
        return answer.without_journal(partial(self._read, self._journal))

    async def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._going_on is not None:
            self._going_on.cancel()
            await asyncio.gather(self._going_on, return_exceptions=True)
        await self._close_exchange()

    async def _close_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.close()

    async def _read(self, journal: Journal) -> bytes:
        """What the client gets next, from one node after the other. Raises RouterError."""
        while True:
            if self._going_on is not None:
                done, _ = await asyncio.wait((self._going_on,), timeout=_SEARCH_PING_SECS)
                if not done:
                    return PINGS[ErrorShape.of_path(self._endpoint)]
                task, self._going_on = self._going_on, None
                await task
            error = None
            try:
                chunk = await self._read_node()
            except NodeFailed as failed:
                chunk, error = b"", failed
            if chunk:
                was_leaving = journal.leg.is_leaving
                shown = journal.leg.feed(chunk)
                begins_to_leave = journal.leg.is_leaving and not was_leaving
                if begins_to_leave and self._exchange is not None and self._exchange.pair.decode:
                    # Moves what may move. Once: the node may be back before all that it said is read.
                    self._pool.mark_unhealthy(self._exchange.pair.decode, LEAVING)
                if shown:
                    return shown
            elif journal.is_over:
                return b""
            else:
                self._going_on = asyncio.create_task(self._go_on(journal, error))

    async def _go_on(self, journal: Journal, error: NodeFailed | None) -> None:
        """At another node: the one that had the stream is lost, or leaves. Raises RouterError."""
        leg = journal.leg
        if error is None:
            error = StreamEnded(leg.unshown)
        assert self._exchange is not None
        pair, is_moved = self._exchange.pair, leg.is_leaving or self._exchange.is_moved
        error.node_headers = pair.headers
        await self._close_exchange()
        self._note_lost(error, pair, is_moved=is_moved)
        journal.next_leg()
        answer = await self._answer()
        if not answer.is_journaled:
            raise NodeFailed(502, "the next decode node keeps no journal of the stream; upgrade it")
        self._read_node = answer.read

    async def _answer(self) -> Answer:
        """Of the first pair that gives one. Raises RouterError."""
        while True:
            try:
                pair = await self._pick()
            except RouterError as error:
                if self._resume is None or self._resume.is_late:
                    raise
                log.info("%s: %s", self._endpoint, error)
            else:
                try:
                    answer = await self._ask(pair)
                except RouterError as error:
                    assert self._exchange is not None
                    exchange = self._exchange
                    await self._close_exchange()
                    self._note_failure(error, exchange)
                else:
                    if self._resume is not None:
                        self._note_resumed(self._resume, pair)
                    return answer
            if self._resume is not None:
                await self._resume.pause()

    async def _pick(self) -> Pair:
        excluded = self._excluded
        if self._resume is not None and not self._pool.has(self._kinds, excluded):
            # They may be back. What the last round of checks found is older than the loss.
            await asyncio.gather(*map(self._relay.check, excluded))
            excluded = set()
        return self._pool.pick(excluded, self._body.prompt, self._kinds)

    async def _ask(self, pair: Pair) -> Answer:
        num_resumes = self._num_resumes + (self._resume is not None)
        if self._span is not None:
            retries = {"hisparse_pd.room": pair.room, "hisparse_pd.retries": self._num_retries}
            self._span.set({**retries, "hisparse_pd.resumes": num_resumes, **_names(pair)})
        fields: Mapping[str, object] = {}
        if self._journal is not None and pair.decode is not None:
            # A stream is taken away from a node that leaves (_Exchange._move): only then is it known whether
            # there was room for all of its journal. Without, it stays.
            may_move = not self._body.is_streamed and self._pool.has((NodeKind.DECODE,), (pair.decode,))
            fields = self._journal.fields(may_move=may_move, num_resumes=num_resumes)
        content = self._body.with_bootstrap(pair.prefill.host, pair.prefill.bootstrap_port, pair.room, fields)
        self._exchange = _Exchange(self._relay.calls, self._pool, pair, self._may_move)
        return await self._exchange.start(self._endpoint, content, self._headers)

    def _may_move(self) -> bool:
        """Whether it goes on elsewhere if its decode node ends now."""
        journal = self._journal
        return self._relay.resume_timeout_secs > 0 and journal is not None and journal.is_kept

    def _note_failure(self, error: RouterError, exchange: _Exchange) -> None:
        """Of a pair that gave no answer. Raises ``error`` if no other one may do better."""
        pair = exchange.pair
        error.node_headers = pair.headers
        for node, trouble in exchange.unreachable.items():
            self._pool.mark_unhealthy(node, trouble)
            self._excluded.add(node)
        if error in exchange.lost and self._relay.resume_timeout_secs:
            is_moved = exchange.is_moved or getattr(error, "node_code", None) == MOVED
            self._note_lost(error, pair, is_moved=is_moved)
            return
        if (blamed := exchange.blamed.get(error)) is not None:
            # For this request; its health check judges the node. A write that failed may have been
            # the connection alone: where there is no other node, the same one tries again.
            others = self._excluded | {blamed}
            if error.status != _BAD_GATEWAY or self._pool.has(self._kinds, others):
                self._excluded = others
        elif not isinstance(error, NodeUnreachable):
            raise error
        if self._resume is not None:
            if self._resume.is_late:
                raise error
        elif self._num_retries == self._relay.max_retries or not self._pool.has(self._kinds, self._excluded):
            raise error
        self._num_retries += 1
        log.warning("%s: %s; trying another pair", self._endpoint, error)
        self._relay.metrics.count_retry(blamed)
        if self._span is not None:
            self._span.event("retry", {"exception.message": str(error), **_names(pair)})

    def _note_lost(self, error: RouterError, pair: Pair, *, is_moved: bool) -> None:
        """The decode node of the pair is. Raises RouterError if the request does not go on."""
        assert pair.decode is not None
        journal = self._journal
        if journal is not None and journal.num_records and not journal.is_kept:
            raise error
        if is_moved:
            self._pool.mark_unhealthy(pair.decode, LEAVING)
        else:
            num_records = 0 if journal is None else journal.num_records
            if why := self._losses.add(pair.decode.url, num_records):
                raise RouterError(502, f"{why}; it is not sent to another one: {error}") from error
        if not self._relay.resume_timeout_secs:
            raise error
        self._excluded = {pair.decode}
        if self._resume is None:
            self._resume = _Resume("moved" if is_moved else "lost", self._relay.resume_timeout_secs, error)

    def _note_resumed(self, resume: _Resume, pair: Pair) -> None:
        self._resume = None
        self._excluded = set()
        self._num_resumes += 1
        secs = asyncio.get_running_loop().time() - resume.began_at
        self._relay.metrics.count_resume(resume.reason, secs)
        num_records = self._journal.num_records if self._journal is not None else 0
        log.warning(
            "%s: %s; it went on at %s behind %d records after %.3f s",
            self._endpoint,
            resume.error,
            pair.urls[NodeKind.DECODE],
            num_records,
            secs,
        )
        if self._span is not None:
            self._span.event("resume", {"exception.message": str(resume.error), **_names(pair)})


class _Resume:
    """The search for another pair, since a decode node was lost."""

    def __init__(self, reason: str, timeout_secs: float, error: RouterError) -> None:
        self.reason = reason
        self.error = error
        self.began_at = asyncio.get_running_loop().time()
        self._ends_at = self.began_at + timeout_secs
        self._pauses = itertools.chain(_FIRST_PAUSES_SECS, itertools.repeat(_LAST_PAUSE_SECS))

    @property
    def is_late(self) -> bool:
        return asyncio.get_running_loop().time() >= self._ends_at

    async def pause(self) -> None:
        await asyncio.sleep(next(self._pauses))


class _Exchange:
    """The two legs of one room, or the only one. ``close`` ends them, whatever their state, and may be called
    twice."""

    def __init__(
        self, calls: NodeCalls, pool: NodePool, pair: Pair, may_move: Callable[[], bool] = lambda: False
    ) -> None:
        self._calls = calls
        self._pool = pool
        self.pair = pair
        self._may_move = may_move
        self._movable: Call | None = None
        """The decode leg, unless the client has something that no other node can go on with."""
        self.is_moved = False
        """It was ended because its decode node leaves."""
        self._prefill: asyncio.Task[None] | None = None
        self._decode: asyncio.Task[Answer] | None = None
        self._stack = AsyncExitStack()
        self.unreachable: dict[Node, str] = {}
        self.blamed: dict[RouterError, Node] = {}
        """Errors that say that a node failed with this request, and another one may not."""
        self.lost: set[RouterError] = set()
        """Errors that say that the decode node is lost, or leaves."""

    async def start(self, endpoint: Endpoint, content: bytes, headers: RawHeaders) -> Answer:
        """The answer for the client, as soon as its first bytes are here. Raises RouterError."""
        if self.pair.decode is None:
            async with self._blaming_prefill():
                return await self._open(self.pair.prefill, endpoint, content, headers)
        self._prefill = asyncio.create_task(self._deliver(endpoint, content, headers))
        self._decode = asyncio.create_task(self._open_decode(self.pair.decode, endpoint, content, headers))
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
            if isinstance(error, NodeRefused) and error.node_code == DECODE_NODE_FAILED and self.pair.decode:
                await self._wait_for_decode()
                self.blamed[error] = self.pair.decode
            elif error.status in _PREFILL_FAILED:
                self.blamed[error] = self.pair.prefill
            raise

    async def _wait_for_decode(self) -> None:
        """A decode node that gave the room up tells both sides, and says best itself why."""
        if self._decode is not None:
            await asyncio.wait((self._decode,), timeout=DECODE_SAYS_WHY_SECS)

    async def _deliver(self, endpoint: Endpoint, content: bytes, headers: RawHeaders) -> None:
        """Send the prefill leg and read its answer to the end. Raises RouterError unless it is a success."""
        node = self.pair.prefill
        async with self._blaming_prefill(), AsyncExitStack() as stack:
            stack.enter_context(self._pool.working(node, self.pair.room))
            call = self._calls.call(node, stack)
            await self._send(node, call, endpoint, content, headers)
            if not call.is_success:
                raise await self._calls.refusal(node, call)
            while await self._calls.read(node, call):
                pass  # the room is delivered when the body ends

    async def _open_decode(
        self, node: Node, endpoint: Endpoint, content: bytes, headers: RawHeaders
    ) -> Answer:
        try:
            return await self._open(node, endpoint, content, headers)
        except NodeRefused as refusal:
            if _is_about_prefill(refusal):
                self.blamed[refusal] = self.pair.prefill
            elif refusal.node_code in (MOVED, ENGINE_LOST) or refusal.status == _SERVER_ERROR:
                self.lost.add(refusal)
            elif refusal.status in (_UNAVAILABLE, _QUEUE_FULL):
                self.blamed[refusal] = node  # not ready yet, or no longer, or full
            raise
        except NodeFailed as failed:
            self.lost.add(failed)
            raise

    async def _open(self, node: Node, endpoint: Endpoint, content: bytes, headers: RawHeaders) -> Answer:
        """Send the leg that has the answer and wait for its first bytes; ``_stack`` keeps it open."""
        self._stack.enter_context(self._pool.working(node, self.pair.room, self._move))
        silence_secs = DECODE_SILENCE_SECS if node is self.pair.decode else math.inf
        self._movable = call = self._calls.call(node, self._stack, silence_secs)
        await self._send(node, call, endpoint, content, headers)
        answer = await self._calls.answer(node, call, self.pair.headers)
        if not answer.is_journaled:
            self._movable = None
        return answer

    def _move(self) -> None:
        if self._movable is not None and self._may_move():
            self.is_moved = True
            self._movable.close()

    async def _send(
        self, node: Node, call: Call, endpoint: Endpoint, content: bytes, headers: RawHeaders
    ) -> None:
        try:
            await self._calls.send(node, call, endpoint, content, headers)
        except NodeUnreachable as error:
            self.unreachable[node] = str(error)
            raise


def _names(pair: Pair) -> dict[str, str]:
    """The attributes of a trace that name the nodes."""
    return {f"hisparse_pd.{kind}_node": url for kind, url in pair.urls.items()}


def _is_about_prefill(refusal: NodeRefused) -> bool:
    """Of a decode node's refusal; its 502 is about the transfer to it."""
    return refusal.node_code == PREFILL_NODE_FAILED or refusal.status == _BAD_GATEWAY
