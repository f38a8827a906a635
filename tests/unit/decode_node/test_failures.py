"""Peers that fail, fall silent, restart or refuse; rooms that time out; impossible requests: I1, I2, I7."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import hisparse_pd.decode_node.engine
import hisparse_pd.engine.loop
from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, FinishReason, HisparseFlag, Mode
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts, Stage
from hisparse_pd.decode_node.peer_events import RoomMessage
from hisparse_pd.decode_node.quarantine import Quarantined
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.step_plan import Exchange, Fill, Growth, StepPlan
from hisparse_pd.engine.messages import Abort, ReleaseQuarantine
from hisparse_pd.kernels.hot_state import HotBufferError
from hisparse_pd.kernels.swap_in import RowStart
from hisparse_pd.protocol.messages import (
    HeartbeatAck,
    RegistrationRefused,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
)
from hisparse_pd.transfer.aux_record import AuxRecord
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    PrefillDouble,
    landing_slots,
    raising,
    random_prompt,
)
from tests.waiting import NEVER_SECS

PROMPT = random_prompt(7, 300)
HOST_TOKENS = 576
"""Host pool with room for one request with PROMPT, not for two."""
QUARANTINE_SECS = 0.4
NUM_NEW = 6
NODE = {
    "host_pool_tokens": HOST_TOKENS,
    "device_pool_tokens": 1024,
    "max_running_requests": 4,
    "quarantine_secs": QUARANTINE_SECS,
    "room_timeout_secs": NEVER_SECS,
}


@pytest.fixture
def node(checkpoint: Checkpoint, shared_node: EngineHarness) -> Iterator[EngineHarness]:
    """The shared engine, and another prefill node for each test.

    Whatever a test does, every pool must be whole again soon after it (I2). The prefill node is closed before
    the check: what it never acknowledged is freed because it is gone.
    """
    queue, pools = shared_node.engine.queue_moves, shared_node.engine.requests.pools
    settings = queue.room_timeout_secs, queue.contact_timeout_secs
    shared_node.double.close()
    shared_node.double = PrefillDouble(checkpoint)
    with closing(shared_node.double):
        yield shared_node
    queue.room_timeout_secs, queue.contact_timeout_secs = settings
    shared_node.turn_until(lambda: pools.free == pools.totals)


@pytest.fixture
def double(node: EngineHarness) -> PrefillDouble:
    return node.double


@contextmanager
def silence_is_noticed(node: EngineHarness) -> Iterator[None]:
    """Shorten the limit of silence, here only: on a busy machine an answer may be late by as much."""
    with patch.object(node.engine.peers, "health_timeout_secs", 1.0):
        yield


def _quarantined(node: EngineHarness) -> int:
    return node.engine.requests.pools.used(Stage.QUARANTINED)[PoolKind.HOST]


def _aborted(node: EngineHarness) -> Quarantined:
    """Return a room whose client is gone and of which its prefill node says nothing any more."""
    node.double.answers_aborts = False
    node.leave(node.entrust(PROMPT, 8))
    node.turn_until(lambda: node.double.aborts)
    (entry,) = node.engine.requests.quarantine
    return entry


def _completes(node: EngineHarness) -> None:
    """Check that the node goes on serving."""
    node.double.delivers = True
    assert len(node.tokens_of(node.generate(PROMPT, 4, HisparseFlag.TRUE))) == 4


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
    assert _quarantined(node) >= len(slots)
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
    _aborted(node)
    assert _quarantined(node) > 0
    double.deliver(double.bootstraps[0])
    node.turn_until(lambda: _quarantined(node) == 0)


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
    quarantine.expire(time.monotonic() + QUARANTINE_SECS)
    assert room not in quarantine


@pytest.mark.I1
def test_only_the_rooms_own_peer_can_call_it_quiet(
    node: EngineHarness, double: PrefillDouble, checkpoint: Checkpoint
) -> None:
    entry = _aborted(node)
    room, quarantine = entry.room, node.engine.requests.quarantine
    with closing(PrefillDouble(checkpoint)) as stranger:
        _room_message(stranger, node, RoomQuiet(room, batch_failed=False))
    _room_message(double, node, RoomQuiet(room, batch_failed=False), "the run after, which never heard of it")
    assert quarantine.get(room) is entry
    assert entry.is_unacknowledged
    _room_message(double, node, RoomQuiet(room, batch_failed=False))
    assert room not in quarantine


# --- timeouts, loss, return -----------------------------------------------------------------------


@pytest.mark.I1
@pytest.mark.I7
def test_a_room_that_is_not_delivered_in_time_ends_with_504(
    node: EngineHarness, double: PrefillDouble
) -> None:
    node.engine.queue_moves.room_timeout_secs = 0.3
    double.answers_aborts = False
    late = node.entrust(PROMPT, 8)
    node.failure_of(late, status=504, error=double.name)
    assert late.phases == ["queue", "landing"]
    node.turn_until(lambda: double.aborts)
    assert _quarantined(node) > 0
    double.say(RoomQuiet(double.bootstraps[0].room, batch_failed=False))
    node.turn_until(lambda: _quarantined(node) == 0)


@pytest.mark.I1
@pytest.mark.I7
def test_a_silent_peer_is_lost_and_found_again(node: EngineHarness, double: PrefillDouble) -> None:
    """Its rooms fail, their slots wait; once it answers again the abort is repeated and frees them."""
    lost = node.entrust(PROMPT, 8)
    double.is_hung = double.is_stopped = True
    with silence_is_noticed(node):
        node.failure_of(lost, status=502, error=double.name)
    node.turn_for(2 * QUARANTINE_SECS)
    assert _quarantined(node) > 0, "the run of the peer is not gone, so its writes may still land"
    double.is_hung = double.is_stopped = False
    node.turn_until(lambda: double.aborts)
    node.turn_until(lambda: _quarantined(node) == 0)
    assert double.num_registrations >= 2
    _completes(node)


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
    assert _quarantined(node) > 0, "bytes of the old run may still sit in the transport"
    node.turn_until(lambda: _quarantined(node) == 0)
    _completes(node)


@pytest.mark.I7
def test_running_requests_outlive_their_peer(node: EngineHarness, double: PrefillDouble) -> None:
    answer = node.generate(PROMPT, 20, HisparseFlag.TRUE)
    node.turn_until(lambda: answer.token_ids)
    double.close()
    assert len(node.tokens_of(answer)) == 20


@pytest.mark.I7
def test_a_peer_that_forgot_us_gets_registration_and_bootstrap_again(
    node: EngineHarness, double: PrefillDouble
) -> None:
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
def test_a_peer_that_opens_the_memory_yet_is_waited_for(node: EngineHarness, double: PrefillDouble) -> None:
    node.engine.queue_moves.contact_timeout_secs = 2.0
    double.refusal, before = HeartbeatAck(0, double.instance_id), double.num_registrations
    answer = node.generate(PROMPT, 8)
    node.turn_until(lambda: double.num_registrations == before + 4 or answer.is_over)  # one a second
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
    _completes(node)


def test_a_peer_without_work_is_closed_and_found_again(
    node: EngineHarness, double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    _completes(node)
    with monkeypatch.context() as patch:
        patch.setattr("hisparse_pd.decode_node.prefill_peers.IDLE_CLOSE_SECS", 0.2)
        node.turn_until(lambda: node.engine.peers.num_registered == 0)
    _completes(node)
    assert double.num_registrations == 2


# --- requests that end early ----------------------------------------------------------------------


def test_a_duplicate_room_is_refused_and_the_first_stands(node: EngineHarness, double: PrefillDouble) -> None:
    first = node.entrust(PROMPT, 8)
    room = double.bootstraps[0].room
    second = node.generate(PROMPT, 8, room=room)
    node.failure_of(second, status=400, error=str(room))
    double.deliver(double.bootstraps[0])
    assert len(node.tokens_of(first)) == 8


def test_what_can_never_fit_is_refused_at_once(node: EngineHarness, double: PrefillDouble) -> None:
    answer = node.generate(random_prompt(1, 600), 8, HisparseFlag.TRUE)
    node.failure_of(answer, status=400, error=str(HOST_TOKENS))
    assert double.num_registrations == 0


def test_the_first_token_may_be_the_last(node: EngineHarness) -> None:
    one = node.generate(PROMPT, 1, num_logprobs=2)
    node.turn_until(lambda: one.is_over)
    assert one.last is not None
    assert one.last.finish_reason is FinishReason.LENGTH
    assert one.logprobs[0].token_id == one.token_ids[0]
    assert len(one.logprobs[0].top) == 2
    stopped = node.generate(PROMPT, 9, stop_token_ids=(one.token_ids[0],))
    node.turn_until(lambda: stopped.is_over)
    assert stopped.last is not None
    assert stopped.last.finish_reason is FinishReason.STOP
    assert stopped.last.matched_stop_token == one.token_ids[0]


@pytest.mark.I7
def test_a_failing_forward_ends_its_batch_only(node: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = node.generate(PROMPT, 8, HisparseFlag.TRUE)
    with monkeypatch.context() as patch:
        error = torch.OutOfMemoryError("4 GiB wanted")
        patch.setattr(node.double.checkpoint.model, "forward", raising(error))
        node.failure_of(answer, status=500, error="4 GiB wanted")
    _completes(node)


def test_a_lost_device_ends_the_engine(node: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later step would fail as well, on a node that reports itself as healthy."""
    answer = node.generate(PROMPT, 8, HisparseFlag.TRUE)
    with monkeypatch.context() as patch:
        error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        patch.setattr(node.double.checkpoint.model, "forward", raising(error))
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            node.turn_until(lambda: answer.is_over)
    node.tokens_of(answer)  # here the device was not really lost


@pytest.mark.I7
def test_a_hint_that_does_not_fit_ends_its_request_only(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = node.engine.tables.memory
    take_aux = memory.take_aux

    def take_another_models(aux_slot: int, room: Room) -> AuxRecord:
        record = take_aux(aux_slot, room)
        assert record.hint is not None
        return replace(record, hint=record.hint + len(PROMPT))

    with monkeypatch.context() as patch:
        patch.setattr(memory, "take_aux", take_another_models)
        answer = node.generate(PROMPT, 8, HisparseFlag.TRUE)
        node.failure_of(answer, status=500, error="cannot be started")
    _completes(node)


@pytest.mark.I7
def test_a_row_that_cannot_be_filled_to_its_end_ends_its_request_only(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    spared = node.generate(PROMPT[:100], NUM_NEW, HisparseFlag.TRUE)
    node.turn_until(lambda: spared.token_ids)
    launch_slice = RowStart.launch_slice
    num_slices = 0

    def out_of_memory(start: RowStart, most_bytes: int | None) -> int:
        nonlocal num_slices
        num_slices += 1
        if num_slices > 1:
            raise torch.OutOfMemoryError("150 MiB wanted")
        return launch_slice(start, most_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(node.engine.tables, "slice_bytes", 1)
        patch.setattr(RowStart, "launch_slice", out_of_memory)
        doomed = node.generate(PROMPT, NUM_NEW, HisparseFlag.TRUE)
        check_one_fails(node, doomed, spared, "cannot be started: 150 MiB wanted")
    assert num_slices == 2
    node.engine.requests.check_integrity()


@pytest.mark.I1
def test_a_pause_of_this_node_ends_no_quarantine(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its sockets took in during the pause lands when it goes on."""
    stands_at: float | None = None
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if stands_at is None else stands_at)
    harness = EngineHarness(
        checkpoint, tmp_path, host_pool_tokens=HOST_TOKENS, max_running_requests=4, quarantine_secs=2.0
    )
    with closing(harness):
        double = harness.double
        for module in (hisparse_pd.engine.loop, hisparse_pd.decode_node.engine):
            monkeypatch.setattr(module, "time", clock)
        answer = harness.entrust(PROMPT, 8)
        stands_at = time.monotonic()
        double.say(RoomFailed(double.bootstraps[0].room, 502, "reset", quiet=True, batch_failed=True))
        harness.turn_until(lambda: answer.failure)
        assert _quarantined(harness)
        stands_at += 100.0
        harness.turn(double)
        assert _quarantined(harness)
        for _ in range(3):  # turns of this length are no pause
            stands_at += hisparse_pd.decode_node.engine.MAX_TURN_SECS
            harness.turn(double)
        assert not _quarantined(harness)


def check_one_fails(node: EngineHarness, doomed: Answer, spared: Answer, error: str) -> None:
    """Check that ``doomed`` ends with ``error``, and ``spared`` with its NUM_NEW tokens."""
    node.failure_of(doomed, status=500, error=error)
    assert len(node.tokens_of(spared)) == NUM_NEW


@pytest.mark.I7
@pytest.mark.parametrize("flag", [HisparseFlag.TRUE, HisparseFlag.FALSE])
def test_a_retraction_that_fails_ends_its_request_only(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, flag: HisparseFlag
) -> None:
    doomed = node.generate(PROMPT, NUM_NEW, flag)
    spared = node.generate(PROMPT[:100], NUM_NEW, HisparseFlag.TRUE)
    node.begin_together([doomed, spared])
    running = {request.num_prompt_tokens: request for request in node.engine.requests.all()}
    plan = StepPlan(
        exchanges=(
            Exchange(running[300], 100, SlotCounts(host=340 * (flag is HisparseFlag.FALSE))),
            Exchange(running[100], 128),
        )
    )
    name = "retract" if flag is HisparseFlag.FALSE else "resize"
    give_up = getattr(node.engine.tables, name)

    def out_of_memory(request: Request, **sizes: int) -> None:
        if request is running[300]:
            raise torch.OutOfMemoryError("150 MiB wanted")
        give_up(request, **sizes)

    with monkeypatch.context() as patch:
        patch.setattr(node.engine.tables, name, out_of_memory)
        node.engine.plan_moves.carry_out(plan, 0.0)
    node.engine.requests.check_integrity()
    check_one_fails(node, doomed, spared, "cannot be retracted: 150 MiB wanted")


@pytest.mark.I7
@pytest.mark.parametrize("name", ["resize", "start_pages"])
def test_what_fails_before_its_growth_ends_its_request_only(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A plan may give a request slots for its next step, and another hot buffer or pages, too."""
    doomed, spared = (node.generate(PROMPT[:length], 40, HisparseFlag.TRUE) for length in (100, 120))
    node.begin_together([doomed, spared])
    running = {request.num_prompt_tokens: request for request in node.engine.requests.all()}
    plan = StepPlan(
        exchanges=(Exchange(running[100], 80),) if name == "resize" else (),
        fills=(Fill(running[100], 192, 0),) if name == "start_pages" else (),
        growths=tuple(
            Growth(request, SlotCounts(host=64, index=64, lookup=64)) for request in running.values()
        ),
    )
    with monkeypatch.context() as patch:
        patch.setattr(node.engine.tables, name, raising(torch.OutOfMemoryError("150 MiB wanted")))
        node.engine.plan_moves.carry_out(plan, 0.0)
    node.engine.requests.check_integrity()
    node.failure_of(doomed, status=500, error="150 MiB wanted")
    assert len(node.tokens_of(spared)) == 40


@pytest.mark.I7
def test_a_wrong_hot_buffer_ends_its_request_only(node: EngineHarness) -> None:
    doomed, spared = (node.generate(PROMPT[:length], NUM_NEW, HisparseFlag.TRUE) for length in (100, 150))
    node.begin_together([doomed, spared])
    (request,) = (r for r in node.engine.requests.all() if r.num_prompt_tokens == 100)
    flags = node.engine.tables.state.error_flags
    flags[request.req_row] = int(HotBufferError.TOO_MANY_MISSES)
    check_one_fails(node, doomed, spared, "TOO_MANY_MISSES")


@pytest.mark.I7
def test_a_room_without_its_aux_record_fails(node: EngineHarness, double: PrefillDouble) -> None:
    """An earlier request's record in the same room and aux slot is not taken for it."""
    earlier = node.generate(PROMPT, 1, HisparseFlag.TRUE, room=4242)
    node.turn_until(lambda: earlier.is_over)
    double.delivers = False
    answer = node.generate(PROMPT, 8, HisparseFlag.TRUE, room=4242)
    node.turn_until(lambda: len(double.bootstraps) == 2)
    assert double.bootstraps[0].aux_slot == double.bootstraps[1].aux_slot
    double.say(RoomDone(4242, 1, 0, 0.0))
    node.failure_of(answer, status=500, error="aux record")


@pytest.mark.I7
def test_messages_about_rooms_that_are_not_landing_are_counted(
    node: EngineHarness, double: PrefillDouble, checkpoint: Checkpoint
) -> None:
    answer = node.entrust(PROMPT, 8)
    room = double.bootstraps[0].room
    with closing(PrefillDouble(checkpoint)) as stranger:
        other = node.generate(PROMPT[:10], 4, HisparseFlag.FALSE, double=stranger)
        node.turn_until(lambda: other.is_over, stranger)
        stranger.say(RoomFailed(room, 500, "not mine to fail", quiet=True, batch_failed=False))
        double.say(RoomQuiet(room, batch_failed=False))
        double.say(RoomDone(4711, 1, 0, 0.0))
        node.turn_for(0.6, stranger)
    assert answer.failure is None
    assert node.stats is not None
    assert node.stats.counters['control_messages_dropped_total{reason="unknown_room"}'] >= 1
    assert node.stats.counters['control_messages_dropped_total{reason="late"}'] >= 2
    double.deliver(double.bootstraps[0])
    node.tokens_of(answer)


def test_pages_that_differ_rule_out_dense(node: EngineHarness, checkpoint: Checkpoint) -> None:
    with closing(PrefillDouble(checkpoint, page_size=16)) as double:
        dense = node.generate(PROMPT, 4, HisparseFlag.FALSE, double=double)
        automatic = node.generate(PROMPT, 4, HisparseFlag.AUTO, double=double)
        node.turn_until(lambda: dense.is_over and automatic.is_over, double)
        failure = node.failure_of(dense, status=400, error="16")
        assert "64" in failure.error
        assert automatic.stats.mode is Mode.HISPARSE


@pytest.mark.I7
@pytest.mark.I8
def test_a_flood_of_messages_does_not_keep_a_turn_from_its_other_work(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats leave and running requests get their tokens between any two bursts of messages."""
    seen: list[str] = []
    abort, poll = node.engine.end_moves.abort, node.engine.peers.poll

    def aborted(request_id: str, now: float, **options: bool) -> None:
        seen.append(request_id)
        abort(request_id, now, **options)

    def polled(*args: object) -> object:
        seen.append("poll")
        return poll(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(node.engine.end_moves, "abort", aborted)
        patch.setattr(node.engine.peers, "poll", polled)
        flood = [f"unknown-{i}" for i in range(1000)]
        for request_id in flood:
            node.send(Abort(request_id))
        node.turn_until(lambda: flood[-1] in seen)
    assert [entry for entry in seen if entry != "poll"] == flood, "nothing is lost"
    bursts = [len(list(run)) for entry, run in itertools.groupby(seen, lambda e: e == "poll") if not entry]
    assert max(bursts) <= 256


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
        quarantine_secs=QUARANTINE_SECS,
    )
    one, two = (PrefillDouble(checkpoint) for _ in range(2))
    with closing(harness) as node, closing(one), closing(two):
        for double in (one, two):
            _vanish(node, double, num_rooms)
        _completes(node)
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
        _completes(node)


@pytest.mark.I1
def test_a_run_that_answers_cannot_be_declared_dead(
    node: EngineHarness, double: PrefillDouble, caplog: pytest.LogCaptureFixture
) -> None:
    entry = _aborted(node)
    node.send(ReleaseQuarantine(double.instance_id))
    node.turn_until(lambda: "answers: nothing is released" in caplog.text)
    assert entry.is_unacknowledged


def test_a_node_that_can_admit_nobody_says_so(node: EngineHarness) -> None:
    entry, rooms = _aborted(node), node.engine.requests
    later = time.monotonic() + QUARANTINE_SECS
    assert rooms.trouble(later) == ""
    rooms.pools.grow(entry.holding, PoolKind.AUX, rooms.pools.free.aux)
    assert rooms.trouble(time.monotonic() - 1.0) == "", "it may still say that the room is quiet"
    assert "all slots of the aux pool are kept" in rooms.trouble(later)
