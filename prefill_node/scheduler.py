"""Chooses the chunks of prompts that form the next forward.

``PromptSteps`` calls ``plan_step`` before each forward, with the requests that ``PrefillLife`` has computing
and waiting. ``plan_step`` keeps no state and changes none.

Prompts are served in order of arrival: requests that compute continue in order of admission, then waiting
ones are admitted in order of arrival while tokens, requests, pages and aux slots last. Admission reserves all
pages of the prompt or nothing. The first waiting request that does not fit holds back the later ones, so that
short prompts never starve a long one.

A forward of few tokens takes no more requests than a CUDA graph does: more forwards of that kind are faster
than one larger forward.

The order of arrival has two exceptions:

- A prompt that begins like an earlier one waits while that one is computed, and then finds the common pages
  in the prefix cache. Later requests go ahead of it.
- A long prompt that fills up a forward without ending in it leaves up to ``short_tokens`` of the forward's
  tokens to later prompts that end in it. Those that do not are passed by. Their pages count as taken, so that
  the requests behind them do not get these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.protocol.messages import Room

MAX_LOOKED_AT: Final = 128
"""Most waiting requests that are considered for one forward; each costs a look into the prefix cache."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one forward and of the pool behind it."""

    chunk_tokens: int
    """Most tokens of one forward, all requests together."""
    short_tokens: int
    """Most tokens of a forward that a long prompt, which does not end in it, leaves to later prompts that
    do."""
    max_requests: int
    """Most requests in one forward, and most that are in COMPUTING."""
    page_size: int
    num_pages: int
    """Pages in the whole pool."""
    graph_tokens: int = 0
    """Most tokens of a forward that fits a CUDA graph, and is fastest, if it has at most ``graph_requests``
    requests."""
    graph_requests: int = 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Running:
    """A request that owns pages for ``num_tokens`` positions, of which ``num_ready_tokens`` are computed."""

    room: Room
    num_tokens: int
    num_ready_tokens: int
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that owns nothing yet. ``num_tokens``: the positions of its prompt that are to be computed or
    taken from the cache. ``keys``: those of the pages that may come from the cache. ``num_cached_pages``: how
    many of the first pages are in it."""

    room: Room
    num_tokens: int
    keys: tuple[PageKey, ...]
    num_cached_pages: int
    num_unused_pages: int
    """Cached pages that no request uses; they count as available until this one uses them."""
    is_arriving: bool = False
    """Whether some of the cached pages are on their way to the device."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, stop)`` of a request. ``admits``: whether it is the request's first chunk, before
    which its pages are reserved."""

    room: Room
    start: int
    stop: int
    admits: bool


def why_never(num_tokens: int, limits: StepLimits) -> str | None:
    """Return why a prompt with so many tokens to compute can never be, or None if the empty pool would hold
    them."""
    num_pages = limits.pages_for(num_tokens)
    if num_pages <= limits.num_pages:
        return None
    return (
        f"the {num_tokens} tokens to compute need {num_pages} pages of {limits.page_size} token slots, "
        f"the KV pool has {limits.num_pages} ({limits.num_pages * limits.page_size} tokens); "
        "shorten the prompt or raise --kv-pool-tokens"
    )


def plan_step(
    running: Iterable[Running],
    waiting: Iterable[Waiting],
    limits: StepLimits,
    *,
    num_available_pages: int,
    num_aux_slots: int,
) -> tuple[Chunk, ...]:
    """Return the chunks of the next forward, at most one of each request; none when there is nothing to do.

    ``waiting`` is consumed only as far as requests are looked at. ``num_available_pages``: free pages, and
    cached ones that no request uses. A request that uses some of the latter lowers the number.
    """
    forward = _Forward(limits)
    leaders = _Leaders()
    num_running = 0
    for request in running:
        num_running += 1
        leaders.add(request.keys)
        forward.add(request.room, request.num_ready_tokens, request.num_tokens, admits=False)

    candidates = islice(waiting, MAX_LOOKED_AT)
    while not forward.is_full and num_running < limits.max_requests and num_aux_slots > 0:
        if (candidate := next(candidates, None)) is None:
            break
        if leaders.share_more(candidate.keys, candidate.num_cached_pages):
            # Later requests that share more pages with this one wait for it, too.
            leaders.add(candidate.keys)
            continue
        num_new_pages = limits.pages_for(candidate.num_tokens) - candidate.num_cached_pages
        num_pages = num_new_pages + candidate.num_unused_pages
        if num_pages > num_available_pages:
            break
        num_available_pages -= num_pages  # also if this forward has no tokens for the request
        start = candidate.num_cached_pages * limits.page_size
        if forward.add(candidate.room, start, candidate.num_tokens, admits=True):
            leaders.add(candidate.keys)
            num_running += 1
            num_aux_slots -= 1
    return tuple(forward.chunks)


class _Forward:
    """The chunks of one forward in the making."""

    def __init__(self, limits: StepLimits) -> None:
        self.chunks: list[Chunk] = []
        self._limits = limits
        self._left = limits.chunk_tokens
        """Tokens that no chunk has yet; behind a long prompt, those that it may still leave to others."""
        self._long: int | None = None
        """Index in ``chunks`` of the long prompt, the only one that does not end in this forward."""

    @property
    def is_full(self) -> bool:
        limits = self._limits
        # A long prompt fills the forward up, and what it gives up others take: the sum stays chunk_tokens.
        num_tokens = limits.chunk_tokens if self._long is not None else limits.chunk_tokens - self._left
        most_requests = limits.max_requests
        if 0 < num_tokens <= limits.graph_tokens:
            most_requests = min(most_requests, limits.graph_requests)
        return self._left <= 0 or len(self.chunks) >= most_requests

    def add(self, room: Room, start: int, end: int, *, admits: bool) -> bool:
        """Add a chunk of a request whose positions from ``start`` to ``end`` are to compute. Return False
        when it must wait for a later forward."""
        if self.is_full:
            return False
        if self._long is None:
            stop = min(end, start + self._left)
            self.chunks.append(Chunk(room, start, stop, admits))
            self._left -= stop - start
            if stop < end:
                self._long = len(self.chunks) - 1
                # The long prompt keeps one token at least.
                self._left = min(self._limits.short_tokens, stop - start - 1)
            return True
        if end - start > self._left:
            return False
        long = self.chunks[self._long]
        self.chunks[self._long] = replace(long, stop=long.stop - (end - start))
        self.chunks.append(Chunk(room, start, end, admits))
        self._left -= end - start
        return True


class _Leaders:
    """Prompts whose pages are about to be computed, found by their first page. Requests that share more pages
    with one of them than are cached wait for it."""

    def __init__(self) -> None:
        self._by_first_key: dict[PageKey, list[tuple[PageKey, ...]]] = {}

    def add(self, keys: tuple[PageKey, ...]) -> None:
        if keys:
            self._by_first_key.setdefault(keys[0], []).append(keys)

    def share_more(self, keys: tuple[PageKey, ...], num_pages: int) -> bool:
        """Return whether a leader's prompt begins with more than the first ``num_pages`` pages of
        ``keys``."""
        if num_pages >= len(keys):
            return False
        return any(
            len(other) > num_pages
            and other[num_pages] == keys[num_pages]
            and other[:num_pages] == keys[:num_pages]
            for other in self._by_first_key.get(keys[0], ())
        )
