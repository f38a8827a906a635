"""A client's stream that goes on at another decode node when its own is lost or shuts down.

``RelayedRequest`` (``relay.py``) makes one for each journaled stream and gives its ``read`` to the server;
the search for another pair is the relay's, too (``resume``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from hisparse_pd.router.attempt import Attempt
from hisparse_pd.router.errors import NodeFailed, StreamEnded
from hisparse_pd.router.nodes import LEAVING, NodePool
from hisparse_pd.router.stream_journal import StreamJournal

SEARCH_PING_SECS = 5.0
"""Interval of pings to a client whose stream waits for another pair. It is short because the lost node may
have been silent for long already, and proxies cut a stream that is silent for a minute."""


class ResumableStream:
    """One journaled stream, read from one decode node after another."""

    def __init__(
        self,
        attempt: Attempt,
        journal: StreamJournal,
        pool: NodePool,
        resume: Callable[[Attempt, NodeFailed], Coroutine[None, None, Attempt]],
        ping: bytes,
    ) -> None:
        """``resume`` returns the attempt that follows one that failed, which it is given with its error.
        ``ping``: bytes for a client that waits, in the form of its endpoint's API."""
        self._attempt = attempt
        self._journal = journal
        self._pool = pool
        self._resume = resume
        self._ping = ping
        self._resuming: asyncio.Task[Attempt] | None = None
        """The search for another pair; None while a node sends the stream."""

    async def read(self) -> bytes:
        """Return the next bytes for the client, none at the end. Raises RouterError."""
        while True:
            if self._resuming is not None:
                done, _ = await asyncio.wait((self._resuming,), timeout=SEARCH_PING_SECS)
                if not done:
                    return self._ping
                resuming, self._resuming = self._resuming, None
                self._attempt = await resuming
            error = None
            try:
                chunk = await self._attempt.answer.read()
            except NodeFailed as failed:
                chunk, error = b"", failed
            if chunk:
                if shown := self._feed(chunk):
                    return shown
            elif self._journal.is_over:
                return b""
            else:
                # Without an error, the node itself ended the stream; its last event may say why.
                error = error or StreamEnded(self._journal.unshown)
                self._resuming = asyncio.create_task(self._resume(self._attempt, error))

    async def close(self) -> None:
        """End the search for another pair, if one is under way."""
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)

    def _feed(self, chunk: bytes) -> bytes:
        """Add ``chunk`` to the journal. Returns the bytes that the client may have now.

        A node that shuts down says in its streams that it is leaving.
        """
        was_leaving = self._journal.is_leaving
        shown = self._journal.feed(chunk)
        if self._journal.is_leaving and not was_leaving:
            # The pool now moves what can move of the node's requests. Later chunks must not mark it again:
            # the node may have restarted and be healthy before the last of them is read.
            self._pool.mark_unhealthy(self._attempt.pair.decode, LEAVING)
        return shown
