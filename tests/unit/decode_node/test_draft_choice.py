"""The number of drafts that a step verifies follows what they gain and what they cost."""

from __future__ import annotations

import pytest

from hisparse_pd.decode_node.draft_choice import (
    FIRST_STEPS,
    PROBE_EVERY,
    PROBE_STEPS,
    DraftChoice,
    best_num_drafts,
    expected_tokens,
)


def test_expected_tokens_are_those_of_the_chain() -> None:
    assert expected_tokens([], 0) == 1
    assert expected_tokens([0.5, 0.5, 0.5], 2) == 1 + 0.5 + 0.25
    assert expected_tokens([1.0, 0.0, 1.0], 3) == 2


@pytest.mark.parametrize(
    ("rates", "secs", "present", "best"),
    [
        ([0.9, 0.9, 0.9], [1.0, 1.1, 1.2, 1.3], 0, 3),
        ([0.9, 0.1, 0.1], [1.0, 1.1, 1.2, 1.3], 0, 1),
        ([0.2, 0.2, 0.2], [1.0, 1.5, 2.0, 2.5], 3, 0),
        # More drafts that are hardly better are not worth a change; fewer are.
        ([0.5], [1.0, 1.48], 0, 0),
        ([0.5], [1.0, 1.52], 1, 0),
        ([0.5], [1.0, 1.48], 1, 1),
    ],
)
def test_the_number_that_brings_most_tokens_a_second(
    rates: list[float], secs: list[float], present: int, best: int
) -> None:
    assert best_num_drafts(rates, secs, present) == best


def run(
    choice: DraftChoice, num_reqs: int, secs_of: list[float], num_accepted: int, num_steps: int
) -> list[int]:
    """Run steps that take as long as ``secs_of`` says; return how many drafts each verified."""
    chosen = []
    for _ in range(num_steps):
        num_drafts = choice.choose(num_reqs, len(secs_of) - 1)
        choice.note_secs(num_reqs, num_drafts, secs_of[num_drafts])
        choice.note_verified(num_drafts, min(num_drafts, num_accepted))
        chosen.append(num_drafts)
    return chosen


FAST, SLOW = [1.0, 1.05, 1.1, 1.15], [1.0, 2.1, 3.2, 4.3]


def test_each_number_is_tried_and_then_the_best_one_taken() -> None:
    choice = DraftChoice(3)
    chosen = run(choice, 1, FAST, 3, 4 * FIRST_STEPS + 50)
    assert chosen[: 4 * FIRST_STEPS] == [number for number in (3, 2, 1, 0) for _ in range(FIRST_STEPS)]
    assert set(chosen[4 * FIRST_STEPS :]) == {3}


def test_drafts_stop_where_steps_are_too_long_and_go_on_where_they_are_not() -> None:
    choice = DraftChoice(3)
    run(choice, 128, SLOW, 1, 200)
    run(choice, 1, FAST, 1, 200)
    assert [choice.choose(num_reqs, 3) for num_reqs in (128, 1, 100, 1)] == [0, 1, 0, 1]


def test_another_text_changes_the_number() -> None:
    """Drafts are all right, then all wrong, then right again: trials notice."""
    choice = DraftChoice(3)
    run(choice, 4, FAST, 3, 100)
    assert choice.choose(4, 3) == 3
    run(choice, 4, FAST, 0, 2500)
    assert choice.choose(4, 3) == 0
    probes = run(choice, 4, FAST, 3, 2 * PROBE_EVERY)
    assert len([number for number in probes if number]) >= PROBE_STEPS
    run(choice, 4, FAST, 3, PROBE_EVERY)
    assert choice.choose(4, 3) == 3


@pytest.mark.parametrize("num_reqs", [1, 64])
def test_drafts_that_were_useless_for_long_are_taken_again_soon_after_they_are_good(num_reqs: int) -> None:
    choice = DraftChoice(3)
    run(choice, num_reqs, FAST, 0, 20 * PROBE_EVERY)
    assert choice.choose(num_reqs, 3) == 0
    chosen = run(choice, num_reqs, FAST, 3, 3 * PROBE_EVERY)
    assert set(chosen[-PROBE_EVERY // 2 :]) == {3}


def test_trials_of_useless_drafts_cost_little() -> None:
    """This holds also if many requests take part in the trials and every draft is wrong."""
    for num_reqs in (1, 64):
        choice = DraftChoice(3)
        run(choice, num_reqs, FAST, 0, 5 * PROBE_EVERY)
        chosen = run(choice, num_reqs, FAST, 0, 20 * PROBE_EVERY)
        assert sum(FAST[number] for number in chosen) < 1.01 * len(chosen)


def test_what_a_batch_cannot_verify_is_not_chosen() -> None:
    choice = DraftChoice(3)
    assert set(run(choice, 4, FAST[:2], 1, 3 * PROBE_EVERY)) == {0, 1}
    assert choice.choose(4, 1) == 1
    assert choice.choose(4, 3) == 3, "it was not tried yet"


def test_a_stall_and_the_short_turn_behind_it_decide_nothing() -> None:
    choice = DraftChoice(1)
    for secs in (2.0, 50.0, 0.01, 2.0, 2.0, 2.0):
        choice.note_secs(1, 1, secs)
    for _ in range(FIRST_STEPS):
        choice.note_secs(1, 0, 1.15)
    assert choice.choose(1, 1) == 0
    for secs in (50.0, 0.01):
        choice.note_secs(1, 0, secs)
        assert choice.choose(1, 1) == 0


def test_without_drafts_there_is_nothing_to_choose() -> None:
    assert [DraftChoice(0).choose(num_reqs, 0) for num_reqs in (1, 128)] == [0, 0]


class RecordedChoice(DraftChoice):
    def __init__(self) -> None:
        super().__init__(3)
        self.all: list[tuple[int, int, float]] = []

    def note_secs(self, num_reqs: int, num_drafts: int, secs: float) -> None:
        self.all.append((num_reqs, num_drafts, secs))


def test_turns_are_timed_between_steps_alike() -> None:
    choice = RecordedChoice()
    for num_reqs, num_drafts, now in (
        (2, 3, 1.0),
        (2, 3, 1.5),
        (2, 0, 3.0),
        (2, 0, 3.25),
        (0, 0, 9.0),
        (2, 0, 20.0),
    ):
        choice.note_turn(num_reqs, num_drafts, now)
    assert choice.all == [(2, 3, 0.5), (2, 0, 0.25)]


def test_the_seconds_of_a_step_are_those_with_the_present_number_of_drafts() -> None:
    choice = DraftChoice(0)
    assert choice.step_secs(5) is None
    for _ in range(FIRST_STEPS):
        choice.note_secs(5, 0, 0.25)
    assert choice.step_secs(8) == 0.25, "batches up to the same power of two are alike"
    assert choice.step_secs(9) is None
    with_drafts = DraftChoice(1)
    for num_drafts, secs in ((0, 1.0), (1, 4.0)):
        for _ in range(FIRST_STEPS):
            with_drafts.note_secs(1, num_drafts, secs)
    assert with_drafts.step_secs(1) == 4.0
    assert with_drafts.choose(1, 1) == 0
    assert with_drafts.step_secs(1) == 1.0
