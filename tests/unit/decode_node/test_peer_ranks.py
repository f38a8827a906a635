"""Prefill nodes of several ranks: whose business a room is, found out and changed under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from decode_node.live_requests import LiveRequests
from decode_node.prefill_peers import InstanceGone, PeerLost, PeerReady, PrefillPeers, RanksChanged
from decode_node.request import PeerAddress, RequestState
from hisparse_pd.paging.pools import Pools, SlotCounts
from tests.books import make_request
from tests.unit.decode_node.peers_support import PrefillNode, make_peers, poll_until


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefillPeers]:
    monkeypatch.setattr("decode_node.discovery.LOOKUP_RETRY_SECS", 0.0)
    with closing(make_peers()) as made:
        yield made


def test_each_rank_is_a_peer_of_its_own_once_the_node_was_found(peers: PrefillPeers) -> None:
    with closing(PrefillNode(num_ranks=3)) as node:
        host, port = node.address.node
        assert peers.address_for(host, port, room=5) == node.address, "nobody knows better yet"
        events = poll_until(peers, {node.address}, bool, node.answer)
        assert events[0] == RanksChanged((host, port)), "before anybody may be entrusted with a room"
        assert [peers.address_for(host, port, room) for room in (3, 4, 5)] == node.ranks
        poll_until(peers, set(node.ranks), lambda _: peers.num_registered == 3, node.answer)
        assert [peers.instance_id(rank) for rank in node.ranks] == ["first-0", "first-1", "first-2"]
        assert peers.address_for(host, port + 1, 5).rank == 0, "of another node"


def test_a_node_that_comes_back_with_fewer_ranks(peers: PrefillPeers) -> None:
    with closing(PrefillNode(num_ranks=2)) as node:
        ranks = node.ranks[:2]
        poll_until(peers, set(ranks), lambda _: peers.num_registered == 2, node.answer)
        node.start("second")
        wanted = {InstanceGone("first-0"), InstanceGone("first-1"), PeerReady(ranks[0], "second-0")}
        events = poll_until(peers, set(ranks), wanted.issubset, node.answer)
        assert RanksChanged(node.address.node) in events
        lost = {event.instance_id for event in events if isinstance(event, PeerLost)}
        assert lost == {"first-0", "first-1"}
        assert peers.address_for(*node.address.node, 1) == ranks[0]
        assert "1 ranks now" in peers.last_error(ranks[1])


def test_a_node_that_comes_back_with_more_ranks_behind_the_same_control_port(peers: PrefillPeers) -> None:
    """The socket connects again by itself, and the node may be another now."""
    with closing(PrefillNode()) as node:
        poll_until(peers, {node.address}, lambda _: peers.num_registered == 1, node.answer)
        node.start("second", 2, first_port=node.controls[0].port)
        ready, changed = PeerReady(node.address, "second-0"), RanksChanged(node.address.node)
        events = poll_until(peers, {node.address}, lambda events: ready in events, node.answer)
        assert events.index(changed) < events.index(ready)
        assert InstanceGone("first-0") in events
        assert peers.address_for(*node.address.node, 1) == node.ranks[1]


@pytest.mark.parametrize("state", [RequestState.CONNECTING, RequestState.WAITING])
def test_a_request_that_moves_to_another_rank_keeps_its_place_in_line(state: RequestState) -> None:
    totals = SlotCounts(host=64, device=64, index=128, lookup=128, aux=4, req_row=4)
    requests = LiveRequests(Pools(totals, 16), 60.0)
    ranks = [PeerAddress("prefill", 8998, rank) for rank in range(2)]
    for number in range(6):
        peer = ranks[0] if number < 4 else ranks[1]
        requests.open(make_request(number, 20, 4, peer=peer, deadline=10.0))
    moved = [request for request in requests.all() if request.room in (1, 3)]
    for request in moved:
        if state is RequestState.WAITING:
            requests.queue(request, RequestState.WAITING, 100.0)
        requests.queue(request, RequestState.CONNECTING, 20.0, ranks[1])
    assert [request.room for request in requests.queued(RequestState.CONNECTING, ranks[1])] == [1, 3, 4, 5]
    assert [request.room for request in requests.queued(RequestState.CONNECTING, ranks[0])] == [0, 2]
    assert requests.queued_at(RequestState.WAITING) == []
    assert {request.room for request in requests.expired(15.0)} == {0, 2, 4, 5}
    assert {request.room for request in requests.expired(25.0)} == set(range(6))
