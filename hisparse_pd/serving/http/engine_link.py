"""A front's requests in flight, and its connections to the engines of all ranks.

The API opens a group of samples for each HTTP request (``EngineLink.open``) and reads the group's events;
health checks ask for ``trouble`` and ``stall``; ``first_front.py`` and ``fronts.py`` start the link and end
it (``stop_accepting``, ``shut_engines_down``, ``engine_died``). Each sample belongs to one rank, and every
message about it goes to its group. Opening and closing a group never waits, so that a cancelled handler still
aborts its samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple, assert_never

import msgspec

from hisparse_pd.base.vocabulary import ENGINE_LOST, MOVED
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.engine.messages import (
    Abort,
    EngineLoading,
    EngineReady,
    EngineStats,
    Flushed,
    FromEngine,
    Generate,
    GenerateGroup,
    PromptScores,
    ReleasePage,
    ReleaseQuarantine,
    RequestFailed,
    Shutdown,
    Tokens,
)
from hisparse_pd.engine.sockets import Crossing
from hisparse_pd.serving.http.board import Board, InFlightCounts
from hisparse_pd.serving.http.cache_flushes import CacheFlushes
from hisparse_pd.serving.http.http_errors import ApiError, NodeUnavailable
from hisparse_pd.serving.http.queue_limits import NO_LIMITS, QueueLimits
from hisparse_pd.serving.http.rank_choice import RankChoice, least_loaded
from hisparse_pd.serving.http.rank_link import RankLink
from hisparse_pd.serving.http.sample_group import SampleEvent, SampleGroup

log = logging.getLogger(__name__)


class _Share(NamedTuple):
    """The part of a prompt's samples that one rank gets."""

    rank: RankLink
    prompt: GenerateGroup
    """The prompt with those of its samples that the rank gets."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt. Its samples share them, so the limits of the queue count them once a rank."""
        return self.prompt.samples[0].num_prompt_tokens


class _SampleInFlight(NamedTuple):
    """Where the events of a sample go, and what to undo when it ends."""

    group: SampleGroup
    rank: RankLink
    num_prompt_tokens: int


def samples_at_work(link: EngineLink) -> int:
    """Return the number of samples in flight in all fronts, for which a decode node that shuts down waits."""
    return link.counts.num_samples


def rooms_at_work(link: EngineLink) -> int:
    """Return how many rooms the engines last reported, for which a prefill node that shuts down waits."""
    return sum(rank.reports.num_rooms for rank in link.ranks)


class LinkState(StrEnum):
    """LOADING → SERVING → STOPPING → GONE; any state may go to GONE when the engine dies."""

    LOADING = "the engine is loading"
    SERVING = "serving"
    STOPPING = "the node is shutting down"
    GONE = "the engine has died"


class EngineLink:
    """Owns a front's requests in flight, and its links to the engines of all ranks."""

    def __init__(
        self,
        endpoints: Sequence[str],
        health_timeout_secs: float,
        on_stats: Callable[[int, EngineStats], None] = lambda rank, stats: None,
        on_connected: Callable[[], None] = lambda: None,
        limits: QueueLimits = NO_LIMITS,
        choose_rank: RankChoice = least_loaded,
        board: Board | None = None,
        front_number: int = 0,
        crossing: Crossing | None = None,
    ) -> None:
        """``endpoints``: one for each rank, as in RankLink. ``on_stats``: called with a rank and its stats.

        ``on_connected``: called once all engines are connected to all fronts. ``choose_rank``: assigns each
        sample to a rank. ``board``: what the node's fronts share; None if this is the only one. ``crossing``:
        settings of connections to other machines.
        """
        self.limits = limits
        self.health_timeout_secs = health_timeout_secs
        self.state = LinkState.LOADING
        self.front_number = front_number
        self.counts = InFlightCounts(board or Board(len(endpoints)), front_number)
        self.ranks = [
            RankLink(
                rank,
                endpoint,
                self.counts,
                self.handle,
                self._note_lost,
                crossing if endpoint.startswith("tcp:") else None,
            )
            for rank, endpoint in enumerate(endpoints)
        ]
        self.lost = asyncio.Event()
        """Set once a process of the node is gone, on this machine or another; the log says which."""
        self._on_stats = on_stats
        self._on_connected: Callable[[], None] | None = on_connected
        self._choose_rank = choose_rank
        self._in_flight: dict[str, _SampleInFlight] = {}
        """Samples of this front, by request id."""
        self._flushes = CacheFlushes(self.ranks, front_number)

    def start(self) -> None:
        """Bind the sockets and begin to talk to the engines. Needs a running event loop. Raises OSError."""
        for rank in self.ranks:
            rank.start()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    # --- requests -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self, prompts: Sequence[GenerateGroup], *, may_move: bool = False) -> Iterator[SampleGroup]:
        """Send the samples of one HTTP request. Those that have not ended are aborted when the context
        closes.

        ``may_move``: the samples end with the code MOVED when the node begins to shut down. Raises
        NodeUnavailable unless the engines serve, QueueFull, and ApiError for a request that is too large.
        """
        self.require_serving()
        shares = [share for prompt in prompts for share in self._split_by_rank(prompt)]
        samples = [(share.rank, sample) for share in shares for sample in share.prompt.samples]
        self._count_or_refuse(shares, samples)
        group = SampleGroup(
            {sample.request_id: rank.rank for rank, sample in samples},
            may_move=may_move,
            check_secs=self.health_timeout_secs,
            stall=self.stall,
            on_finish=partial(self.forget, has_finished=True),
        )
        try:
            for rank, sample in samples:
                num_tokens = sample.num_prompt_tokens
                self._in_flight[sample.request_id] = _SampleInFlight(group, rank, num_tokens)
            for share in shares:
                share.rank.put(share.prompt)
            yield group
        finally:
            group.close()
            for request_id in list(group.live):
                self.forget(group, request_id)
            for share in shares:
                # None sends nothing. The prompt counts until the aborts queued before it, which free the
                # prompt, are sent.
                uncount = partial(self.counts.add, num_samples=0, num_prompt_tokens=-share.num_prompt_tokens)
                share.rank.put(None, uncount)

    def _split_by_rank(self, prompt: GenerateGroup) -> list[_Share]:
        """Choose a rank for each sample and count it there, before the next one is chosen."""
        shares: dict[int, list[Generate]] = {}
        # ``_choose_rank`` is a generator: it chooses the next rank once the sample before is counted.
        for sample, rank in zip(prompt.samples, self._choose_rank(self.ranks, prompt), strict=True):
            self.counts.assign(rank.rank, sample.num_prompt_tokens)
            shares.setdefault(rank.rank, []).append(sample)
        return [
            _Share(self.ranks[rank], msgspec.structs.replace(prompt, samples=tuple(samples)))
            for rank, samples in shares.items()
        ]

    def _count_or_refuse(
        self, shares: Sequence[_Share], samples: Sequence[tuple[RankLink, Generate]]
    ) -> None:
        """Count a request's samples, which are counted on their ranks already, as in flight. Raises QueueFull
        or ApiError if they do not fit, and takes all counts back."""
        num_prompt_tokens = sum(share.num_prompt_tokens for share in shares)
        self.counts.add(len(samples), num_prompt_tokens)
        try:
            self.limits.require_place(self.counts, len(samples), num_prompt_tokens, are_counted=True)
        except ApiError:
            self.counts.add(-len(samples), -num_prompt_tokens)
            for rank, sample in samples:
                self.counts.unassign(rank.rank, sample.num_prompt_tokens)
            raise

    def require_place(self, num_samples: int, num_prompt_tokens: int = 0) -> None:
        """Check whether further samples fit. Raises QueueFull if they do not fit now, ApiError if never."""
        self.limits.require_place(self.counts, num_samples, num_prompt_tokens)

    @property
    def num_in_flight(self) -> int:
        """Samples in flight in this front."""
        return len(self._in_flight)

    def forget(self, group: SampleGroup, request_id: str, *, has_finished: bool = False) -> None:
        """Drop a sample and tell its engine, unless the engine has ended it. ``has_finished``: a stop string,
        which an engine does not know, ended the sample, so its client has the answer."""
        if request_id in group.live:
            self._abort(self._release(request_id).rank, Abort(request_id, has_finished))

    def _abort(self, rank: RankLink, abort: Abort) -> None:
        """Send an abort. Its sample counts as in flight until the abort has gone to the engine."""
        self.counts.add(1)
        rank.put(abort, partial(self.counts.add, -1))

    # --- messages of the engines ----------------------------------------------------------------------

    def handle(self, rank: RankLink, message: FromEngine) -> None:
        """Take in a message of an engine: about a sample, or about the engine itself."""
        match message:
            case Tokens() | PromptScores() | RequestFailed():
                self._dispatch(message)
            case Flushed():
                self._flushes.note(rank, message)
            case EngineLoading():
                rank.reports.note(message)
            case EngineReady():
                rank.reports.note(message)
                if self.ready is not None:
                    self._note_all_ready(self.ready)
                self._check_connected()
            case EngineStats():
                rank.reports.note(message)
                self._on_stats(rank.rank, message)
                self._check_connected()
            case _:
                assert_never(message)

    def _note_all_ready(self, ready: EngineReady) -> None:
        if self.state is LinkState.LOADING:
            self.state = LinkState.SERVING
        self.counts.set_ready()
        log.info("the engine is ready: context of %d tokens", ready.context_length)

    def _check_connected(self) -> None:
        """Call ``on_connected`` once all fronts are connected. Fronts send each other nothing, so this front
        looks at their counts with each report of an engine."""
        if self._on_connected is not None and self.counts.are_ready:
            on_connected, self._on_connected = self._on_connected, None
            on_connected()

    def _dispatch(self, event: SampleEvent) -> None:
        """Give an event to its group. Events of aborted samples are dropped."""
        in_flight = self._in_flight.get(event.request_id)
        if in_flight is None:
            return
        if isinstance(event, RequestFailed) or (
            isinstance(event, Tokens) and event.finish_reason is not None
        ):
            self._release(event.request_id)
        in_flight.group.put(event)

    def _release(self, request_id: str) -> _SampleInFlight:
        in_flight = self._in_flight.pop(request_id)
        in_flight.group.live.discard(request_id)
        self.counts.add(-1)
        self.counts.unassign(in_flight.rank.rank, in_flight.num_prompt_tokens)
        return in_flight

    def _note_lost(self, rank: RankLink) -> None:
        log.error("rank %d, on another machine, is gone: its log there says why", rank.rank)
        self.lost.set()

    # --- what operators ask for -----------------------------------------------------------------------

    async def flush_cache(self) -> None:
        """Have all engines drop the prefixes that no request uses, and wait until they have. Raises
        NodeUnavailable."""
        self.require_serving()
        await self._flushes.flush(self.health_timeout_secs)

    def release_quarantine(self, instance_id: str) -> None:
        self.require_engine()
        for rank in self.ranks:
            rank.put(ReleaseQuarantine(instance_id))

    def release_page(self, rank: int, pool: PoolKind, start: int) -> None:
        self.require_engine()
        self.ranks[rank].put(ReleasePage(pool, start))

    # --- state and health -----------------------------------------------------------------------------

    @property
    def ready(self) -> EngineReady | None:
        """The engines' reports when they were ready, as one with the lowest bounds of all; None while one
        loads."""
        reports = [rank.reports.ready for rank in self.ranks if rank.reports.ready is not None]
        if len(reports) < len(self.ranks):
            return None
        return msgspec.structs.replace(
            reports[0],
            max_total_tokens_hisparse=min(report.max_total_tokens_hisparse for report in reports),
            max_total_tokens_dense=min(report.max_total_tokens_dense for report in reports),
        )

    @property
    def loading(self) -> EngineLoading | None:
        """Progress of the rank that has most left to load; None before any reported and once all are
        ready."""
        loading = [rank.reports.loading for rank in self.ranks if rank.reports.loading is not None]
        return max(loading, key=lambda progress: progress.num_bytes - progress.num_done, default=None)

    @property
    def is_loading(self) -> bool:
        """Whether some front is not yet connected to all engines. All fronts of a node say the same."""
        return self.state is LinkState.LOADING or (
            self.state is LinkState.SERVING and self.counts.are_partly_ready
        )

    @property
    def is_leaving(self) -> bool:
        """Whether new requests are refused while those in flight go on."""
        return self.state is LinkState.STOPPING

    def require_serving(self) -> EngineReady:
        """Return what the engines reported. Raises NodeUnavailable unless they serve."""
        ready = self.ready
        if ready is None or self.state is not LinkState.SERVING:
            raise NodeUnavailable(str(self.state))
        return ready

    def require_engine(self) -> EngineReady:
        """Return what the engines reported, also while the node shuts down. Raises NodeUnavailable."""
        ready = self.ready
        if ready is None or self.state is LinkState.GONE:
            raise NodeUnavailable(str(self.state))
        return ready

    def trouble(self) -> str | None:
        """Return why this node cannot serve, None if it can. Nodes of the other kind play no part."""
        if self.is_loading:
            return self.stall() or ": ".join(map(str, filter(None, (LinkState.LOADING, self.loading))))
        if self.state is not LinkState.SERVING:
            return str(self.state)
        troubles = (rank.reports.trouble for rank in self.ranks)
        return self.stall() or next(filter(None, troubles), None)

    def stall(self) -> str | None:
        """Return why an engine makes no progress, None while all do. Loading is progress, too."""
        if self.state is LinkState.GONE:
            return str(self.state)
        for rank in self.ranks:
            stall = rank.reports.stall(self.health_timeout_secs)
            if stall is not None:
                return stall if len(self.ranks) == 1 else f"rank {rank.rank}: {stall}"
        return None

    # --- the end of the node --------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Refuse new requests. Those in flight go on, or end with the code MOVED if they may move."""
        if self.state is not LinkState.GONE:
            self.state = LinkState.STOPPING
        for rank in self.ranks:
            rank.reports.has_stats_since_stop = False  # its last report may lack a room that has begun since
        for request_id, in_flight in list(self._in_flight.items()):
            if in_flight.group.may_move:
                self._fail(request_id, 503, "the node is shutting down; the request goes on elsewhere", MOVED)

    def fail_all(self, status: int, error: str, code: str = "") -> None:
        """End every request in flight with an error."""
        for request_id in list(self._in_flight):
            self._fail(request_id, status, error, code)

    def _fail(self, request_id: str, status: int, error: str, code: str = "") -> None:
        rank = self._in_flight[request_id].rank
        self._dispatch(RequestFailed(request_id, status, error, code))
        self._abort(rank, Abort(request_id))

    def engine_died(self, what: str = LinkState.GONE) -> None:
        """End all requests, because a process of the node has died: an engine, whose experts the others lack,
        or a front. ``what``: which, in words for the clients."""
        self.state = LinkState.GONE
        self.fail_all(503, f"{what}; the request is lost, send it again", ENGINE_LOST)

    async def shut_engines_down(self) -> None:
        """Ask the engines to exit, after all messages that were sent before."""
        for rank in self.ranks:
            rank.put(Shutdown(self.front_number))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(rank.flush() for rank in self.ranks)), timeout=1.0)
