"""The front's side of the conversation with its engines: who waits for what, and whether the engines live.

Each sample is one rank's. Every message goes to the group of samples that waits for it. Opening and closing a
group never waits, so a cancelled handler still aborts what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple, assert_never

import msgspec

from service.engine_messages import (
    Abort,
    EngineLoading,
    EngineReady,
    EngineStats,
    FlushCache,
    FromEngine,
    Generate,
    GenerateGroup,
    PrefillFinished,
    ReleaseQuarantine,
    RequestFailed,
    Shutdown,
    Tokens,
)
from service.http_errors import ApiError, NodeUnavailable, QueueFull
from service.prefixes import LOAD_BOUND, PrefixIndex, block_keys
from service.rank_link import RankLink
from service.settings import NodeSettings

log = logging.getLogger(__name__)

SampleEvent = Tokens | PrefillFinished | RequestFailed


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may be in flight. A prompt's tokens count once on each rank that has samples of it."""

    max_requests: int
    max_prompt_tokens: int

    @classmethod
    def of(cls, settings: NodeSettings) -> QueueLimits:
        max_running = settings.dp_size * settings.max_running_requests
        return cls(max_running + settings.max_queued_requests, settings.max_queued_tokens)


class _InFlight(NamedTuple):
    group: SampleGroup
    rank: RankLink
    num_prompt_tokens: int


RankChoice = Callable[[Sequence[RankLink], Generate, bytes], RankLink]
"""Whose a sample of a prompt is, which is there where the engine is sent it."""


def least_loaded(ranks: Sequence[RankLink], sample: Generate, prompt: bytes = b"") -> RankLink:
    """Of equals the one that was given least so far."""
    return min(ranks, key=lambda rank: (rank.num_tokens_in_flight, rank.num_given))


class ByPrefix:
    """The least loaded rank, or the one that had a prompt with the same beginning last, and may hold it.

    That one while it has no more than a quarter above the mean and a prompt like this to do.
    """

    def __init__(self) -> None:
        self._prefixes: PrefixIndex[int] = PrefixIndex()

    def __call__(self, ranks: Sequence[RankLink], sample: Generate, prompt: bytes) -> RankLink:
        rank = least_loaded(ranks, sample)
        if len(ranks) == 1 or not prompt:
            return rank
        keys = block_keys(prompt)
        if (found := self._prefixes.find(keys)) is not None:
            mean = sum(each.num_tokens_in_flight for each in ranks) / len(ranks)
            if ranks[found].num_tokens_in_flight <= LOAD_BOUND * mean + sample.num_prompt_tokens:
                rank = ranks[found]
        self._prefixes.note(keys, rank.rank)
        return rank


def by_room(ranks: Sequence[RankLink], sample: Generate, prompt: bytes = b"") -> RankLink:
    """Where decode nodes look for the room; so ``PrefillPeers.address_for``."""
    return ranks[sample.room % len(ranks)]


class LinkState(StrEnum):
    """LOADING → SERVING → STOPPING → GONE; any state may go to GONE when the engine dies."""

    LOADING = "the engine is loading"
    SERVING = "serving"
    STOPPING = "the node is shutting down"
    GONE = "the engine has died"


class SampleGroup:
    """The samples of one HTTP request and the queue of their events."""

    def __init__(self, link: EngineLink, request_ids: Sequence[str]) -> None:
        self._link = link
        self.live = set(request_ids)
        self._events: asyncio.Queue[SampleEvent] = asyncio.Queue()
        self._num_waiting_tokens: Counter[str] = Counter()
        """``Tokens`` in the queue, by request id."""

    def put(self, event: SampleEvent) -> None:
        self._num_waiting_tokens[event.request_id] += isinstance(event, Tokens)
        self._events.put_nowait(event)

    async def next_event(self) -> SampleEvent:
        """The next event of any live sample.

        Waits as long as the engine makes progress: its own timeouts end requests. Raises NodeUnavailable when
        it makes none.
        """
        await asyncio.sleep(0)  # what has come already is not waited for, and others want their turn
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._link.health_timeout_secs):
                    event = await self._events.get()
                    self._num_waiting_tokens[event.request_id] -= isinstance(event, Tokens)
                    return event
            if (stall := self._link.stall()) is not None:
                raise NodeUnavailable(stall)

    def has_more_tokens(self, request_id: str) -> bool:
        """More output of the sample has come already."""
        return self._num_waiting_tokens[request_id] > 0

    def finish(self, request_id: str) -> None:
        """One sample is complete; no event of it follows. The engine is told unless it said so itself."""
        self._link.forget(self, request_id, has_finished=True)


class EngineLink:
    """Owner of the requests in flight, and of the links to the engines of all ranks."""

    def __init__(
        self,
        ipc_paths: Sequence[str],
        health_timeout_secs: float,
        on_stats: Callable[[int, EngineStats], None] = lambda rank, stats: None,
        on_connected: Callable[[], None] = lambda: None,
        startup_timeout_secs: float = 300.0,
        limits: QueueLimits = QueueLimits(sys.maxsize, sys.maxsize),
        choose_rank: RankChoice = least_loaded,
    ) -> None:
        """``ipc_paths``: one a rank. ``on_connected``: called once all engines are ready, and so connected.

        ``on_stats``: with the rank. ``startup_timeout_secs``: how long loading may stand still.
        """
        self.limits = limits
        self.health_timeout_secs = health_timeout_secs
        self._startup_timeout_secs = startup_timeout_secs
        self.state = LinkState.LOADING
        self.ranks = [RankLink(rank, path, self._handle) for rank, path in enumerate(ipc_paths)]
        self._on_stats = on_stats
        self._on_connected = on_connected
        self._choose_rank = choose_rank
        self._in_flight: dict[str, _InFlight] = {}
        self._num_prompt_tokens = self._num_unsent_aborts = 0

    def start(self) -> None:
        """Bind the sockets and start talking; needs a running event loop."""
        for rank in self.ranks:
            rank.start()

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self.ranks))

    @property
    def ready(self) -> EngineReady | None:
        """What the engines said, with the bounds that hold for all; None while one loads."""
        ready = [rank.ready for rank in self.ranks if rank.ready is not None]
        if len(ready) < len(self.ranks):
            return None
        return msgspec.structs.replace(
            ready[0],
            max_total_tokens_hisparse=min(of_rank.max_total_tokens_hisparse for of_rank in ready),
            max_total_tokens_dense=min(of_rank.max_total_tokens_dense for of_rank in ready),
        )

    @property
    def loading(self) -> EngineLoading | None:
        """How far the rank is that has most left; None once all are ready, and before they said anything."""
        loading = [rank.loading for rank in self.ranks if rank.loading is not None]
        return max(loading, key=lambda of_rank: of_rank.num_bytes - of_rank.num_done, default=None)

    @property
    def is_loading(self) -> bool:
        return self.state is LinkState.LOADING

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @contextlib.contextmanager
    def open(self, prompts: Sequence[GenerateGroup]) -> Iterator[SampleGroup]:
        """Send the samples of one HTTP request. On leaving, whatever has not ended is aborted.

        Raises NodeUnavailable unless the engine serves, and QueueFull.
        """
        self.require_serving()
        shares = [share for prompt in prompts for share in self._shares(prompt)]
        samples = [(rank, sample) for rank, share in shares for sample in share.samples]
        num_prompt_tokens = sum(share.samples[0].num_prompt_tokens for _, share in shares)
        try:
            self.require_place(len(samples), num_prompt_tokens)
        except ApiError:
            for rank, sample in samples:
                rank.num_tokens_in_flight -= sample.num_prompt_tokens
            raise
        group = SampleGroup(self, [sample.request_id for _, sample in samples])
        self._num_prompt_tokens += num_prompt_tokens
        try:
            for rank, sample in samples:
                num_tokens = sample.num_prompt_tokens
                self._in_flight[sample.request_id] = _InFlight(group, rank, num_tokens)
            for rank, share in shares:
                rank.put(share)
            yield group
        finally:
            for request_id in list(group.live):
                self.forget(group, request_id)
            for (
                rank,
                share,
            ) in shares:  # behind the last word about them: their prompts are no longer held here
                rank.put(None, partial(self._closed, share.samples[0].num_prompt_tokens))

    def _shares(self, prompt: GenerateGroup) -> list[tuple[RankLink, GenerateGroup]]:
        """What of the samples is whose, with the prompt for each rank that has one. Counts them there."""
        shares: dict[int, list[Generate]] = {}
        for sample in prompt.samples:
            rank = self._choose_rank(self.ranks, sample, prompt.prompt)
            rank.num_tokens_in_flight += sample.num_prompt_tokens
            rank.num_given += 1
            shares.setdefault(rank.rank, []).append(sample)
        return [
            (self.ranks[rank], msgspec.structs.replace(prompt, samples=tuple(samples)))
            for rank, samples in shares.items()
        ]

    def _closed(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens -= num_prompt_tokens

    def require_place(self, num_samples: int, num_prompt_tokens: int = 0) -> None:
        """Raises QueueFull when so much does not fit beside what is in flight, ApiError when it never does.

        A request whose client left is in flight until its abort, and so all of it, has gone to the engine.
        """
        for num, most, name in (
            (num_samples, self.limits.max_requests, "samples"),
            (num_prompt_tokens, self.limits.max_prompt_tokens, "prompt tokens"),
        ):
            if num > most:
                raise ApiError(400, f"{num} {name} are in this request, {most} fit in this node; split it")
        num_in_flight = len(self._in_flight) + self._num_unsent_aborts
        if num_in_flight + num_samples > self.limits.max_requests:
            raise QueueFull(
                f"{num_in_flight} requests run or wait here, and {num_samples} more would exceed "
                f"{self.limits.max_requests} (max_running_requests + max_queued_requests); try again later"
            )
        if self._num_prompt_tokens + num_prompt_tokens > self.limits.max_prompt_tokens:
            raise QueueFull(
                f"prompts of {self._num_prompt_tokens} tokens run or wait here, and {num_prompt_tokens} more "
                f"would exceed {self.limits.max_prompt_tokens} (max_queued_tokens); try again later"
            )

    def require_serving(self) -> EngineReady:
        """What the ready engine said. Raises NodeUnavailable."""
        ready = self.ready
        if ready is None or self.state is not LinkState.SERVING:
            raise NodeUnavailable(str(self.state))
        return ready

    def require_engine(self) -> EngineReady:
        """The same for requests in flight, which go on while the node shuts down. Raises NodeUnavailable."""
        ready = self.ready
        if ready is None or self.state is LinkState.GONE:
            raise NodeUnavailable(str(self.state))
        return ready

    def forget(self, group: SampleGroup, request_id: str, *, has_finished: bool = False) -> None:
        if request_id in group.live:
            self._abort(self._release(request_id).rank, Abort(request_id, has_finished))

    def flush_cache(self) -> None:
        self.require_serving()
        for rank in self.ranks:
            rank.put(FlushCache())

    def release_quarantine(self, instance_id: str) -> None:
        self.require_engine()
        for rank in self.ranks:
            rank.put(ReleaseQuarantine(instance_id))

    def stop_accepting(self) -> None:
        """New requests are refused; those in flight go on."""
        if self.state is not LinkState.GONE:
            self.state = LinkState.STOPPING

    async def shut_engines_down(self) -> None:
        """Ask the engines to exit, after everything that was sent before."""
        for rank in self.ranks:
            rank.put(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(rank.flush() for rank in self.ranks)), timeout=1.0)

    def engine_died(self) -> None:
        """One engine is enough: the others have not all experts."""
        self.state = LinkState.GONE
        self.fail_all(503, f"{LinkState.GONE}; the request is lost, send it again")

    def fail_all(self, status: int, error: str) -> None:
        """End every request in flight with an error."""
        for request_id, in_flight in list(self._in_flight.items()):
            self._dispatch(RequestFailed(request_id, status, error))
            self._abort(in_flight.rank, Abort(request_id))

    def trouble(self) -> str | None:
        """Why this node cannot serve, or None while the engine makes progress. Looks at no peer."""
        if self.is_loading:
            return self.stall() or (f"{self.state}: {self.loading}" if self.loading else str(self.state))
        if self.state is not LinkState.SERVING:
            return str(self.state)
        return self.stall() or next((of_rank for rank in self.ranks if (of_rank := _trouble(rank))), None)

    def stall(self) -> str | None:
        """Why an engine gets nowhere, or None while all make progress, loading included."""
        if self.state is LinkState.GONE:
            return str(self.state)
        for rank in self.ranks:
            stall = rank.stall(self._startup_timeout_secs, self.health_timeout_secs)
            if stall is not None:
                return stall if len(self.ranks) == 1 else f"rank {rank.rank}: {stall}"
        return None

    def _abort(self, rank: RankLink, abort: Abort) -> None:
        self._num_unsent_aborts += 1
        rank.put(abort, self._abort_sent)

    def _abort_sent(self) -> None:
        self._num_unsent_aborts -= 1

    def _handle(self, rank: RankLink, message: FromEngine) -> None:
        match message:
            case EngineLoading():
                rank.note(message)
            case EngineReady():
                rank.note(message)
                if self.ready is not None:
                    self._all_ready(self.ready)
            case EngineStats():
                rank.note(message)
                self._on_stats(rank.rank, message)
            case Tokens() | PrefillFinished() | RequestFailed():
                self._dispatch(message)
            case _:
                assert_never(message)

    def _all_ready(self, ready: EngineReady) -> None:
        if self.state is LinkState.LOADING:
            self.state = LinkState.SERVING
        self._on_connected()
        log.info("the engine is ready: context of %d tokens", ready.context_length)

    def _dispatch(self, event: SampleEvent) -> None:
        """Hand over, and drop the route with the last event. Events of aborted samples have no taker."""
        in_flight = self._in_flight.get(event.request_id)
        if in_flight is None:
            return
        if not isinstance(event, Tokens) or event.finish_reason is not None:
            self._release(event.request_id)
        in_flight.group.put(event)

    def _release(self, request_id: str) -> _InFlight:
        in_flight = self._in_flight.pop(request_id)
        in_flight.group.live.discard(request_id)
        in_flight.rank.num_tokens_in_flight -= in_flight.num_prompt_tokens
        return in_flight


def _trouble(rank: RankLink) -> str:
    return rank.stats.trouble if rank.stats is not None else ""
