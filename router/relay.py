"""Requests on their way: each goes to the decode node of a pair, whose answer goes to the client.

The body names the pair's prefill node, and the decode node has it compute what it lacks of the prompt's KV.
The router sends a prefill node nothing, and learns from the decode node's error that it failed.

A request whose client has nothing yet goes to another pair when its decode node cannot be reached, is not
ready or has a full queue, or when its prefill node failed with it: a prompt that is computed twice does no
harm. When its decode node is lost, or leaves, it goes to another pair whatever the client has: a stream goes
on behind what its journal says was shown, any other answer begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from hisparse_pd.base.settings import RouterSettings
from hisparse_pd.base.vocabulary import ENGINE_LOST, MOVED, PREFILL_NODE_FAILED
from hisparse_pd.router.body import RequestBody
from hisparse_pd.router.connect import Call, RawHeaders
from hisparse_pd.router.errors import NodeFailed, NodeRefused, NodeUnreachable, RouterError, StreamEnded
from hisparse_pd.router.metrics import RouterMetrics
from hisparse_pd.router.node_calls import NodeAnswer, NodeCalls, headers_to_node
from hisparse_pd.router.nodes import LEAVING, Node, NodeKind, NodePool, Pair
from hisparse_pd.router.resume import Losses, Search
from hisparse_pd.router.stream_journal import JournalBudget, StreamJournal
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.frame import PING_SECS, PINGS
from hisparse_pd.serving.http.http_errors import ErrorShape

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import RequestSpan

log = logging.getLogger(__name__)

DECODE_SILENCE_SECS = 3 * PING_SECS
"""A decode node that is silent for so long hangs: at work it says something in each PING_SECS."""

_SEARCH_PING_SECS = 5.0
"""A client hears something so often while its stream looks for another pair, and waits there: its node may
have been silent for long before it was given up, and proxies cut what says nothing for a minute."""

_PASSED_HEADERS = (b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", b"x-request-timing")
_SERVER_ERROR, _BAD_GATEWAY, _UNAVAILABLE = 500, 502, 503
_QUEUE_FULL = 429


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
    ) -> NodeAnswer:
        """Choose a pair, and wait for the first bytes of its decode node's answer.

        What is open then belongs to ``stack``: closing it closes the connection. A decode node that cannot be
        reached is marked unhealthy. Its request goes to another pair under a new room, as does one that its
        prefill node failed with or its decode node is not ready for. Raises RouterError.
        """
        headers = headers_to_node(client_headers, self._passed_headers)
        relayed = RelayedRequest(self, endpoint, body, headers, span)
        stack.push_async_callback(relayed.close)
        return await relayed.open()

    async def ask_one(
        self, path: str, content: bytes, client_headers: RawHeaders, stack: AsyncExitStack
    ) -> NodeAnswer:
        """The answer of one healthy decode node, for what needs no pair; ``stack`` keeps it open.

        Another node is asked where one cannot be reached or does not serve. Raises RouterError.
        """
        headers = headers_to_node(client_headers, self._passed_headers)
        nodes = sorted(self.pool.healthy(NodeKind.DECODE), key=lambda node: node.num_in_flight)
        if not nodes:
            raise self.pool.no_healthy(NodeKind.DECODE)
        for node, num_left in zip(nodes, range(min(len(nodes) - 1, self.max_retries), -1, -1), strict=False):
            try:
                call = stack.enter_context(closing(self.calls.call(node)))
                return await self.calls.post(node, call, path, content, headers, {node.kind.header: node.url})
            except RouterError as error:
                if isinstance(error, NodeUnreachable):
                    self.pool.mark_unhealthy(node, str(error))
                elif error.status != _UNAVAILABLE:
                    raise
                if num_left == 0:
                    raise
                log.warning("%s: %s; asking another node", path, error)
        raise RuntimeError("there is a last node")


class RelayedRequest:
    """One request on its way over successive pairs, and what was shown of its answer.

    It has one call open at a time, to the decode node of the pair that has it. ``close`` ends that call, or
    the search for another pair, and may be called twice.
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
        self._pair: Pair
        """The pair that has the request, or had it last."""
        self._open_at_pair = ExitStack()
        """The call to its decode node, and the request's part in that node's load."""
        self._movable: Call | None = None
        """That call, unless the client has something that no other node can go on with."""
        self._is_moved = False
        """The call was ended because the decode node leaves."""
        self._excluded: set[Node] = set()
        self._num_retries = 0
        self._losses = Losses()
        self._num_resumes = 0
        self._search: Search | None = None
        """The search that goes on for another pair."""
        self._read_node: Callable[[], Awaitable[bytes]]
        """Reads the answer that the client gets now, with the journal's lines."""
        self._going_on: asyncio.Task[None] | None = None
        """While no node has the stream that the client reads."""
        self._journal: StreamJournal | None = None
        if relay.journals.max_bytes:
            # Of an answer that is not streamed there will be no records: it begins anew.
            self._journal = StreamJournal(body.num_bytes if body.is_streamed else 0, relay.journals)

    async def open(self) -> NodeAnswer:
        """The answer once its first bytes are here. Raises RouterError."""
        answer = await self._answer()
        if self._journal is None or not answer.is_journaled:
            return answer
        self._read_node = answer.read
        return answer.without_journal(partial(self._read, self._journal))

    async def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        try:
            if self._going_on is not None:
                self._going_on.cancel()
                await asyncio.gather(self._going_on, return_exceptions=True)
        finally:  # also when this is cancelled, as when the client leaves now
            self._open_at_pair.close()

    async def _read(self, journal: StreamJournal) -> bytes:
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
                was_leaving = journal.is_leaving
                shown = journal.feed(chunk)
                if journal.is_leaving and not was_leaving:
                    # Moves what may move. Once: the node may be back before all that it said is read.
                    self._pool.mark_unhealthy(self._pair.decode, LEAVING)
                if shown:
                    return shown
            elif journal.is_over:
                return b""
            else:
                self._going_on = asyncio.create_task(self._go_on(journal, error))

    async def _go_on(self, journal: StreamJournal, error: NodeFailed | None) -> None:
        """Go on at another node: the one that had the stream is lost, or leaves. Raises RouterError."""
        if error is None:
            error = StreamEnded(journal.unshown)
        error.node_headers = self._pair.headers
        self._open_at_pair.close()
        self._note_lost(error, is_moved=journal.is_leaving or self._is_moved)
        journal.next_node()
        answer = await self._answer()
        if not answer.is_journaled:
            raise NodeFailed(502, "the next decode node keeps no journal of the stream; upgrade it")
        self._read_node = answer.read

    async def _answer(self) -> NodeAnswer:
        """The answer of the first pair that gives one. Raises RouterError."""
        while True:
            try:
                pair = await self._pick()
            except RouterError as error:
                if self._search is None or self._search.is_late:
                    raise
                log.info("%s: %s", self._endpoint, error)
            else:
                try:
                    answer = await self._ask(pair)
                except RouterError as error:
                    self._open_at_pair.close()
                    self._note_failure(error)
                else:
                    if self._search is not None:
                        self._note_resumed(self._search)
                    return answer
            if self._search is not None:
                await self._search.pause()

    async def _pick(self) -> Pair:
        excluded = self._excluded
        if self._search is not None and not self._pool.has_pair(excluded):
            # They may be back. What the last round of checks found is older than the loss.
            await asyncio.gather(*map(self._relay.check, excluded))
            excluded = set()
        return self._pool.pick(excluded, self._body.prompt)

    async def _ask(self, pair: Pair) -> NodeAnswer:
        """The answer of the pair's decode node, once its first bytes are here. Raises RouterError."""
        num_resumes = self._num_resumes + (self._search is not None)
        if self._span is not None:
            retries = {"hisparse_pd.room": pair.room, "hisparse_pd.retries": self._num_retries}
            self._span.set({**retries, "hisparse_pd.resumes": num_resumes, **_names(pair)})
        fields: Mapping[str, object] = {}
        if self._journal is not None:
            # A stream is taken away from a node that leaves (_move): only then is it known whether there was
            # room for all of its journal. Without, it stays.
            may_move = not self._body.is_streamed and self._pool.has(NodeKind.DECODE, (pair.decode,))
            fields = self._journal.fields(may_move=may_move, num_resumes=num_resumes)
        content = self._body.with_bootstrap(pair.prefill.host, pair.prefill.bootstrap_port, pair.room, fields)
        call = self._relay.calls.call(pair.decode, DECODE_SILENCE_SECS)
        self._pair, self._movable, self._is_moved = pair, call, False
        self._open_at_pair.enter_context(closing(call))
        self._open_at_pair.enter_context(self._pool.working(pair.decode, pair.room, self._move))
        with self._pool.working(pair.prefill, pair.room):  # its part is over when the first token is here
            answer = await self._relay.calls.post(
                pair.decode, call, self._endpoint, content, self._headers, pair.headers
            )
        if not answer.is_journaled:
            self._movable = None
        return answer

    def _move(self) -> None:
        if self._movable is not None and self._may_move():
            self._is_moved = True
            self._movable.close()

    def _may_move(self) -> bool:
        """Whether it goes on elsewhere if its decode node ends now."""
        journal = self._journal
        return self._relay.resume_timeout_secs > 0 and journal is not None and journal.is_kept

    def _note_failure(self, error: RouterError) -> None:
        """The pair gave no answer. Raises ``error`` if no other one may do better."""
        pair, blamed = self._pair, None
        error.node_headers = pair.headers
        if _tells_of_loss(error):
            is_moved = self._is_moved or getattr(error, "node_code", None) == MOVED
            self._note_lost(error, is_moved=is_moved)
            return
        if isinstance(error, NodeUnreachable):
            self._pool.mark_unhealthy(pair.decode, str(error))
            self._excluded.add(pair.decode)
        elif (blamed := _blamed(error, pair)) is not None:
            # For this request; its health check judges the node. A write that failed may have been
            # the connection alone: where there is no other node, the same one tries again.
            others = self._excluded | {blamed}
            if error.status != _BAD_GATEWAY or self._pool.has_pair(others):
                self._excluded = others
        else:
            raise error
        if self._search is not None:
            if self._search.is_late:
                raise error
        elif self._num_retries == self._relay.max_retries or not self._pool.has_pair(self._excluded):
            raise error
        self._num_retries += 1
        log.warning("%s: %s; trying another pair", self._endpoint, error)
        self._relay.metrics.count_retry(blamed)
        if self._span is not None:
            self._span.event("retry", {"exception.message": str(error), **_names(pair)})

    def _note_lost(self, error: RouterError, *, is_moved: bool) -> None:
        """The pair's decode node is lost, or leaves. Raises RouterError if the request does not go on."""
        node, journal = self._pair.decode, self._journal
        if journal is not None and journal.num_records and not journal.is_kept:
            raise error
        if is_moved:
            self._pool.mark_unhealthy(node, LEAVING)
        else:
            num_records = 0 if journal is None else journal.num_records
            if why := self._losses.add(node.url, num_records):
                raise RouterError(502, f"{why}; it is not sent to another one: {error}") from error
        if not self._relay.resume_timeout_secs:
            raise error
        self._excluded = {node}
        if self._search is None:
            self._search = Search("moved" if is_moved else "lost", self._relay.resume_timeout_secs, error)

    def _note_resumed(self, search: Search) -> None:
        self._search = None
        self._excluded = set()
        self._num_resumes += 1
        secs = asyncio.get_running_loop().time() - search.began_at
        self._relay.metrics.count_resume(search.reason, secs)
        num_records = self._journal.num_records if self._journal is not None else 0
        log.warning(
            "%s: %s; it went on at %s behind %d records after %.3f s",
            self._endpoint,
            search.error,
            self._pair.decode.url,
            num_records,
            secs,
        )
        if self._span is not None:
            self._span.event("resume", {"exception.message": str(search.error), **_names(self._pair)})


def _names(pair: Pair) -> dict[str, str]:
    """The attributes of a trace that name the nodes."""
    return {f"hisparse_pd.{kind}_node": url for kind, url in pair.urls.items()}


def _tells_of_loss(error: RouterError) -> bool:
    """Whether the decode node is lost, or leaves."""
    if isinstance(error, NodeRefused):
        is_lost = error.node_code in (MOVED, ENGINE_LOST) or error.status == _SERVER_ERROR
        return is_lost and not _is_about_prefill(error)
    return isinstance(error, NodeFailed)


def _blamed(error: RouterError, pair: Pair) -> Node | None:
    """The node that failed with this request, where another one of its kind may not."""
    if isinstance(error, NodeRefused):
        if _is_about_prefill(error):
            return pair.prefill
        if error.status in (_UNAVAILABLE, _QUEUE_FULL):
            return pair.decode  # not ready yet, or no longer, or full
    return None


def _is_about_prefill(refusal: NodeRefused) -> bool:
    """Whether a decode node's refusal is about the prefill node; its 502 is about the transfer to it."""
    return refusal.node_code == PREFILL_NODE_FAILED or refusal.status == _BAD_GATEWAY
