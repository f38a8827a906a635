"""Flushes of the engines' caches: every rank is asked, and every rank has to answer in time."""

from __future__ import annotations

import asyncio

import pytest

from hisparse_pd.engine.messages import FlushCache, Flushed
from hisparse_pd.serving.http.http_errors import NodeUnavailable
from tests.unit.http.links import by_room, make_link, sent
from tests.waiting import until


@pytest.mark.anyio
async def test_a_flush_reaches_all_ranks_and_is_over_once_all_have_answered() -> None:
    link = make_link(by_room)
    flushing = asyncio.create_task(link.flush_cache())
    await until(lambda: link.ranks[2].outbox, "the ranks are told")
    (asked, *others), *rest = sent(link)
    assert isinstance(asked, FlushCache)
    assert (others, rest) == ([], [[asked]] * 2)
    for rank, request_id in ((0, asked.request_id), (1, asked.request_id), (1, asked.request_id), (2, "00")):
        link.handle(link.ranks[rank], Flushed(request_id))
    await asyncio.sleep(0)  # what has become ready goes on
    assert not flushing.done()
    link.handle(link.ranks[2], Flushed(asked.request_id))
    await flushing
    link.handle(link.ranks[0], Flushed(asked.request_id))


@pytest.mark.anyio
@pytest.mark.I7
async def test_a_rank_that_does_not_answer_a_flush_is_named() -> None:
    link = make_link(by_room)
    link.health_timeout_secs = 0.01
    flushing = asyncio.create_task(link.flush_cache())
    await until(lambda: link.ranks[2].outbox, "the ranks are told")
    with pytest.raises(NodeUnavailable, match=r"rank 0 has not emptied its cache within 0\.01 s"):
        await flushing
