"""The samples of one HTTP request, and the queue of events that their engines send.

``EngineLink`` makes a group for each request and puts events into it; the handler that writes the answer
reads them with ``next_event``, and finishes samples that it ends itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping

from hisparse_pd.engine.messages import PromptScores, RequestFailed, Tokens
from hisparse_pd.serving.http.http_errors import NodeUnavailable
from hisparse_pd.serving.http.wait_timer import WaitTimer

SampleEvent = Tokens | PromptScores | RequestFailed


class SampleGroup:
    """The samples of one HTTP request and the queue of their events, for one reader."""

    def __init__(
        self,
        ranks: Mapping[str, int],
        *,
        may_move: bool,
        check_secs: float,
        stall: Callable[[], str | None],
        on_finish: Callable[[SampleGroup, str], None],
    ) -> None:
        """``stall`` says why the engines make no progress; a waiting reader asks it every ``check_secs``.

        ``on_finish``: called with the group and the request id of a sample that is complete.
        """
        self._check_secs = check_secs
        self._stall = stall
        self._on_finish = on_finish
        self.ranks = ranks
        """Rank of each sample, by request id."""
        self.may_move = may_move
        """Whether the request moves to another node when this one shuts down."""
        self.live = set(ranks)
        """Request ids of the samples that have not ended; ``EngineLink`` removes them."""
        self.events: deque[SampleEvent] = deque()
        self._num_waiting_tokens: Counter[str] = Counter()
        """Number of ``Tokens`` messages in the queue, by request id."""
        self._reader: asyncio.Future[None] | None = None
        """Future on which the reader waits for an event."""
        self._wait_timer: WaitTimer | None = None
        """Limits the reader's waits; made with the first one."""

    def put(self, event: SampleEvent) -> None:
        self._num_waiting_tokens[event.request_id] += isinstance(event, Tokens)
        self.events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next_event(self) -> SampleEvent:
        """Return the next event of any live sample. Raises NodeUnavailable when the engine makes no progress.

        There is no other limit for the wait: the engine's own timeouts end requests.
        """
        if self.events:
            await asyncio.sleep(0)  # let other requests have their turn
        else:
            self._reader = asyncio.get_running_loop().create_future()
            if self._wait_timer is None:
                self._wait_timer = WaitTimer(self._check_secs, self._check_engine)
            self._wait_timer.begin()
            try:
                await self._reader
            finally:
                self._reader = None
                self._wait_timer.end()
        event = self.events.popleft()
        self._num_waiting_tokens[event.request_id] -= isinstance(event, Tokens)
        return event

    def close(self) -> None:
        if self._wait_timer is not None:
            self._wait_timer.close()

    def _check_engine(self) -> None:
        assert self._reader is not None
        assert self._wait_timer is not None
        if self._reader.done():
            return
        if (stall := self._stall()) is not None:
            self._reader.set_exception(NodeUnavailable(stall))
        else:
            self._wait_timer.begin()

    def has_more_tokens(self, request_id: str) -> bool:
        """Whether more output of the sample is in the queue."""
        return self._num_waiting_tokens[request_id] > 0

    def finish(self, request_id: str) -> None:
        """Say that the reader needs no further event of a sample.

        ``EngineLink`` tells the engine to abort the sample, unless it has ended.
        """
        self._on_finish(self, request_id)
