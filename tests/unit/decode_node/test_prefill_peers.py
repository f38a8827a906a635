"""What a decode node believes bootstrap endpoints and their ranks, and when a peer is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq

from hisparse_pd.base.access import PeerList
from hisparse_pd.decode_node import discovery, prefill_peers
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.peer_events import InstanceGone, PeerLost, PeerReady, PeerRefused, RanksChanged
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.protocol.bootstrap import BootstrapInfo, BootstrapLookupError, look_up
from hisparse_pd.protocol.channels import ControlAddressError, ControlKeys
from hisparse_pd.protocol.messages import HeartbeatAck
from tests.unit.decode_node.peers_support import PrefillNode, make_peers, poll_until
from tests.unit.protocol.examples import GEOMETRY
from tests.waiting import NEVER_SECS, WAIT_SECS, wait_until

pytestmark = pytest.mark.I7


@pytest.fixture
def keys() -> ControlKeys:
    return ControlKeys.generate()


@pytest.fixture(autouse=True)
def peers_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up no peer because this process, or the peer's, did not run for seconds."""
    monkeypatch.setattr(prefill_peers, "REGISTER_TIMEOUT_SECS", NEVER_SECS)


@pytest.fixture
def prefill(keys: ControlKeys) -> Iterator[PrefillNode]:
    with closing(PrefillNode(keys)) as node:
        yield node


@pytest.fixture
def peers(prefill: PrefillNode, keys: ControlKeys) -> Iterator[PrefillPeers]:
    """Peers of a node that is registered with ``prefill``."""
    with closing(make_peers(keys)) as peers:
        poll_until(peers, {prefill.address}, bool, prefill.answer)
        yield peers


@pytest.mark.parametrize(
    ("of_prefill", "of_peers", "said"),
    [
        ({"forges": True}, {}, "--control-key-file"),
        ({}, {"keys": None}, "status 401"),
        ({}, {"keys": None}, "--control-key-file"),
        (
            {"forges": True},
            {"keys": None},
            "is encrypted, this node's plain; set the same --control-key-file",
        ),
        (
            {},
            {"allowed": PeerList.parse(["10.0.0.0/8"])},
            "'127.0.0.1' is not in --allowed-peers (10.0.0.0/8)",
        ),
        (  # A release without rotations, which therefore registers this node.
            {"geometry": msgspec.structs.replace(GEOMETRY, index_rotation="")},
            {},
            "has '', this node 'hadamard'; run the same release on both",
        ),
    ],
)
def test_who_is_refused_is_left_alone_and_the_reason_is_told(
    prefill: PrefillNode,
    keys: ControlKeys,
    of_prefill: dict[str, Any],
    of_peers: dict[str, Any],
    said: str,
) -> None:
    for name, value in of_prefill.items():
        setattr(prefill, name, value)
    with closing(make_peers(**{"keys": keys, **of_peers})) as peers:
        (event,) = poll_until(peers, {prefill.address}, bool, prefill.answer)
        assert isinstance(event, PeerRefused)
        assert said in event.error
        assert peers.last_error(prefill.address) == event.error
        assert peers.num_registered == 0
        assert (prefill.num_asked == 0) is ("allowed" in of_peers), "who is not allowed is not even asked"


@pytest.mark.I1
@pytest.mark.parametrize("forges", [True, False])
def test_only_a_signed_answer_can_say_that_a_run_is_gone(
    prefill: PrefillNode, peers: PrefillPeers, forges: bool
) -> None:
    """A run that is gone frees the slots that it may still write to, so nobody else may claim it."""
    prefill.forges, prefill.told_run = forges, "second"
    asked_before = prefill.num_asked
    prefill.break_connections()  # so the decode node asks again

    is_told = lambda events: (prefill.num_asked >= asked_before + 2) if forges else events  # noqa: E731
    events = poll_until(peers, {prefill.address}, is_told, lambda: None)
    gone = [event for event in events if isinstance(event, InstanceGone | PeerLost)]
    assert bool(gone) == (not forges)


def test_a_peer_that_was_cut_off_is_registered_with_again_and_not_lost(
    prefill: PrefillNode, peers: PrefillPeers
) -> None:
    prefill.break_connections()
    events = poll_until(peers, {prefill.address}, lambda _: not peers.num_registered, prefill.answer)
    events += poll_until(peers, {prefill.address}, lambda _: peers.num_registered, prefill.answer)
    assert set(events) == {PeerReady(prefill.address, "first-0")}  # again for a Register that was repeated


def test_a_peer_that_has_said_nothing_opens_no_memory(keys: ControlKeys, prefill: PrefillNode) -> None:
    """Nor soon after the machine has booted, when the clock begins."""
    prefill.refusal = HeartbeatAck(0, "first-0")
    with closing(make_peers(keys)) as peers:
        poll_until(
            peers,
            {prefill.address},
            lambda _: "no answer to the registration" in peers.last_error(prefill.address),
            lambda: None,
        )
        assert not peers.is_opening(prefill.address, 0.0)
        poll_until(
            peers,
            {prefill.address},
            lambda _: peers.is_opening(prefill.address, time.monotonic()),
            prefill.answer,
        )


def test_a_peer_that_does_not_come_back_is_lost(
    prefill: PrefillNode, peers: PrefillPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may be gone: no valid answer of its endpoint says what became of it."""
    monkeypatch.setattr(prefill_peers, "REGISTER_TIMEOUT_SECS", 0.2)
    prefill.forges = True
    prefill.break_connections()
    (event,) = poll_until(peers, {prefill.address}, bool, lambda: None)
    assert isinstance(event, PeerLost)
    assert event.instance_id == "first-0"


def test_an_engine_that_answers_no_heartbeats_is_lost(prefill: PrefillNode, peers: PrefillPeers) -> None:
    """The engine hangs while ZMQ keeps its connection alive."""
    peers.health_timeout_secs = 0.5
    (event,) = poll_until(peers, {prefill.address}, bool, lambda: prefill.answer(heartbeats=False))
    assert isinstance(event, PeerLost)
    assert "has been silent for 0.5 s" in event.error


def test_a_pause_of_this_node_is_no_silence_of_its_peer(prefill: PrefillNode, peers: PrefillPeers) -> None:
    """During a step that takes longer than the limit no peer is asked, so none failed to answer."""
    peers.health_timeout_secs = 0.5
    for pause_secs in (100.0, 200.0):
        assert peers.poll(time.monotonic() + pause_secs, {prefill.address}) == []
    assert peers.is_registered(prefill.address)


def test_a_control_address_that_zmq_refuses_ends_no_loop(
    prefill: PrefillNode, keys: ControlKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(endpoint: str, *_: object) -> None:
        raise ControlAddressError(f"cannot connect to {endpoint!r}")

    with closing(make_peers(keys)) as peers:
        with monkeypatch.context() as patch:
            patch.setattr(prefill_peers, "ControlClient", refuses)
            (event,) = poll_until(peers, {prefill.address}, bool, prefill.answer)
            assert isinstance(event, PeerRefused)
            assert "cannot connect" in event.error
        ready = PeerReady(prefill.address, "first-0")
        poll_until(peers, {prefill.address}, lambda events: ready in events, prefill.answer)


def poll_until_error(peers: PrefillPeers, prefill: PrefillNode, words: str) -> None:
    """Poll, without any event, until the peer's last error has these words."""
    wait_until(
        lambda: (
            not peers.poll(time.monotonic(), {prefill.address}) and words in peers.last_error(prefill.address)
        )
    )


@pytest.mark.parametrize("num_sockets", [1, 2])
def test_a_connection_for_which_no_socket_is_left_ends_no_loop(
    prefill: PrefillNode, keys: ControlKeys, monkeypatch: pytest.MonkeyPatch, num_sockets: int
) -> None:
    """It takes three with that which reports its losses. The peer is found once there are some again."""
    with closing(make_peers(keys)) as peers, zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, num_sockets)
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "instance", lambda: context)
            peers.use(prefill.address, time.monotonic())
            poll_until_error(peers, prefill, "no socket is left")
        ready = PeerReady(prefill.address, "first-0")
        poll_until(peers, {prefill.address}, lambda events: ready in events, prefill.answer)


def test_a_look_up_that_fails_in_a_way_of_its_own_ends_no_loop(
    prefill: PrefillNode, keys: ControlKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> BootstrapInfo:
        raise RuntimeError("can't start new thread")

    with closing(make_peers(keys)) as peers:
        peers.use(prefill.address, time.monotonic())
        with monkeypatch.context() as patch:
            patch.setattr(discovery, "look_up", fails)
            poll_until_error(peers, prefill, "can't start new thread")
        ready = PeerReady(prefill.address, "first-0")
        poll_until(peers, {prefill.address}, lambda events: ready in events, prefill.answer)


def test_a_look_up_for_which_no_thread_starts_ends_no_loop(
    prefill: PrefillNode, keys: ControlKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with closing(make_peers(keys)) as peers:
        peers.use(prefill.address, time.monotonic())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            poll_until_error(peers, prefill, "can't start new thread")
        ready = PeerReady(prefill.address, "first-0")
        poll_until(peers, {prefill.address}, lambda events: ready in events, prefill.answer)


@pytest.mark.I8
def test_a_node_that_has_closed_an_idle_connection_says_that_it_is_the_same_run(
    prefill: PrefillNode, peers: PrefillPeers
) -> None:
    peers.poll(time.monotonic() + prefill_peers.IDLE_CLOSE_SECS, ())
    assert peers.num_registered == 0
    poll_until(peers, {prefill.address}, lambda _: peers.num_registered, prefill.answer)
    first, second = prefill.registered.values()
    assert first.node_id != second.node_id
    assert first.instance_id == second.instance_id != ""


@pytest.mark.I8
def test_an_address_at_which_nobody_was_found_is_forgotten_with_its_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(*_: object) -> BootstrapInfo:
        raise BootstrapLookupError("no route")

    monkeypatch.setattr(discovery, "look_up", nobody)
    address = PeerAddress("nowhere", 1)
    with closing(make_peers()) as peers:
        now = time.monotonic()
        peers.use(address, now)
        wait_until(lambda: not peers.poll(now, {address}) and peers.last_error(address) == "no route")
        peers.poll(now + 1.0, {address})
        assert peers.last_error(address) == "no route", "somebody waits"
        wait_until(lambda: not peers.poll(now + 1.0, ()) and peers.last_error(address) == "no answer yet")


@pytest.mark.I8
def test_look_ups_that_nobody_needs_any_more_keep_no_thread_from_others(
    prefill: PrefillNode, keys: ControlKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that drops packets takes a thread for seconds. Of those that are not begun when their requests
    have ended, none is asked."""
    is_over, asked = threading.Event(), list[str]()

    def slow(host: str, *given: Any) -> BootstrapInfo:
        asked.append(host)
        if host == prefill.address.host:
            return look_up(host, *given)
        assert is_over.wait(WAIT_SECS)
        raise BootstrapLookupError("no answer")

    monkeypatch.setattr(discovery, "look_up", slow)
    monkeypatch.setattr(discovery, "MAX_THREADS", 1)
    with closing(make_peers(keys)) as peers:
        nowhere = [PeerAddress(f"nowhere-{number}", 1) for number in range(8)]
        now = time.monotonic()
        for address in (*nowhere, prefill.address):
            peers.use(address, now)
            peers.poll(now, {address})
        wait_until(lambda: asked == ["nowhere-0"])
        peers.poll(now + discovery.LOOKUP_RETRY_SECS, {prefill.address})
        is_over.set()
        ready = PeerReady(prefill.address, "first-0")
        poll_until(peers, {prefill.address}, lambda events: ready in events, prefill.answer)
        assert asked[:2] == ["nowhere-0", prefill.address.host]


# --- nodes of several ranks ---------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefillPeers]:
    """Peers of a node that asks endpoints again at once, and knows none yet."""
    monkeypatch.setattr(discovery, "LOOKUP_RETRY_SECS", 0.0)
    with closing(make_peers()) as peers:
        yield peers


def test_each_rank_is_a_peer_of_its_own_once_the_node_was_found(impatient: PrefillPeers) -> None:
    peers = impatient
    with closing(PrefillNode(num_ranks=3)) as node:
        host, port = node.address.node
        assert peers.address_for(host, port, room=5) == node.address, "nobody knows better yet"
        events = poll_until(peers, {node.address}, bool, node.answer)
        assert events[0] == RanksChanged((host, port)), "before anybody may be entrusted with a room"
        assert [peers.address_for(host, port, room) for room in (3, 4, 5)] == node.ranks
        poll_until(peers, set(node.ranks), lambda _: peers.num_registered == 3, node.answer)
        assert [peers.instance_id(rank) for rank in node.ranks] == ["first-0", "first-1", "first-2"]
        assert peers.address_for(host, port + 1, 5).rank == 0, "of another node"


def test_a_node_that_comes_back_with_fewer_ranks(impatient: PrefillPeers) -> None:
    peers = impatient
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


def test_a_node_that_comes_back_with_more_ranks_behind_the_same_control_port(impatient: PrefillPeers) -> None:
    """The socket connects again by itself, but the run behind it may be another."""
    peers = impatient
    with closing(PrefillNode()) as node:
        poll_until(peers, {node.address}, lambda _: peers.num_registered == 1, node.answer)
        node.start("second", 2, first_port=node.controls[0].port)
        ready, changed = PeerReady(node.address, "second-0"), RanksChanged(node.address.node)
        events = poll_until(peers, {node.address}, lambda events: ready in events, node.answer)
        assert events.index(changed) < events.index(ready)
        assert InstanceGone("first-0") in events
        assert peers.address_for(*node.address.node, 1) == node.ranks[1]
