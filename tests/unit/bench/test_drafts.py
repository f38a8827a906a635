"""What the demo and the accuracy benchmark say of drafts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tools.bench.demo import Outcome, expect_drafts, make_cases, report
from tools.bench.drafts import drafts_of, has_draft_layer, tokens_per_step
from tools.bench.retrieval import RETRIEVAL_MODEL


def test_drafts_are_read_in_openais_words_and_in_sglangs() -> None:
    details = {"accepted_prediction_tokens": 31, "rejected_prediction_tokens": 20}
    assert drafts_of({"completion_tokens_details": details}) == (51, 31)
    assert drafts_of({"spec_draft_token_num": 51, "spec_accept_token_num": 31}) == (51, 31)
    # What OpenAI's client gives for a usage object without them.
    assert drafts_of({"completion_tokens": 4, "completion_tokens_details": None}) == (0, 0)


@pytest.mark.parametrize(
    ("num_tokens", "num_accepted", "num_answers", "expected"),
    [(50, 0, 1, 1.0), (50, 28, 1, 49 / 21), (100, 56, 2, 49 / 21), (1, 0, 1, None), (0, 0, 0, None)],
)
def test_tokens_per_step_leave_out_what_the_prefill_node_drew(
    num_tokens: int, num_accepted: int, num_answers: int, expected: float | None
) -> None:
    assert tokens_per_step(num_tokens, num_accepted, num_answers) == expected


def test_a_checkpoint_says_whether_it_has_a_draft_layer(tmp_path: Path) -> None:
    assert has_draft_layer(RETRIEVAL_MODEL)
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 0}))
    assert not has_draft_layer(tmp_path)


def test_the_demo_fails_when_a_mode_has_no_accepted_draft() -> None:
    case = make_cases()[0]
    accepted = [("dense", 3), ("hisparse", 0), ("dense", 0), ("hisparse", 0)]
    outcomes = [
        Outcome(case, num_output_tokens=9, mode=mode, num_drafted=6, num_accepted=count)
        for mode, count in accepted
    ]
    expect_drafts(outcomes)
    problems = ["no draft of a hisparse request was accepted"]
    assert [outcome.problems for outcome in outcomes] == [[], [], [], problems]
    console = Console(file=io.StringIO(), width=140)
    console.print(report(outcomes))
    assert isinstance(console.file, io.StringIO)
    assert " 1.60 " in console.file.getvalue()  # 8 tokens in 5 steps
