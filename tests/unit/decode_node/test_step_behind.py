"""The host is a step behind with drafts, too: the order of launches changes, and nothing else.

The runner on the CPU, where a step is over when it is launched; the order of calls is a GPU's.
"""

from __future__ import annotations

from contextlib import closing
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.runner import Launched, make_runner
from hisparse_pd.engine.lockstep import NodeStep
from tests.unit.decode_node.speculation_support import (
    PROMPTS,
    Calls,
    by_turns,
    drafts,
    harness,
    num_drafts,
)
from tests.unit.decode_node.support import Checkpoint, EngineHarness, Prompt

NUM_NEW = 20
ALL_PAIRS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3)
"""Numbers of drafts in which each number follows each."""
CHECKPOINT = "drafting"
NODE: dict[str, Any] = {"page_size": 4, "growth_pages": 1}


@pytest.fixture
def ends(calls: Calls, node: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """``calls``, with the releases of what requests own."""
    calls.watch(monkeypatch, node.engine.requests, "release", "end")
    return calls


@pytest.mark.parametrize(
    "flag", [HisparseFlag.TRUE, pytest.param(HisparseFlag.FALSE, marks=pytest.mark.slow)]
)
def test_the_next_step_is_launched_before_the_last_one_is_read(
    expected: dict[Prompt, list[int]], node: EngineHarness, calls: Calls, flag: HisparseFlag
) -> None:
    """A step is launched ahead until the drafts in flight may be the last tokens."""
    with drafts(node, 3):
        answer = node.generate(PROMPTS[8], NUM_NEW, flag)
        node.finish([answer], expected)
    steps = calls.steps
    assert all(step.num_new == 4 for step in steps)
    # A step may bring 4 tokens: with 5 left, the next step needs to know how many came.
    num_left = NUM_NEW
    are_sure = []
    for step in steps:
        are_sure.append(num_left > 1 + step.most_drafts[0])
        num_left -= len(calls.results[id(step)][0].token_ids)
    assert calls.are_ahead() == are_sure[:-1]
    assert sum(calls.are_ahead()) > len(steps) // 2


def test_drafts_that_the_host_has_not_read_are_as_good(
    checkpoint: Checkpoint, node: EngineHarness, calls: Calls, tmp_path: Path
) -> None:
    """As many are verified and accepted as where every step is read first."""
    counts = []
    with closing(harness(checkpoint, tmp_path, make_runner, page_size=4)) as reading_first:
        for each in (reading_first, node):
            with drafts(each, 3):
                answers = [each.generate(prompt, NUM_NEW, HisparseFlag.FALSE) for prompt in PROMPTS[5:9:2]]
                each.finish(answers)
            counts.append([num_drafts(answer) for answer in answers])
    assert counts[0] == counts[1]
    assert any(calls.are_ahead())


def test_each_number_of_drafts_may_follow_each(
    expected: dict[Prompt, list[int]], node: EngineHarness, calls: Calls
) -> None:
    """The next step is launched before the last is read. Every other request is alone."""
    pairs = set()
    with drafts(node, *ALL_PAIRS):
        for number, prompt in enumerate(PROMPTS[4:7]):
            answer = node.generate(prompt, NUM_NEW, by_turns(number))
            beside = [node.generate(PROMPTS[2], NUM_NEW, is_speculative=False) for _ in range(number % 2)]
            node.finish([answer, *beside], expected)
            steps = [step.num_new for step in calls.steps]
            pairs |= set(compress(pairwise(steps), calls.are_ahead()))
            for one_step, next_step in pairwise(calls.steps):
                if one_step.num_new == 1:  # which makes none
                    assert not any(next_step.most_drafts)
            calls.all.clear()
    assert pairs == {(one, two) for one in range(1, 5) for two in range(1, 5)}


@pytest.mark.I5
def test_who_asks_for_more_than_the_likeliest_token_has_every_step_read_first(
    expected: dict[Prompt, list[int]], node: EngineHarness, calls: Calls
) -> None:
    """Its draws depend on the number of tokens. Requests beside it wait, and go on ahead without it."""
    with drafts(node, 3):
        answer = node.generate(PROMPTS[8], NUM_NEW)
        node.turn_until(lambda: sum(calls.are_ahead()) > 0)
        drawn = [
            node.generate(PROMPTS[3], 4, temperature=1.0, seed=1),
            node.generate(PROMPTS[3], 4, num_logprobs=0),
            node.generate(PROMPTS[3], 4, min_new_tokens=4),
            node.generate(PROMPTS[3], 4, presence_penalty=0.1),
        ]
        node.finish([answer, *drawn])
    assert answer.token_ids == expected[PROMPTS[8]]
    assert drawn[1].token_ids == expected[PROMPTS[3]][:4]
    rooms = {request.room for step in calls.steps for request in step.batch if is_drawn(request)}
    assert len(rooms) == len(drawn)
    are_drawn = [any(map(is_drawn, step.batch)) for step in calls.steps]
    for is_ahead, one, two in zip(calls.are_ahead(), are_drawn, are_drawn[1:], strict=False):
        assert not (is_ahead and (one or two))
    assert sum(calls.are_ahead()) > 2


def is_drawn(request: Request) -> bool:
    sampling = request.sampling
    is_greedy = sampling.temperature == 0 and sampling.num_logprobs is None and not request.changes_logits
    return not is_greedy or sampling.min_new_tokens > 0


@pytest.mark.I2
def test_a_request_that_ends_among_accepted_tokens_keeps_its_slots_for_the_step_in_flight(
    expected: dict[Prompt, list[int]], node: EngineHarness, ends: Calls
) -> None:
    prompt = PROMPTS[8]
    tokens = expected[prompt]
    stops = [
        number for number, token in enumerate(tokens) if 4 <= number < 7 and token not in tokens[:number]
    ]
    num_inside = 0
    for stop in stops:
        ends.all.clear()
        with drafts(node, 3):
            beside = node.generate(PROMPTS[7], 10, by_turns(stop + 1))
            answer = node.generate(prompt, NUM_NEW, by_turns(stop), stop_token_ids=(tokens[stop],))
            node.finish([answer, beside])
        assert answer.token_ids == tokens[: stop + 1]
        assert beside.token_ids == expected[PROMPTS[7]][:10]
        (ended,) = (of for what, of in ends.all if what == "end" and of.num_prompt_tokens == len(prompt))
        last = [step for step in ends.steps if ended in step.batch]
        for_nothing = last[-1]
        assert ends.at("launch", for_nothing) < ends.at("read", for_nothing) < ends.at("end", ended)
        assert not any(what == "wait" for what, _ in ends.all)
        ending = ends.results[id(last[-2])][last[-2].batch.index(ended)].token_ids
        num_inside += tokens[stop] in ending[:-1]
    assert num_inside > 0


@pytest.mark.I2
def test_what_an_aborted_request_owns_is_kept_for_the_step_in_flight_and_nobody_waits(
    expected: dict[Prompt, list[int]], node: EngineHarness, ends: Calls
) -> None:
    num_ending = 0
    with drafts(node, 3):
        staying = node.generate(PROMPTS[5], NUM_NEW)
        for num_turns in range(4):
            leaving = node.generate(PROMPTS[8], NUM_NEW, by_turns(num_turns))
            node.turn_until(lambda: leaving.token_ids)  # noqa: B023
            for _ in range(num_turns):
                node.turn()
            (request,) = (
                each
                for each in node.engine.requests.select(RequestState.RUNNING)
                if each.num_prompt_tokens == len(PROMPTS[8])
            )
            num_ending += request.num_in_flight > 0
            room, again = request.room, None
            node.leave(leaving)
            while request.state is not RequestState.ENDED:
                node.turn()
                if request.state is RequestState.ENDING and again is None:
                    assert room not in [each.room for each in node.engine.requests.all()]
                    again = node.generate(PROMPTS[7], NUM_NEW, by_turns(num_turns), room=room)
            before = ends.all[: ends.at("end", request)]
            last = [of for what, of in before if what == "launch" and request in of.batch][-1]
            assert any(of is last and what == "read" for what, of in before)
            if again is not None:
                node.turn_until(lambda: again.is_over)  # noqa: B023
                assert again.token_ids == expected[PROMPTS[7]], "the room is there for others at once"
        node.finish([staying], expected)
    assert num_ending > 0
    assert not any(what == "wait" for what, _ in ends.all)


@pytest.mark.I1
@pytest.mark.I5
def test_where_slots_run_out_a_step_is_read_first(
    checkpoint: Checkpoint,
    expected: dict[Prompt, list[int]],
    calls: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that sits a step out lacks a slot in any case, not only if all drafts in flight are right."""
    prompts = PROMPTS[5:9]
    host_pool_tokens = sum(4 + len(prompt) // 4 * 4 for prompt in prompts) + 36
    num_left_out = num_short_of_sure = 0
    with (
        closing(harness(checkpoint, tmp_path, **NODE, host_pool_tokens=host_pool_tokens)) as small,
        drafts(small, 3),
    ):
        steps = small.engine.steps
        may_follow, launch = steps.may_follow, steps.launch

        def recorded_may_follow() -> bool:
            nonlocal num_short_of_sure
            batch = [] if steps.in_flight is None else steps.in_flight.batch
            short = (each for each in batch if each.has_next_step and not each.has_slots_for_next)
            num_short_of_sure += any(each.num_drafts_in_flight for each in short)
            return may_follow()

        def checked_launch(batch: list[Request], step: NodeStep) -> Launched | None:
            nonlocal num_left_out
            for request in small.engine.requests.select(RequestState.RUNNING):
                if batch and request.has_next_step and request not in batch:
                    assert request.num_drafts_in_flight == 0
                    num_left_out += 1
            return launch(batch, step)

        monkeypatch.setattr(steps, "may_follow", recorded_may_follow)
        monkeypatch.setattr(steps, "launch", checked_launch)
        answers = []
        for prompt in prompts:  # one after the other, each a few tokens ahead of the next
            answers.append(small.generate(prompt, NUM_NEW, HisparseFlag.TRUE))
            small.begin_together(answers)
        small.finish(answers, expected)
    assert num_left_out > 0
    assert num_short_of_sure > 0
    assert any(calls.are_ahead())
