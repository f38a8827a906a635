"""Requests of a decode node that cannot go on: what ends one or a batch of them, and that others go on: I2,
I7."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hisparse_pd.decode_node.engine
import hisparse_pd.engine.loop
from hisparse_pd.base.vocabulary import FinishReason, HisparseFlag, Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.step_plan import Exchange, Fill, Growth, StepPlan
from hisparse_pd.engine.messages import Abort
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.swap_in import RowStart
from hisparse_pd.protocol.messages import Room, RoomDone, RoomFailed, RoomQuiet
from hisparse_pd.transfer.aux_record import AuxRecord
from tests.unit.decode_node.failures_support import (
    FAILING,
    HOST_TOKENS,
    NUM_NEW,
    PROMPT,
    check_serves,
    num_quarantined_slots,
)
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    PrefillDouble,
    raising,
    random_prompt,
)

NODE = FAILING
NUM_GROWN = 12
"""New tokens behind a prompt of 120 tokens, which with them reaches into a third page."""


@pytest.fixture
def node(failing_node: EngineHarness) -> EngineHarness:
    return failing_node


@pytest.fixture
def double(node: EngineHarness) -> PrefillDouble:
    return node.double


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
    check_serves(node)


@pytest.mark.I1
def test_what_a_failing_step_has_launched_is_over_before_others_get_its_slots(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fail behind the forward, whose kernels then still run."""
    engine, calls = node.engine, list[str]()
    answer = node.generate(PROMPT, 8, HisparseFlag.TRUE)
    for owner, name in ((engine.steps.runner, "wait"), (engine.requests, "release")):
        noted = functools.partial(note_call, calls, name, getattr(owner, name))
        monkeypatch.setattr(owner, name, noted)
    with monkeypatch.context() as patch:
        error = torch.OutOfMemoryError("4 GiB wanted")
        patch.setattr("hisparse_pd.decode_node.runner.StepDraws.plan", raising(error))
        node.failure_of(answer, status=500, error="4 GiB wanted")
    assert calls == ["wait", "release"]


def note_call(calls: list[str], name: str, call: Callable[..., None], *args: object) -> None:
    calls.append(name)
    call(*args)


def test_a_lost_device_ends_the_engine(node: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later step would fail as well, on a node that reports itself as healthy."""
    answer = node.generate(PROMPT, 8, HisparseFlag.TRUE)
    with monkeypatch.context() as patch:
        error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        patch.setattr(node.double.checkpoint.model, "forward", raising(error))
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            node.turn_until(lambda: answer.is_over)
    node.tokens_of(answer)  # here the device was not really lost


@pytest.mark.I2
@pytest.mark.I7
def test_rows_that_cannot_be_emptied_are_emptied_later(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails without memory, and the rows of its batch cannot be emptied for the same reason."""
    release, num_calls = node.engine.tables.release, 0

    def out_of_memory(*requests: Request) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise torch.OutOfMemoryError("36 MiB wanted")
        release(*requests)

    answers = [node.generate(PROMPT[:length], 8, HisparseFlag.TRUE) for length in (100, 150)]
    node.begin_together(answers)
    with monkeypatch.context() as patch:
        patch.setattr(node.engine.tables, "release", out_of_memory)
        with monkeypatch.context() as forward:
            error = torch.OutOfMemoryError("4 GiB wanted")
            forward.setattr(node.double.checkpoint.model, "forward", raising(error))
            for answer in answers:
                node.failure_of(answer, status=500, error="4 GiB wanted")
        check_serves(node)
        node.turn_until(lambda: not node.engine.requests)
    assert num_calls > 2


@pytest.mark.I7
def test_a_row_that_cannot_be_emptied_for_a_retraction_ends_its_request_only(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = node.generate(PROMPT, NUM_NEW, HisparseFlag.FALSE)
    spared = node.generate(PROMPT[:100], NUM_NEW, HisparseFlag.TRUE)
    node.begin_together([doomed, spared])
    request = next(each for each in node.engine.requests.all() if each.num_prompt_tokens == 300)
    release, num_calls = node.engine.tables.release, 0

    def out_of_memory(*requests: Request) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise torch.OutOfMemoryError("36 MiB wanted")
        release(*requests)

    with monkeypatch.context() as patch:
        patch.setattr(Limits, "first_kept", lambda *_: None)
        patch.setattr(node.engine.tables, "release", out_of_memory)
        node.engine.plan_moves.carry_out(
            StepPlan(exchanges=(Exchange(request, 100, SlotCounts(host=340)),)), 0.0
        )
    node.engine.requests.check_integrity()
    check_one_fails(node, doomed, spared, "cannot be retracted: 36 MiB wanted")


def test_a_device_that_is_lost_before_a_step_ends_the_engine(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = node.generate(PROMPT, 8, HisparseFlag.TRUE)
    with monkeypatch.context() as patch:
        error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        patch.setattr(node.engine.tables, "prepare_landing", raising(error))
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            node.turn_until(lambda: answer.is_over)
    node.leave(answer)
    node.turn_until(lambda: not node.engine.requests)


@pytest.mark.I7
@pytest.mark.parametrize("flag", [HisparseFlag.TRUE, HisparseFlag.FALSE])
def test_a_landing_zone_that_cannot_be_prepared_ends_its_request_only(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, flag: HisparseFlag
) -> None:
    """Nothing lands in it, so its slots are free at once."""
    pools = node.engine.requests.pools
    with monkeypatch.context() as patch:
        error = torch.OutOfMemoryError("1 MiB wanted")
        patch.setattr(node.engine.tables, "prepare_landing", raising(error))
        answer = node.generate(PROMPT, 8, flag)
        node.failure_of(answer, status=500, error="cannot be admitted: 1 MiB wanted")
    assert not node.double.bootstraps
    assert pools.free == pools.totals
    check_serves(node)


@pytest.mark.I7
@pytest.mark.parametrize("fails", [False, True])
def test_landing_zones_of_one_plan_are_prepared_at_once(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """If that fails, all of their requests do, and nothing lands for any of them."""
    check_serves(node)
    node.double.bootstraps.clear()
    tables, pools = node.engine.tables, node.engine.requests.pools
    prepare, prepared = tables.prepare_landing, list[int]()

    def prepare_landing(*requests: Request) -> None:
        prepared.append(len(requests))
        if fails:
            raise torch.OutOfMemoryError("1 MiB wanted")
        prepare(*requests)

    with monkeypatch.context() as patch:
        patch.setattr(tables, "prepare_landing", prepare_landing)
        with monkeypatch.context() as held_back:
            held_back.setattr(node.engine.steps, "carry_out_plan", lambda now: None)
            answers = [node.generate(random_prompt(seed, 20), 4, HisparseFlag.TRUE) for seed in range(3)]
            node.turn_until(lambda: len(list(node.engine.requests.waiting())) == 3)
        node.turn_until(lambda: all(answer.is_over for answer in answers))
    assert prepared == [3]
    assert [answer.failure is not None for answer in answers] == [fails] * 3
    assert len(node.double.bootstraps) == (0 if fails else 3)
    node.turn_until(lambda: pools.free == pools.totals)


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
    check_serves(node)


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
        patch.setattr(node.engine.tables.fills, "slice_bytes", 1)
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
        assert num_quarantined_slots(harness)
        stands_at += 100.0
        harness.turn(double)
        assert num_quarantined_slots(harness)
        for _ in range(3):  # turns of this length are no pause
            stands_at += hisparse_pd.decode_node.engine.MAX_TURN_SECS
            harness.turn(double)
        assert not num_quarantined_slots(harness)


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
    doomed = node.generate(PROMPT[:100], 40, HisparseFlag.TRUE)
    spared = node.generate(PROMPT[:120], NUM_GROWN, HisparseFlag.TRUE)
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
    assert len(node.tokens_of(spared)) == NUM_GROWN


@pytest.mark.I7
@pytest.mark.parametrize(
    ("flag", "is_exchanged"),
    [
        *((HisparseFlag.TRUE, True), (HisparseFlag.FALSE, False)),
        pytest.param(HisparseFlag.TRUE, False, marks=pytest.mark.slow),
        pytest.param(HisparseFlag.FALSE, True, marks=pytest.mark.slow),
    ],
)
def test_slots_that_cannot_be_entered_end_their_request_only(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, flag: HisparseFlag, is_exchanged: bool
) -> None:
    doomed = node.generate(PROMPT[:100], 40, flag)
    spared = node.generate(PROMPT[:120], NUM_GROWN, flag)
    node.begin_together([doomed, spared])
    request = next(each for each in node.engine.requests.all() if each.num_prompt_tokens == 100)
    is_hisparse = flag is HisparseFlag.TRUE
    more = SlotCounts(host=64, index=64, lookup=64) if is_hisparse else SlotCounts(device=64, index=64)
    to_hot_buffer = Exchange(request, 80, SlotCounts(host=192 * (not is_hisparse), lookup=192))
    plan = StepPlan(
        exchanges=(to_hot_buffer,) if is_exchanged else (),
        growths=() if is_exchanged else (Growth(request, more),),
    )
    with monkeypatch.context() as patch:
        patch.setattr(node.engine.tables, "grow", raising(torch.OutOfMemoryError("1 MiB wanted")))
        node.engine.plan_moves.carry_out(plan, 0.0)
    node.engine.requests.check_integrity()
    node.failure_of(doomed, status=500, error="1 MiB wanted")
    assert len(node.tokens_of(spared)) == NUM_GROWN


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

        def all_are_counted() -> bool:
            counters = node.stats.counters if node.stats is not None else {}
            wanted = {"unknown_room": 1, "late": 2}
            return all(
                counters.get(f'control_messages_dropped_total{{reason="{reason}"}}', 0) >= number
                for reason, number in wanted.items()
            )

        node.turn_until(all_are_counted, stranger)
    assert answer.failure is None
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
