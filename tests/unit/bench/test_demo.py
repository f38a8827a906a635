"""What the demo says of answers, and when it fails."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tools.bench.demo import Outcome, expect_drafts, make_cases, report
from tools.bench.served import Served, served, tokens_per_step


def test_drafts_are_read_in_openais_words_and_in_sglangs() -> None:
    details = {"accepted_prediction_tokens": 31, "rejected_prediction_tokens": 20}
    for usage, expected in (
        ({"completion_tokens_details": details}, (51, 31)),
        ({"spec_draft_token_num": 51, "spec_accept_token_num": 31}, (51, 31)),
        ({"completion_tokens": 4, "completion_tokens_details": None}, (0, 0)),
    ):
        found = served(usage)
        assert (found.num_drafted, found.num_accepted) == expected


@pytest.mark.parametrize(
    ("num_tokens", "num_accepted", "expected"), [(50, 0, 1.0), (50, 28, 50 / 22), (1, 0, 1.0), (0, 0, None)]
)
def test_every_token_is_a_steps_own_or_an_accepted_draft(
    num_tokens: int, num_accepted: int, expected: float | None
) -> None:
    assert tokens_per_step(num_tokens, num_accepted) == expected


def test_the_demo_fails_when_a_mode_has_no_accepted_draft() -> None:
    case = make_cases()[0]
    outcomes = [
        Outcome(case, served=Served(num_output_tokens=9, mode=mode, num_drafted=6, num_accepted=count))
        for mode, count in (("dense", 3), ("hisparse", 0), ("dense", 0), ("hisparse", 0))
    ]
    expect_drafts(outcomes)
    problems = ["no draft of a hisparse request was accepted"]
    assert [outcome.problems for outcome in outcomes] == [[], [], [], problems]
    console = Console(file=io.StringIO(), width=140)
    console.print(report(outcomes))
    assert isinstance(console.file, io.StringIO)
    assert " 1.50 " in console.file.getvalue()  # 9 tokens in 6 steps
