"""Retries of one request, decided by ``Route`` without a network."""

from __future__ import annotations

import pytest

from hisparse_pd.router.errors import NodeFailed, NodeRefused, NodeUnreachable
from hisparse_pd.router.nodes import LEAVING, Node, NodeKind, NodePool
from hisparse_pd.router.route import Failure, Route

pytestmark = pytest.mark.anyio


@pytest.mark.I7
@pytest.mark.I8
async def test_retries_within_a_search_do_not_lift_the_limit() -> None:
    """A search may take more than ``max_retries`` retries; after it the request has none left."""
    prefill = Node.from_url(NodeKind.PREFILL, "http://p:1")
    decode = [Node.from_url(NodeKind.DECODE, f"http://d:{number}") for number in (1, 2)]
    pool = NodePool([prefill], decode, "round_robin")
    for node in pool.nodes:
        pool.mark_healthy(node)
        pool.report_load(node, [0])
    route = Route(pool, max_retries=1, resume_timeout_secs=60)
    pair = pool.pick()
    # The only prefill node is not avoided after a failed write, so the limit alone ends the retries.
    failed_write = NodeRefused(502, "the write failed", b"")
    route.leave_decode_node(NodeFailed(502, "gone"), pair.decode, is_leaving=False, num_records=0)
    for _ in range(2):
        route.retry(failed_write, Failure.TRANSFER_FAILED, pair)
    assert route.end_search() is not None
    with pytest.raises(NodeRefused, match="the write failed"):
        route.retry(failed_write, Failure.TRANSFER_FAILED, pair)
    assert route.num_retries == 2


@pytest.mark.I7
async def test_requests_of_a_node_that_leaves_may_move_although_another_one_did_not_reach_it() -> None:
    """They move when another node is healthy."""
    prefill = Node.from_url(NodeKind.PREFILL, "http://p:1")
    old, new = [Node.from_url(NodeKind.DECODE, f"http://d:{number}") for number in (1, 2)]
    pool = NodePool([prefill], [old, new], "round_robin")
    for node in (prefill, old):
        pool.mark_healthy(node)
    pair, moved = pool.pick(), list[str]()
    with pool.working(old, pair.room, lambda: moved.append("a stream")):
        pool.mark_unhealthy(old, LEAVING)
        unreachable = NodeUnreachable(502, "connection refused")
        with pytest.raises(NodeUnreachable):
            Route(pool, 1, 60.0).retry(unreachable, Failure.DECODE_UNREACHABLE, pair)
        pool.mark_healthy(new)
    assert moved == ["a stream"]


@pytest.mark.I7
@pytest.mark.I8
async def test_a_pair_may_fail_after_the_time_of_the_search_that_has_found_it() -> None:
    """It may compute for longer than a search may take. Then the request has the retries of any other."""
    prefill = [Node.from_url(NodeKind.PREFILL, f"http://p:{number}") for number in (1, 2, 3)]
    decode = [Node.from_url(NodeKind.DECODE, f"http://d:{number}") for number in (1, 2)]
    pool = NodePool(prefill, decode, "round_robin")
    for node in pool.nodes:
        pool.mark_healthy(node)
    route = Route(pool, max_retries=1, resume_timeout_secs=1e-9)
    route.leave_decode_node(NodeFailed(502, "gone"), decode[0], is_leaving=False, num_records=0)
    assert route.search is not None
    assert route.search.is_late
    failed = NodeRefused(502, "the prefill node is gone", b"")
    first, second = (pool.pick(route.avoided) for _ in range(2))
    route.retry(failed, Failure.PREFILL_FAILED, first)
    assert first.prefill in route.avoided
    assert pool.has_pair(route.avoided)
    with pytest.raises(NodeRefused, match="the prefill node is gone"):
        route.retry(failed, Failure.PREFILL_FAILED, second)
