"""Prefill nodes of several ranks: whose business a room is, found out and changed under way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing

import pytest

from decode_node import prefill_peers
from decode_node.live_requests import LiveRequests
from decode_node.prefill_peers import InstanceGone, PeerLost, PeerReady, PrefillPeers, RanksChanged
from decode_node.request import PeerAddress, RequestState
from hisparse_pd.paging.pools import Pools, SlotCounts
from protocol.bootstrap import BootstrapInfo, RankInfo
from protocol.channels import ControlServer
from protocol.messages import PROTOCOL_VERSION, Heartbeat, HeartbeatAck, Refused, Register, Registered
from tests.books import make_request
from tests.unit.decode_node.peers_support import make_peers, poll_until
from tests.unit.protocol.examples import GEOMETRY

HOST, PORT = "prefill", 8998


class RanksOfPrefill:
    """Control sockets of the ranks, and what the node's bootstrap endpoint says of them."""

    def __init__(self, stack: ExitStack, num_ranks: int, run: str, first_port: int = 0) -> None:
        self.run = run
        self.controls = [
            stack.enter_context(closing(ControlServer("127.0.0.1", 0 if rank else first_port)))
            for rank in range(num_ranks)
        ]
        self.registered: set[bytes] = set()

    def info(self) -> BootstrapInfo:
        ranks = tuple(
            RankInfo(f"{self.run}-{rank}", control.port) for rank, control in enumerate(self.controls)
        )
        first = ranks[0]
        return BootstrapInfo(
            PROTOCOL_VERSION,
            first.instance_id,
            "127.0.0.1",
            first.control_port,
            GEOMETRY,
            curve=False,
            ranks=ranks if len(ranks) > 1 else (),
        )

    def answer(self) -> None:
        for rank, control in enumerate(self.controls):
            instance_id = f"{self.run}-{rank}"
            for identity, message in control.receive():
                match message:
                    case Register():
                        self.registered.add(identity)
                        control.send(identity, Registered(PROTOCOL_VERSION, instance_id, GEOMETRY))
                    case Heartbeat(seq) if identity in self.registered:
                        control.send(identity, HeartbeatAck(seq, instance_id))
                    case Heartbeat():
                        control.send(identity, Refused("register first", permanent=False))


class Lookups:
    """In the place of Discovery: says at once what the node says now."""

    def __init__(self) -> None:
        self.node: RanksOfPrefill

    def turn(self) -> None:
        self.node.answer()

    def ask(self, address: PeerAddress) -> Future[BootstrapInfo]:
        assert address.node == (HOST, PORT)
        answer: Future[BootstrapInfo] = Future()
        answer.set_result(self.node.info())
        return answer

    def close(self) -> None:
        pass


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Lookups:
    found = Lookups()
    monkeypatch.setattr(prefill_peers, "Discovery", lambda *_: found)
    monkeypatch.setattr("decode_node.discovery.LOOKUP_RETRY_SECS", 0.0)
    return found


@pytest.fixture
def peers(lookups: Lookups) -> Iterator[PrefillPeers]:
    with closing(make_peers()) as made:
        yield made


def test_each_rank_is_a_peer_of_its_own_once_the_node_was_found(
    peers: PrefillPeers, lookups: Lookups
) -> None:
    with ExitStack() as stack:
        lookups.node = RanksOfPrefill(stack, 3, "run")
        first = peers.address_for(HOST, PORT, room=5)
        assert first == PeerAddress(HOST, PORT, 0), "nobody knows better yet"
        events = poll_until(peers, {first}, bool, lookups.turn)
        assert events[0] == RanksChanged((HOST, PORT)), "before anybody may be entrusted with a room"
        ranks = [PeerAddress(HOST, PORT, rank) for rank in range(3)]
        assert [peers.address_for(HOST, PORT, room) for room in (3, 4, 5)] == ranks
        poll_until(peers, set(ranks), lambda _: peers.num_registered == 3, lookups.turn)
        assert [peers.instance_id(address) for address in ranks] == ["run-0", "run-1", "run-2"]
        assert peers.address_for(HOST, PORT + 1, 5).rank == 0, "of another node"


def test_a_node_that_comes_back_with_fewer_ranks(peers: PrefillPeers, lookups: Lookups) -> None:
    with ExitStack() as stack:
        lookups.node = RanksOfPrefill(stack, 2, "before")
        ranks = [PeerAddress(HOST, PORT, rank) for rank in range(2)]
        poll_until(peers, set(ranks), lambda _: peers.num_registered == 2, lookups.turn)
        before, lookups.node = lookups.node, RanksOfPrefill(stack, 1, "after")
        for control in before.controls:
            control.close()
        events = poll_until(
            peers,
            set(ranks),
            lambda events: (
                {InstanceGone("before-0"), InstanceGone("before-1")} <= set(events)
                and PeerReady(ranks[0], "after-0") in events
            ),
            lookups.turn,
        )
        assert RanksChanged((HOST, PORT)) in events
        assert {event.instance_id for event in events if isinstance(event, PeerLost)} == {
            "before-0",
            "before-1",
        }
        assert peers.address_for(HOST, PORT, 1) == ranks[0]
        assert "1 ranks now" in peers.last_error(ranks[1])


def test_a_node_that_comes_back_with_more_ranks_behind_the_same_control_port(
    peers: PrefillPeers, lookups: Lookups
) -> None:
    """The socket connects again by itself, and the node may be another now."""
    with ExitStack() as stack:
        lookups.node = RanksOfPrefill(stack, 1, "before")
        ranks = [PeerAddress(HOST, PORT, rank) for rank in range(2)]
        poll_until(peers, {ranks[0]}, lambda _: peers.num_registered == 1, lookups.turn)
        (control,) = lookups.node.controls
        control.close()
        lookups.node = RanksOfPrefill(stack, 2, "after", control.port)
        events = poll_until(
            peers,
            {ranks[0]},
            lambda events: PeerReady(ranks[0], "after-0") in events,
            lookups.turn,
        )
        assert events.index(RanksChanged((HOST, PORT))) < events.index(PeerReady(ranks[0], "after-0"))
        assert InstanceGone("before-0") in events
        assert peers.address_for(HOST, PORT, 1) == ranks[1]


@pytest.mark.parametrize("state", [RequestState.CONNECTING, RequestState.WAITING])
def test_a_request_that_moves_to_another_rank_keeps_its_place_in_line(state: RequestState) -> None:
    totals = SlotCounts(host=64, device=64, index=128, lookup=128, aux=4, req_row=4)
    requests = LiveRequests(Pools(totals, 16), 60.0)
    ranks = [PeerAddress(HOST, PORT, rank) for rank in range(2)]
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
    assert {request.room for request in requests.expired(25.0)} == {1, 3}
