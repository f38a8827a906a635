"""Steps that overlap: the device step and the engine's commit, one step late, on the CPU's references.

A GPU runs the same code in CUDA graphs. Here a step's result is there at once, but it is taken when the next
step has been launched, and input tokens come from the step before without the host having seen them.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.decode_node import forwards
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.runner import Launched
from hisparse_pd.decode_node.split_choice import SPLITS, Split
from hisparse_pd.engine.messages import Abort
from tests.unit.decode_node.speculation_support import Calls
from tests.unit.decode_node.support import Checkpoint, EngineHarness, Prompt, raising, random_prompt

NUM_NEW = 10
HOT_BUFFER = 128
NODE = {"device_buffer_size": HOT_BUFFER, "speculative_num_steps": 0}
LENGTHS = [1, 63, 64, 65, 66, HOT_BUFFER - 1, HOT_BUFFER, HOT_BUFFER + 1, 200, 387]
PROMPTS: list[Prompt] = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]

EACH_MODEL = pytest.mark.parametrize(
    "checkpoint", ["v32", pytest.param("glm", marks=pytest.mark.slow)], indirect=True
)


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.parametrize("split", SPLITS)
@EACH_MODEL
def test_tokens_equal_the_oracle_when_steps_overlap_and_are_split(
    expected: dict[Prompt, list[int]], node: EngineHarness, monkeypatch: pytest.MonkeyPatch, split: Split
) -> None:
    monkeypatch.setattr(forwards, "UNMEASURED_SPLIT", split)
    answers = [node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in PROMPTS]
    node.finish(answers, expected)
    for answer in answers:
        assert answer.stats.misses > 0 or len(answer.prompt) <= HOT_BUFFER


def test_a_dense_request_never_gets_a_page_past_its_last_token(
    expected: dict[Prompt, list[int]], node: EngineHarness
) -> None:
    """Its life fills its pages exactly: while its last token is in flight there is no next one to place."""
    prompt, num_new = PROMPTS[1], 2  # 63 + 2 - 1 tokens of KV
    with patch.object(node.engine.requests, "grow", autospec=True) as grow:
        node.finish([node.generate(prompt, num_new, HisparseFlag.FALSE)], expected)
    grow.assert_not_called()


@pytest.mark.I5
def test_drawn_and_logged_requests_overlap_their_steps_as_greedy_ones_do(
    expected: dict[Prompt, list[int]], node: EngineHarness
) -> None:
    greedy = node.generate(PROMPTS[8], NUM_NEW, HisparseFlag.TRUE)
    drawn = [
        node.generate(PROMPTS[9], NUM_NEW, flag, temperature=1.0, seed=5)
        for flag in (HisparseFlag.TRUE, HisparseFlag.FALSE)
    ]
    logged = node.generate(PROMPTS[7], NUM_NEW, HisparseFlag.FALSE, num_logprobs=2)
    node.turn_until(lambda: all(len(answer.token_ids) > 3 for answer in (*drawn, logged)))
    assert node.engine.steps.in_flight is not None
    node.finish([greedy, *drawn, logged])
    assert greedy.token_ids == expected[PROMPTS[8]]
    assert logged.token_ids == expected[PROMPTS[7]]
    assert len(logged.logprobs) == NUM_NEW
    assert all(logprob.token_id == logprob.top[0][0] for logprob in logged.logprobs)
    assert drawn[0].token_ids == drawn[1].token_ids


def test_a_step_whose_result_fails_frees_nothing_that_the_next_one_uses(
    expected: dict[Prompt, list[int]], node: EngineHarness, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are freed only when the next step has been waited for, too."""
    doomed = node.generate(PROMPTS[8], NUM_NEW, HisparseFlag.FALSE)
    node.turn_until(lambda: len(doomed.token_ids) > 3)
    engine = node.engine
    with monkeypatch.context() as patch:
        patch.setattr(Launched, "result", raising(RuntimeError("no such token")))
        calls.watch(patch, Launched, "result", "read")
        calls.watch(patch, engine.tables, "release", "end")
        calls.all.clear()
        node.failure_of(doomed, error="no such token")
        node.turn_until(lambda: not engine.requests.select(RequestState.ENDING))
    done = [what for what, _ in calls.all if what in ("read", "wait", "end")]
    assert done == ["read", "wait", "read", "wait", "end"]
    node.finish([node.generate(PROMPTS[8], NUM_NEW, HisparseFlag.FALSE)], expected)


def num_aborted(node: EngineHarness) -> float:
    node.stats = None
    node.turn_until(lambda: node.stats)
    assert node.stats is not None
    return node.stats.counters["aborted_requests_total"]


@pytest.mark.I1
@pytest.mark.I2
@pytest.mark.parametrize("has_finished", [False, True])
def test_an_abort_between_steps_leaves_the_others_and_the_pools_whole(
    expected: dict[Prompt, list[int]], node: EngineHarness, has_finished: bool
) -> None:
    """A request that ends at a stop string goes the same way, but is not counted as aborted."""
    num_aborted_before = num_aborted(node)
    staying = node.generate(PROMPTS[8], NUM_NEW, HisparseFlag.TRUE)
    leaving = node.generate(PROMPTS[9], NUM_NEW, HisparseFlag.TRUE)
    node.turn_until(lambda: len(leaving.token_ids) > 3)
    request_id = next(name for name, answer in node.answers.items() if answer is leaving)
    node.send(Abort(request_id, has_finished))
    node.finish([staying], expected)
    assert num_aborted(node) == num_aborted_before + (not has_finished)
    assert not node.double.aborts, "nothing of a delivered room is in flight"


class Filling:
    """The event of a row that is being filled until it is waited for, or ``is_over`` is set."""

    def __init__(self) -> None:
        self.is_over = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True
        self.num_waits += 1


def test_a_row_that_is_being_filled_is_in_no_step_and_is_not_released_before_that_is_over(
    expected: dict[Prompt, list[int]], node: EngineHarness
) -> None:
    fill_ends = node.engine.tables.fills.ends
    staying = node.generate(PROMPTS[8], NUM_NEW, HisparseFlag.TRUE)
    leaving = node.generate(PROMPTS[9], NUM_NEW, HisparseFlag.TRUE)
    node.begin_together([staying, leaving])
    node.turn_until(lambda: len(staying.token_ids) > 3 and len(leaving.token_ids) > 3)
    requests = node.engine.requests.select(RequestState.RUNNING)
    fillings = {request.room: Filling() for request in requests}
    node.engine.steps.settle()
    for request in requests:
        fill_ends[request.req_row] = fillings[request.room]  # type: ignore[assignment]
        request.is_filling = True
    num_before = [len(request.output_token_ids) for request in requests]
    for _ in range(5):
        node.turn()
    assert [len(request.output_token_ids) for request in requests] == num_before
    stays, leaves = fillings.values()
    stays.is_over = True
    node.send(Abort(next(name for name, answer in node.answers.items() if answer is leaving)))
    node.turn_until(lambda: staying.is_over)
    (ending,) = node.engine.requests.select(RequestState.ENDING)
    assert ending.num_device_slots > 0
    leaves.is_over = True
    node.finish([staying], expected)
    assert (stays.num_waits, leaves.num_waits) == (0, 0)


def test_a_node_that_stops_waits_for_rows_that_are_being_filled(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with closing(EngineHarness(checkpoint, tmp_path, device_buffer_size=HOT_BUFFER)) as node:
        answer = node.generate(PROMPTS[8], NUM_NEW, HisparseFlag.TRUE)
        node.turn_until(lambda: len(answer.token_ids) > 3)
        node.engine.steps.settle()
        (request,) = node.engine.requests.select(RequestState.RUNNING)
        filling = Filling()
        node.engine.tables.fills.ends[request.req_row] = filling  # type: ignore[assignment]
    assert filling.num_waits == 1
    assert node.engine.requests.pools.free == node.engine.requests.pools.totals


def test_an_end_reads_nothing_from_the_device(node: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts are those of the steps that were read."""
    engine = node.engine
    start_ending = engine.requests.start_ending

    def start_ending_and_count(request: Request, *, is_sound: bool) -> None:
        start_ending(request, is_sound=is_sound)
        engine.tables.state.counters[request.req_row] += 10**6

    monkeypatch.setattr(engine.requests, "start_ending", start_ending_and_count)
    before = engine.tables.totals([])
    answer = node.generate(PROMPTS[8], NUM_NEW, HisparseFlag.TRUE)
    node.turn_until(lambda: len(answer.token_ids) > 3)
    (request,) = engine.requests.select(RequestState.RUNNING)
    node.leave(answer)
    node.turn_until(lambda: request.state is RequestState.ENDED)
    node.finish([])
    gained = [now - then for now, then in zip(engine.tables.totals([]), before, strict=True)]
    assert gained == list(request.earlier_counters)
    assert 0 < gained[0] < 10**6
