"""Relays requests: each goes to the decode node of a pair, whose answer goes to the client.

``server.py`` opens each request at the one ``Relay``, which makes a ``RelayedRequest`` of it. The body names
the pair's prefill node, which the decode node asks for the KV that it lacks. The router itself sends a
prefill node nothing, and learns from the decode node's error that the prefill node failed.

A request whose client has nothing yet goes to another pair when its decode node cannot be reached, is not
ready or has a full queue: computing a prompt twice does no harm. When its prefill node failed, or its decode
node is lost or shuts down, a request goes to another pair whatever the client has. A stream resumes behind
what its journal says was shown; any other answer begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.router.attempt import Attempt
from hisparse_pd.router.body import RequestBody
from hisparse_pd.router.connect import RawHeaders
from hisparse_pd.router.errors import NodeFailed, NodeUnreachable, RouterError
from hisparse_pd.router.metrics import RouterMetrics
from hisparse_pd.router.node_calls import NodeAnswer, NodeCalls, headers_to_node
from hisparse_pd.router.nodes import Node, NodeKind, NodePool, Pair
from hisparse_pd.router.resumable_stream import ResumableStream
from hisparse_pd.router.route import Failure, Route
from hisparse_pd.router.stream_journal import JournalBudget, StreamJournal
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.frame import PING_SECS, PINGS
from hisparse_pd.serving.http.http_errors import ErrorShape
from hisparse_pd.serving.http.page_names import PAGES_HEADER

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import RequestSpan

log = logging.getLogger(__name__)

DECODE_SILENCE_SECS = 3 * PING_SECS
"""Silence after which a decode node counts as hanging; one that works sends something every PING_SECS."""

_PASSED_HEADERS = (b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", b"x-request-timing")
"""Headers of the client's request that nodes get, too."""
_KEY_HEADERS = (b"authorization", b"x-api-key")
_UNAVAILABLE = 503


class Relay:
    """Sends requests to pairs of nodes."""

    def __init__(
        self,
        pool: NodePool,
        calls: NodeCalls,
        check: Callable[[Node], Awaitable[None]],
        metrics: RouterMetrics,
        journals: JournalBudget,
        settings: RouterSettings,
    ) -> None:
        """``check`` asks a node for its health and reports it to the pool."""
        self.pool = pool
        self.calls = calls
        self.check = check
        self.metrics = metrics
        self.journals = journals
        self.max_retries = settings.max_retries
        self.resume_timeout_secs = settings.resume_timeout_secs
        # The router passes a client's key on to nodes only if it checks no keys itself.
        self._passed_headers = (
            _PASSED_HEADERS if settings.api_key_file is not None else _PASSED_HEADERS + _KEY_HEADERS
        )

    async def open(
        self,
        endpoint: Endpoint,
        body: RequestBody,
        client_headers: RawHeaders,
        stack: AsyncExitStack,
        span: RequestSpan | None = None,
    ) -> NodeAnswer:
        """Send a request to a pair. Returns the answer once its first bytes are here. Raises RouterError.

        Closing ``stack`` closes the connection, which aborts the request.
        """
        headers = headers_to_node(client_headers, self._passed_headers)
        relayed = RelayedRequest(self, endpoint, body, headers, span)
        stack.push_async_callback(relayed.close)
        return await relayed.open()

    async def ask_one(
        self, path: str, content: bytes, client_headers: RawHeaders, stack: AsyncExitStack
    ) -> NodeAnswer:
        """Return a healthy decode node's answer to a request that needs no pair. Closing ``stack`` closes the
        connection.

        If a node cannot be reached or does not serve, the next one is asked. Raises RouterError.
        """
        headers = headers_to_node(client_headers, self._passed_headers)
        nodes = sorted(self.pool.healthy(NodeKind.DECODE), key=lambda node: node.num_in_flight)
        if not nodes:
            raise self.pool.no_healthy(NodeKind.DECODE)
        asked = nodes[: self.max_retries + 1]
        for node in asked:
            try:
                call = stack.enter_context(closing(self.calls.call(node)))
                return await self.calls.post(node, call, path, content, headers, {node.kind.header: node.url})
            except RouterError as error:
                if isinstance(error, NodeUnreachable):
                    self.pool.mark_unreachable(node, str(error))
                elif error.status != _UNAVAILABLE:
                    raise
                if node is asked[-1]:
                    raise
                log.warning("%s: %s; asking another node", path, error)
        raise AssertionError("the last node answers or raises")


class RelayedRequest:
    """One request on its way, at one pair after the other until its answer is complete."""

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
        self._route = Route(relay.pool, relay.max_retries, relay.resume_timeout_secs)
        """Decides after each failure whether another pair is tried. Its ``search`` is under way from the loss
        of a decode node until another pair answers."""
        self.attempt: Attempt | None = None
        """The attempt under way, or else the last one."""
        self.stream: ResumableStream | None = None
        """The client's stream, once its first bytes are here; None for an answer that is not journaled."""
        self._journal: StreamJournal | None = None
        """None if the router keeps no journals, and nothing resumes."""
        self._uncounted: Failure | None = None
        """The failure because of which the next try is a retry; a search may end without another try."""
        if relay.journals.max_bytes:
            # Only a stream is resumed, from its body and records. An answer that is not streamed begins anew:
            # its journal gets no records, and the body's bytes do not count.
            self._journal = StreamJournal(body.num_bytes if body.is_streamed else 0, relay.journals)

    async def open(self) -> NodeAnswer:
        """Return the answer once its first bytes are here. Raises RouterError."""
        attempt = await self._first_to_answer()
        if self._journal is None or not attempt.answer.is_journaled:
            return attempt.answer
        ping = PINGS[ErrorShape.of_path(self._endpoint)]
        self.stream = ResumableStream(attempt, self._journal, self._pool, self._resume, ping)
        return attempt.answer.without_journal(self.stream.read)

    async def close(self) -> None:
        """End the attempt, or the search for another pair. May be called twice."""
        if self._journal is not None:
            self._journal.close()
        try:
            if self.stream is not None:
                await self.stream.close()
        finally:  # also when this is cancelled meanwhile because the client leaves
            if self.attempt is not None:
                self.attempt.close()

    async def _first_to_answer(self) -> Attempt:
        """Try pairs until one answers. Raises RouterError."""
        while True:
            pair = await self._pick()
            if pair is not None and (attempt := await self._try(pair)) is not None:
                return attempt
            if self._route.search is not None:
                await self._route.search.pause()

    async def _pick(self) -> Pair | None:
        """Choose a pair; None if there is none yet and a search goes on. Raises RouterError."""
        search, avoided = self._route.search, self._route.avoided
        if search is not None and not self._pool.has_pair(avoided):
            # There is no pair without the avoided nodes. They are asked anew, since they may be back, which
            # the last regular checks do not show if they are older than the loss.
            await asyncio.gather(*map(self._relay.check, avoided))
            avoided = ()
        try:
            return self._pool.pick(avoided, self._body.prompt)
        except RouterError as error:
            if search is None or search.is_late:
                raise
            log.info("%s: %s", self._endpoint, error)
            return None

    async def _try(self, pair: Pair) -> Attempt | None:
        """Send the request to a pair. Returns the attempt once its answer has begun; None if it failed and
        another try is due. Raises RouterError."""
        if self._uncounted is not None:
            self._relay.metrics.count_retry(self._uncounted)
            self._uncounted = None
        call = self._relay.calls.call(pair.decode, DECODE_SILENCE_SECS)
        attempt = self.attempt = Attempt(pair, call, self._pool, self._can_resume)
        try:
            attempt.answer = await self._send(attempt)
        except RouterError as error:
            attempt.close()
            self._note_failure(attempt, error)
            return None
        if (names := attempt.answer.page_names) is not None:
            self._pool.learn(pair, self._body.prompt, names)
        attempt.answer = attempt.answer.without_page_names()
        attempt.is_movable = attempt.answer.is_journaled  # without a journal no node can continue the answer
        self._note_success(attempt)
        return attempt

    async def _send(self, attempt: Attempt) -> NodeAnswer:
        """Return the decode node's answer once its first bytes are here. Raises RouterError."""
        pair = attempt.pair
        num_resumes = self._route.num_resumes
        if self._span is not None:
            retries = {"hisparse_pd.room": pair.room, "hisparse_pd.retries": self._route.num_retries}
            self._span.set({**retries, "hisparse_pd.resumes": num_resumes, **_node_attributes(pair)})
        fields: Mapping[str, object] = {}
        if self._journal is not None:
            # ``may_move`` allows a node that shuts down to end the answer, which then begins anew at another
            # node. It may not end a stream: the router does (Attempt._move), because it alone knows whether
            # all of the stream's journal was kept.
            may_move = not self._body.is_streamed and self._pool.has(NodeKind.DECODE, excluded=(pair.decode,))
            fields = self._journal.fields(may_move=may_move, num_resumes=num_resumes)
        content = self._body.with_bootstrap(pair.prefill.host, pair.prefill.bootstrap_port, pair.room, fields)
        headers = [*self._headers, (PAGES_HEADER, b"1")] if self._pool.known.are_wanted else self._headers
        # The request counts as load of the prefill node until the answer's first bytes are here.
        with self._pool.working(pair.prefill, pair.room):
            return await self._relay.calls.post(
                pair.decode, attempt.call, self._endpoint, content, headers, pair.headers
            )

    async def _resume(self, attempt: Attempt, error: NodeFailed) -> Attempt:
        """Continue a stream at another pair, since ``attempt`` ended in ``error``. Raises RouterError."""
        journal = self._journal
        assert journal is not None, "only journaled streams resume"
        attempt.close()
        self._note_failure(attempt, error)
        journal.next_node()
        resumed = await self._first_to_answer()
        if not resumed.answer.is_journaled:
            raise NodeFailed(502, "the next decode node keeps no journal of the stream; upgrade it")
        return resumed

    def _can_resume(self) -> bool:
        """Whether the request could go on at another pair if its decode node ended now."""
        journal = self._journal
        return self._relay.resume_timeout_secs > 0 and journal is not None and journal.is_kept

    def _note_failure(self, attempt: Attempt, error: RouterError) -> None:
        """Prepare another try. Raises RouterError if none is due."""
        pair, journal, failure = attempt.pair, self._journal, Failure.of(error)
        error.node_headers = pair.headers
        num_records = 0 if journal is None else journal.num_records
        if journal is not None and num_records and not journal.is_kept:
            raise error  # the router no longer knows all that the client has, so no node can continue it
        if failure in (Failure.DECODE_LOST, Failure.DECODE_LEAVING):
            # A node that shuts down is not lost: it said so, in its error or in the stream, or the router
            # closed the call because of it.
            has_said_so = journal is not None and journal.is_leaving
            is_leaving = failure is Failure.DECODE_LEAVING or attempt.was_moved or has_said_so
            self._route.leave_decode_node(error, pair.decode, is_leaving=is_leaving, num_records=num_records)
            return
        self._route.retry(error, failure, pair)
        log.warning("%s: %s; trying another pair", self._endpoint, error)
        self._uncounted = failure
        if self._span is not None:
            self._span.event("retry", {"exception.message": str(error), **_node_attributes(pair)})

    def _note_success(self, attempt: Attempt) -> None:
        """Report the search that ends with this attempt, if there was one."""
        if (search := self._route.end_search()) is None:
            return
        secs = asyncio.get_running_loop().time() - search.began_at
        self._relay.metrics.count_resume(search.reason, secs)
        log.warning(
            "%s: %s; the request goes on at %s, after %d records of its journal and %.3f s",
            self._endpoint,
            search.error,
            attempt.pair.decode.url,
            0 if self._journal is None else self._journal.num_records,
            secs,
        )
        if self._span is not None:
            self._span.event(
                "resume", {"exception.message": str(search.error), **_node_attributes(attempt.pair)}
            )


def _node_attributes(pair: Pair) -> dict[str, str]:
    """Return the attributes of a trace that name the pair's nodes."""
    return {f"hisparse_pd.{kind}_node": url for kind, url in pair.urls.items()}
