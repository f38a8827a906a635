"""Owns the flushes that a front has asked its engines for: each waits until every rank has answered.

``EngineLink.flush_cache`` calls ``flush``, and hands each engine's ``Flushed`` to ``note``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from hisparse_pd.engine.messages import FlushCache, Flushed, request_prefix
from hisparse_pd.serving.http.http_errors import NodeUnavailable
from hisparse_pd.serving.http.rank_link import RankLink


class _Flush(NamedTuple):
    """A flush of all ranks."""

    waits_for: set[int]
    """Ranks that have not answered."""
    is_over: asyncio.Event


class CacheFlushes:
    """The flushes of one front that are under way. Their request ids begin with its ``front_number``."""

    def __init__(self, ranks: Sequence[RankLink], front_number: int) -> None:
        self._ranks = ranks
        self._front_number = front_number
        self._flushes: dict[str, _Flush] = {}
        """Flushes that wait for an engine, by request id."""

    async def flush(self, timeout_secs: float) -> None:
        """Have all engines drop the prefixes that no request uses, and wait until they have. Raises
        NodeUnavailable if one takes longer than ``timeout_secs``."""
        request_id = request_prefix(self._front_number)
        flush = self._flushes[request_id] = _Flush({rank.rank for rank in self._ranks}, asyncio.Event())
        for rank in self._ranks:
            rank.put(FlushCache(request_id))
        try:
            await asyncio.wait_for(flush.is_over.wait(), timeout_secs)
        except TimeoutError:
            late = f"rank {min(flush.waits_for)} has not emptied its cache"
            raise NodeUnavailable(f"{late} within {timeout_secs:g} s; see /health") from None
        finally:
            del self._flushes[request_id]

    def note(self, rank: RankLink, flushed: Flushed) -> None:
        """Note a rank's answer, unless nobody waits for it any more."""
        if (flush := self._flushes.get(flushed.request_id)) is not None:
            flush.waits_for.discard(rank.rank)
            if not flush.waits_for:
                flush.is_over.set()
