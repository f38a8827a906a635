"""Prefill nodes that fail, fall silent, restart, refuse or vanish, and rooms that time out: I1, I2, I7."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, HisparseFlag
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.decode_node import prefill_peers
from hisparse_pd.decode_node.peer_events import RoomMessage
from hisparse_pd.engine.messages import ReleaseQuarantine
from hisparse_pd.protocol.messages import HeartbeatAck, RegistrationRefused, Room, RoomFailed, RoomQuiet
from tests.unit.decode_node.failures_support import (
    FAILING,
    PROMPT,
    QUARANTINE_SECS,
    aborted_room,
    check_serves,
    end_quarantine,
    num_quarantined_slots,
    silence_is_noticed,
)
from tests.unit.decode_node.support import Checkpoint, EngineHarness, PrefillDouble, landing_slots
from tests.waiting import NEVER_SECS

NODE = FAILING


@pytest.fixture
def node(failing_node: EngineHarness) -> EngineHarness:
    return failing_node


@pytest.fixture
def double(node: EngineHarness) -> PrefillDouble:
    return node.double


# --- I1 -------------------------------------------------------------------------------------------


@pytest.mark.I1
def test_slots_of_an_aborted_room_wait_until_the_room_is_quiet(
    node: EngineHarness, double: PrefillDouble
) -> None:
    double.answers_aborts = False
    aborted = node.entrust(PROMPT, 8)
    slots = landing_slots(double.bootstraps[0])
    node.leave(aborted)
    waiting = node.generate(PROMPT, 8, HisparseFlag.TRUE)
    node.turn_until(lambda: double.aborts)
    node.turn_for(0.5)
    assert num_quarantined_slots(node) >= len(slots)
    assert len(double.bootstraps) == 1, "the second request fits only where the first one's KV may still land"
    double.write(double.bootstraps[0])  # The late write harms no request.
    double.delivers = True
    double.say(RoomQuiet(double.bootstraps[0].room, batch_failed=False))
    node.tokens_of(waiting)
    assert landing_slots(double.bootstraps[1]) & slots
    assert not aborted.is_over, "an aborted request gets no answer"


def test_a_delivery_that_crosses_the_abort_makes_the_room_quiet(
    node: EngineHarness, double: PrefillDouble
) -> None:
    aborted_room(node)
    assert num_quarantined_slots(node) > 0
    double.deliver(double.bootstraps[0])
    node.turn_until(lambda: num_quarantined_slots(node) == 0)


def _room_message(
    double: PrefillDouble, node: EngineHarness, message: RoomFailed | RoomQuiet, run: str | None = None
) -> None:
    """Give the node a message about a room. ``run``: the prefill node's, its present one by default."""
    event = RoomMessage(double.address, run or double.instance_id, message)
    node.engine.prefill_events.handle(event, time.monotonic())


@pytest.mark.I1
@pytest.mark.parametrize("is_aborted", [False, True])
@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize("batch_failed", [False, True])
def test_slots_of_a_failed_room_are_free_when_nothing_can_land_any_more(
    node: EngineHarness, double: PrefillDouble, is_aborted: bool, is_quiet: bool, batch_failed: bool
) -> None:
    double.answers_aborts = False
    answer = node.entrust(PROMPT, 8)
    room, quarantine = Room(double.bootstraps[0].room), node.engine.requests.quarantine
    if is_aborted:
        node.leave(answer)
        node.turn_until(lambda: room in quarantine)
    _room_message(double, node, RoomFailed(room, 502, "the write failed", is_quiet, batch_failed))
    assert node.engine.requests.get(room) is None
    entry = quarantine.get(room)
    if is_quiet and not batch_failed:
        assert entry is None
        return
    assert entry is not None
    assert (entry.is_unacknowledged, entry.batch_failed) == (not is_quiet, batch_failed)
    _room_message(double, node, RoomQuiet(room, batch_failed=False))
    assert (room in quarantine) is batch_failed
    end_quarantine(node)
    assert room not in quarantine


@pytest.mark.I1
def test_only_the_rooms_own_peer_can_call_it_quiet(
    node: EngineHarness, double: PrefillDouble, checkpoint: Checkpoint
) -> None:
    entry = aborted_room(node)
    room, quarantine = entry.room, node.engine.requests.quarantine
    with closing(PrefillDouble(checkpoint)) as stranger:
        _room_message(stranger, node, RoomQuiet(room, batch_failed=False))
    _room_message(double, node, RoomQuiet(room, batch_failed=False), "the run after, which never heard of it")
    assert quarantine.get(room) is entry
    assert entry.is_unacknowledged
    _room_message(double, node, RoomQuiet(room, batch_failed=False))
    assert room not in quarantine


@pytest.mark.I1
@pytest.mark.parametrize("is_failure", [False, True])
def test_an_answer_that_is_said_twice_says_nothing_of_the_rooms_next_request(
    node: EngineHarness, double: PrefillDouble, is_failure: bool
) -> None:
    """As that to an abort that was sent again for a room of which the prefill node never heard."""

    def answer(attempt: int) -> RoomFailed | RoomQuiet:
        if is_failure:
            return RoomFailed(room, 429, "full", quiet=True, batch_failed=False, attempt=attempt)
        return RoomQuiet(room, batch_failed=False, attempt=attempt)

    quarantine = node.engine.requests.quarantine
    entry = aborted_room(node)
    room, first = Room(entry.room), double.bootstraps[0].attempt
    assert [abort.attempt for abort in double.aborts] == [first]
    _room_message(double, node, answer(first))
    assert room not in quarantine
    second = node.generate(PROMPT, 8, HisparseFlag.TRUE, room=room)
    node.turn_until(lambda: len(double.bootstraps) == 2)
    live = node.engine.requests.get(room)
    _room_message(double, node, answer(first))
    assert node.engine.requests.get(room) is live, "nothing failed of the second request"
    node.leave(second)
    node.turn_until(lambda: room in quarantine)
    _room_message(double, node, answer(first))
    assert room in quarantine, "writes of the second may be in flight"
    _room_message(double, node, answer(double.bootstraps[1].attempt))
    assert room not in quarantine


# --- timeouts, loss, return -----------------------------------------------------------------------


@pytest.mark.I1
@pytest.mark.I7
def test_a_room_that_is_not_delivered_in_time_ends_with_504(
    node: EngineHarness, double: PrefillDouble
) -> None:
    double.answers_aborts = False
    late = node.entrust(PROMPT, 8)
    node.engine.queue_moves.expire(time.monotonic() + NEVER_SECS)
    node.failure_of(late, status=504, error=double.name)
    assert late.phases == ["queue", "landing"]
    node.turn_until(lambda: double.aborts)
    assert num_quarantined_slots(node) > 0
    double.say(RoomQuiet(double.bootstraps[0].room, batch_failed=False))
    node.turn_until(lambda: num_quarantined_slots(node) == 0)


@pytest.mark.I1
@pytest.mark.I7
def test_a_silent_peer_is_lost_and_found_again(node: EngineHarness, double: PrefillDouble) -> None:
    """Its rooms fail, their slots wait; once it answers again the abort is repeated and frees them."""
    lost = node.entrust(PROMPT, 8)
    double.is_hung = double.is_stopped = True
    with silence_is_noticed(node):
        node.failure_of(lost, status=502, error=double.name)
    end_quarantine(node)
    assert num_quarantined_slots(node) > 0, "the run of the peer is not gone, so its writes may still land"
    double.is_hung = double.is_stopped = False
    node.turn_until(lambda: double.aborts)
    node.turn_until(lambda: num_quarantined_slots(node) == 0)
    assert double.num_registrations >= 2
    check_serves(node)


def test_an_engine_goes_on_reporting_when_its_only_peer_is_gone(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A front takes an engine without statistics for a hung one, and /health says so."""
    with closing(EngineHarness(checkpoint, tmp_path)) as node:
        answer = node.entrust(PROMPT, 8)
        node.double.close()
        node.failure_of(answer, status=502)
        waiting = node.generate(PROMPT, 8, HisparseFlag.TRUE)
        node.turn_until(lambda: len(node.engine.requests))
        for _ in range(2):
            node.stats = None
            node.turn_until(lambda: node.stats is not None)
            assert node.stats is not None
            assert node.stats.gauges["num_registered_peers"] == 0
        assert not waiting.is_over, "somebody looks for the peer all the time"


@pytest.mark.I1
def test_a_restarted_peer_is_registered_with_again(node: EngineHarness, double: PrefillDouble) -> None:
    lost = node.entrust(PROMPT, 8)
    double.start("another run of the same node")
    node.failure_of(lost, status=502, error="restarted")
    assert num_quarantined_slots(node) > 0, "bytes of the old run may still sit in the transport"
    end_quarantine(node)
    assert num_quarantined_slots(node) == 0
    check_serves(node)


@pytest.mark.I7
def test_running_requests_outlive_their_peer(node: EngineHarness, double: PrefillDouble) -> None:
    answer = node.generate(PROMPT, 20, HisparseFlag.TRUE)
    node.turn_until(lambda: answer.token_ids)
    double.close()
    assert len(node.tokens_of(answer)) == 20


@pytest.mark.I7
def test_a_peer_that_forgot_us_gets_registration_and_bootstrap_again(
    node: EngineHarness, double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_peers, "REGISTER_REPEAT_SECS", NEVER_SECS)
    answer = node.entrust(PROMPT, 8)
    double.registered.clear()
    double.delivers = True
    node.tokens_of(answer)
    assert len(double.bootstraps) == 2


@pytest.mark.I7
def test_a_peer_that_is_not_there_fails_in_time(node: EngineHarness, double: PrefillDouble) -> None:
    node.engine.queue_moves.contact_timeout_secs = 0.7
    double.close_http()
    answer = node.generate(PROMPT, 8)
    failure = node.failure_of(answer, status=503, error=double.name)
    assert failure.code == PREFILL_NODE_FAILED


@pytest.mark.I7
def test_a_peer_that_opens_the_memory_yet_is_waited_for(
    node: EngineHarness, double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for contact passes again and again while the peer says that it is there."""
    monkeypatch.setattr(prefill_peers, "REGISTER_TIMEOUT_SECS", NEVER_SECS)
    queue, peers, now = node.engine.queue_moves, node.engine.peers, time.monotonic()
    queue.contact_timeout_secs = 100.0
    double.refusal = HeartbeatAck(0, double.instance_id)
    answer = node.generate(PROMPT, 8)
    node.turn_until(lambda: peers.is_opening(double.address, now))
    for _ in range(4):
        now += 2 * queue.contact_timeout_secs
        queue.expire(now)
    double.refusal = None
    node.tokens_of(answer)


@pytest.mark.parametrize("status", [400, 429, 500, 502, 503, 504])
def test_an_error_of_the_prefill_node_is_passed_on_as_one(
    node: EngineHarness, double: PrefillDouble, status: int
) -> None:
    failed = node.entrust(PROMPT, 8)
    double.say(RoomFailed(double.bootstraps[0].room, status, "no", quiet=True, batch_failed=False))
    failure = node.failure_of(failed, status=status)
    assert failure.code == ("" if status in (400, 504) else PREFILL_NODE_FAILED)


def test_a_refusal_reaches_the_client_once(node: EngineHarness, double: PrefillDouble) -> None:
    double.refusal = RegistrationRefused(
        "model_fingerprint: the decode node has 'a', this node 'b'", permanent=True
    )
    answer = node.generate(PROMPT, 8)
    node.failure_of(answer, status=502, error="model_fingerprint")
    double.refusal = None
    check_serves(node)


def test_a_peer_without_work_is_closed_and_found_again(
    node: EngineHarness, double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_peers, "REGISTER_REPEAT_SECS", NEVER_SECS)
    check_serves(node)
    with monkeypatch.context() as patch:
        patch.setattr(prefill_peers, "IDLE_CLOSE_SECS", 0.2)
        node.turn_until(lambda: node.engine.peers.num_registered == 0)
    check_serves(node)
    assert double.num_registrations == 2


# --- prefill nodes that vanish --------------------------------------------------------------------


def _vanish(node: EngineHarness, double: PrefillDouble, num_rooms: int) -> None:
    """Entrust a batch of rooms to a node whose machine is then gone without a trace."""
    double.delivers = False
    lost = [node.generate(PROMPT[:10], 4, HisparseFlag.TRUE, double=double) for _ in range(num_rooms)]
    node.turn_until(lambda: len(double.bootstraps) == num_rooms, double)
    double.is_hung = True
    with silence_is_noticed(node):
        node.turn_until(lambda: all(answer.failure for answer in lost))


@pytest.mark.I1
def test_prefill_nodes_that_vanish_with_full_batches_stop_nobody_and_can_be_declared_dead(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_rooms = 64
    harness = EngineHarness(
        checkpoint,
        tmp_path,
        max_running_requests=num_rooms,
        host_pool_tokens=3 * num_rooms * 64,
        quarantine_secs=0.4,
    )
    one, two = (PrefillDouble(checkpoint) for _ in range(2))
    with closing(harness) as node, closing(one), closing(two):
        for double in (one, two):
            _vanish(node, double, num_rooms)
        check_serves(node)
        node.turn_until(lambda: node.stats and node.stats.gauges["stuck_rooms"] == 2 * num_rooms)
        stats = node.stats
        assert stats is not None
        assert (stats.gauges["aux_slots_used"], stats.gauges["aux_slots_total"]) == (128, 256)
        assert stats.trouble == "", "there are slots left"
        held = {run.prefill_node: run for run in stats.quarantine}
        assert set(held) == {one.name, two.name}
        for double in (one, two):
            run = held[double.name]
            assert (run.instance_id, run.num_rooms, run.aux_slots) == (double.instance_id, 64, 64)
            assert (run.num_unacknowledged, run.host_slots, run.device_slots) == (64, 64 * 64, 0)
            said = f"prefill node {double.name} (run {double.instance_id}) has not said"
            node.turn_until(lambda: said in caplog.text)  # noqa: B023
        node.send(ReleaseQuarantine(one.instance_id))
        node.turn_until(lambda: node.engine.requests.pools.used(Stage.QUARANTINED).aux == 64)
        node.send(ReleaseQuarantine(two.instance_id))
        pools = node.engine.requests.pools
        node.turn_until(lambda: pools.free == pools.totals)
        check_serves(node)


@pytest.mark.I1
def test_a_run_that_answers_cannot_be_declared_dead(
    node: EngineHarness, double: PrefillDouble, caplog: pytest.LogCaptureFixture
) -> None:
    entry = aborted_room(node)
    node.send(ReleaseQuarantine(double.instance_id))
    node.turn_until(lambda: "answers: nothing is released" in caplog.text)
    assert entry.is_unacknowledged


def test_a_node_that_can_admit_nobody_says_so(node: EngineHarness) -> None:
    entry, rooms = aborted_room(node), node.engine.requests
    later = time.monotonic() + QUARANTINE_SECS
    assert rooms.trouble(later) == ""
    rooms.pools.grow(entry.holding, PoolKind.AUX, rooms.pools.free.aux)
    assert rooms.trouble(time.monotonic() - 1.0) == "", "it may still say that the room is quiet"
    assert "all slots of the aux pool are kept" in rooms.trouble(later)
