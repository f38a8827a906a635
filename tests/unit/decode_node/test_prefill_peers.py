"""What a decode node believes of bootstrap endpoints: forged answers neither connect it nor end a peer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from decode_node import discovery, prefill_peers
from decode_node.prefill_peers import InstanceGone, PeerLost, PeerReady, PeerRefused
from decode_node.request import PeerAddress
from protocol.access import PeerList
from protocol.bootstrap import (
    BootstrapInfo,
    BootstrapLookupError,
)
from protocol.channels import ControlAddressError, ControlKeys
from tests.unit.decode_node.peers_support import PrefillNode, make_peers, poll_until
from tests.unit.protocol.examples import GEOMETRY
from tests.waiting import wait_until

pytestmark = pytest.mark.I7


@pytest.fixture
def keys() -> ControlKeys:
    return ControlKeys.generate()


@pytest.fixture
def prefill(keys: ControlKeys) -> Iterator[PrefillNode]:
    with closing(PrefillNode(keys)) as node:
        yield node


def test_a_node_that_rotates_no_index_keys_is_left_alone(prefill: PrefillNode, keys: ControlKeys) -> None:
    """Of a release that knows no rotation, which therefore registers this node."""
    prefill.geometry = msgspec.structs.replace(GEOMETRY, index_rotation="")
    with closing(make_peers(keys)) as peers:
        (event,) = poll_until(peers, {prefill.address}, bool, prefill.answer)
        assert isinstance(event, PeerRefused)
        assert "has '', this node 'hadamard'; run the same release on both" in event.error
        assert peers.num_registered == 0


def test_a_forged_answer_connects_nothing_and_is_reported(prefill: PrefillNode, keys: ControlKeys) -> None:
    prefill.forges = True
    with closing(make_peers(keys)) as peers:
        (event,) = poll_until(peers, {prefill.address}, bool, prefill.answer)
        assert isinstance(event, PeerRefused)
        assert "control_key_file" in event.error
        assert peers.last_error(prefill.address) == event.error
        assert not list(prefill.controls[0].receive())


@pytest.mark.I1
@pytest.mark.parametrize("forges", [True, False])
def test_only_a_signed_answer_can_say_that_a_run_is_gone(
    prefill: PrefillNode, keys: ControlKeys, forges: bool
) -> None:
    """A run that is gone frees the slots that it may still write to, so nobody else may claim it."""
    with closing(make_peers(keys)) as peers:
        poll_until(peers, {prefill.address}, bool, prefill.answer)
        prefill.forges, prefill.told_run = forges, "second"
        asked_before = prefill.num_asked
        prefill.break_connections()  # so the decode node asks again

        is_told = lambda events: (prefill.num_asked >= asked_before + 2) if forges else events  # noqa: E731
        events = poll_until(peers, {prefill.address}, is_told, lambda: None)
        gone = [event for event in events if isinstance(event, InstanceGone | PeerLost)]
        assert bool(gone) == (not forges)


def test_a_peer_that_was_cut_off_is_registered_with_again_and_not_lost(
    prefill: PrefillNode, keys: ControlKeys
) -> None:
    with closing(make_peers(keys)) as peers:
        poll_until(peers, {prefill.address}, bool, prefill.answer)
        prefill.break_connections()
        events = poll_until(peers, {prefill.address}, lambda _: not peers.num_registered, prefill.answer)
        events += poll_until(peers, {prefill.address}, lambda _: peers.num_registered, prefill.answer)
        assert events == [PeerReady(prefill.address, "first-0")]


def test_a_peer_that_does_not_come_back_is_lost(
    prefill: PrefillNode, keys: ControlKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may be gone: no answer of its endpoint says what became of it."""
    monkeypatch.setattr(prefill_peers, "REGISTER_TIMEOUT_SECS", 0.2)
    with closing(make_peers(keys)) as peers:
        poll_until(peers, {prefill.address}, bool, prefill.answer)
        prefill.forges = True
        prefill.break_connections()
        (event,) = poll_until(peers, {prefill.address}, bool, lambda: None)
        assert isinstance(event, PeerLost)
        assert event.instance_id == "first-0"


def test_an_engine_that_answers_no_heartbeats_is_lost(prefill: PrefillNode, keys: ControlKeys) -> None:
    """It hangs, and ZMQ answers for it."""
    with closing(make_peers(keys, health_timeout_secs=0.5)) as peers:
        poll_until(peers, {prefill.address}, bool, prefill.answer)
        (event,) = poll_until(peers, {prefill.address}, bool, lambda: prefill.answer(heartbeats=False))
        assert isinstance(event, PeerLost)
        assert "has been silent for 0.5 s" in event.error


def test_a_pause_of_this_node_is_no_silence_of_its_peer(prefill: PrefillNode, keys: ControlKeys) -> None:
    """A step that took longer than the limit: nobody was asked, so nobody failed to answer."""
    with closing(make_peers(keys, health_timeout_secs=0.5)) as peers:
        poll_until(peers, {prefill.address}, bool, prefill.answer)
        for pause_secs in (100.0, 200.0):
            assert peers.poll(time.monotonic() + pause_secs, {prefill.address}) == []
        assert peers.may_entrust(prefill.address)


def test_a_node_without_the_key_is_told_so(prefill: PrefillNode) -> None:
    with closing(make_peers(None)) as peers:
        (event,) = poll_until(peers, {prefill.address}, bool, prefill.answer)
        assert isinstance(event, PeerRefused)
        assert "status 401" in event.error
        assert "control_key_file" in event.error


def test_an_address_outside_the_list_is_not_even_asked(prefill: PrefillNode, keys: ControlKeys) -> None:
    with closing(make_peers(keys, PeerList.parse(["10.0.0.0/8"]))) as peers:
        (event,) = poll_until(peers, {prefill.address}, bool, prefill.answer)
        assert isinstance(event, PeerRefused)
        assert "'127.0.0.1' is not in allowed_peers (10.0.0.0/8)" in event.error
        assert prefill.num_asked == 0


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


@pytest.mark.I8
def test_an_address_at_which_nobody_was_found_is_forgotten_with_its_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(*_: object) -> BootstrapInfo:
        raise BootstrapLookupError("no route")

    monkeypatch.setattr(discovery, "look_up", nobody)
    address = PeerAddress("nowhere", 1)
    with closing(make_peers(None)) as peers:
        now = time.monotonic()
        peers.use(address, now)
        wait_until(lambda: not peers.poll(now, {address}) and peers.last_error(address) == "no route")
        peers.poll(now + 1.0, {address})
        assert peers.last_error(address) == "no route", "somebody waits"
        wait_until(lambda: not peers.poll(now + 1.0, ()) and peers.last_error(address) == "no answer yet")
