"""Which prompts' chunks form the next forward. Pure planning: owns nothing, changes nothing.

First come, first served: rooms that compute continue in order of admission, then waiting rooms are admitted
in order of arrival while tokens, requests, pages and aux slots last. Admission reserves all pages of the
prompt or nothing. The first waiting room that does not fit holds back those behind it, so that a long prompt
is never starved by short ones.

Two exceptions. A room whose prompt begins like that of an earlier room still computing waits for it, and then
finds the common pages in the prefix cache; the rooms behind it go ahead. And the long prompt that fills up a
forward without ending in it gives up to ``short_tokens`` of its tokens to rooms behind it that end in this
forward with them. A room that is passed by keeps its claim on pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.protocol.messages import Room

MAX_LOOKED_AT: Final = 128
"""Waiting rooms that are considered for one forward: each costs a look into the prefix cache."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one forward and of the pool behind it."""

    chunk_tokens: int
    """Tokens computed in one forward at most, all requests together."""
    short_tokens: int
    """Of these, what a prompt that does not end in the forward leaves at most to later ones that do."""
    max_requests: int
    """Requests in one forward, and rooms that compute, at most."""
    page_size: int
    num_pages: int
    """Pages in the whole pool."""

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Running:
    """A room that holds its pages for ``num_tokens`` positions; those from ``num_ready_tokens`` on are still
    to compute."""

    room: Room
    num_tokens: int
    num_ready_tokens: int
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A room that holds nothing, with ``num_tokens`` positions to compute, of which the first are cached.
    ``keys`` are those that may be cached."""

    room: Room
    num_tokens: int
    keys: tuple[PageKey, ...]
    num_cached_pages: int
    num_unused_pages: int
    """Those of them that no room uses: they count as available until this one does."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, stop)`` of a room. ``admits``: its first; pages are to be reserved."""

    room: Room
    start: int
    stop: int
    admits: bool


def why_never(num_tokens: int, limits: StepLimits) -> str | None:
    """Why so many tokens of a prompt can never be computed here, or None when the empty pool would hold
    them."""
    num_pages = limits.pages_for(num_tokens)
    if num_pages <= limits.num_pages:
        return None
    return (
        f"the {num_tokens} tokens to compute need {num_pages} pages of {limits.page_size} token slots, "
        f"the KV pool has {limits.num_pages} ({limits.num_pages * limits.page_size} tokens); "
        "shorten the prompt or raise kv_pool_tokens"
    )


def plan_step(
    running: Iterable[Running],
    waiting: Iterable[Waiting],
    limits: StepLimits,
    *,
    num_available_pages: int,
    num_aux_slots: int,
) -> tuple[Chunk, ...]:
    """The chunks of the next forward, no two of one room; empty when there is nothing to do.

    ``waiting`` is consumed only as far as rooms are looked at. ``num_available_pages``: free ones and those
    that the prefix cache would give up. A room that uses such pages takes them out of that number.
    """
    forward = _Forward(limits)
    leaders = _Leaders()
    num_running = 0
    for room in running:
        num_running += 1
        leaders.add(room.keys)
        forward.add(room.room, room.num_ready_tokens, room.num_tokens, admits=False)
    candidates = islice(waiting, MAX_LOOKED_AT)
    while not forward.is_full and num_running < limits.max_requests and num_aux_slots > 0:
        if (candidate := next(candidates, None)) is None:
            break
        if leaders.share_more(candidate.keys, candidate.num_cached_pages):
            # What is behind it in the queue and shares more with it waits as well.
            leaders.add(candidate.keys)
            continue
        num_new_pages = limits.pages_for(candidate.num_tokens) - candidate.num_cached_pages
        num_pages = num_new_pages + candidate.num_unused_pages
        if num_pages > num_available_pages:
            break
        num_available_pages -= num_pages
        start = candidate.num_cached_pages * limits.page_size
        if forward.add(candidate.room, start, candidate.num_tokens, admits=True):
            leaders.add(candidate.keys)
            num_running += 1
            num_aux_slots -= 1
    return tuple(forward.chunks)


class _Forward:
    """The chunks of one forward, and who gets its tokens."""

    def __init__(self, limits: StepLimits) -> None:
        self.chunks: list[Chunk] = []
        self._limits = limits
        self._left = limits.chunk_tokens
        """For those before the long prompt and for itself; then what it may still give away."""
        self._long: int | None = None
        """Place in ``chunks`` of the prompt that does not end in this forward; at most one does not."""

    @property
    def is_full(self) -> bool:
        return self._left <= 0 or len(self.chunks) >= self._limits.max_requests

    def add(self, room: Room, start: int, end: int, *, admits: bool) -> bool:
        """Take a room whose prompt is computed from ``start`` to ``end``, or leave it to a later forward."""
        if self.is_full:
            return False
        if self._long is None:
            stop = min(end, start + self._left)
            self.chunks.append(Chunk(room, start, stop, admits))
            self._left -= stop - start
            if stop < end:
                self._long = len(self.chunks) - 1
                self._left = min(self._limits.short_tokens, stop - start - 1)
            return True
        if end - start > self._left:
            return False
        giving = self.chunks[self._long]
        self.chunks[self._long] = replace(giving, stop=giving.stop - (end - start))
        self.chunks.append(Chunk(room, start, end, admits))
        self._left -= end - start
        return True


class _Leaders:
    """Prompts whose pages are about to be computed, found by their first page."""

    def __init__(self) -> None:
        self._by_first_key: dict[PageKey, list[tuple[PageKey, ...]]] = {}

    def add(self, keys: tuple[PageKey, ...]) -> None:
        if keys:
            self._by_first_key.setdefault(keys[0], []).append(keys)

    def share_more(self, keys: tuple[PageKey, ...], num_pages: int) -> bool:
        """Whether a leader's prompt begins with more than the first ``num_pages`` pages of ``keys``."""
        if num_pages >= len(keys):
            return False
        return any(
            len(other) > num_pages
            and other[num_pages] == keys[num_pages]
            and other[:num_pages] == keys[:num_pages]
            for other in self._by_first_key.get(keys[0], ())
        )
