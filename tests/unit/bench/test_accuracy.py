"""The parts of the accuracy benchmark: tasks, judgement, counts, and the client of the pair."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from tools.bench.accuracy import ORACLE, generate, pair_runs, problems, response_of
from tools.bench.accuracy_report import Response, print_report, summary
from tools.bench.documents import RETRIEVAL_MODEL
from tools.bench.retrieval import Answer, Retrieval, judge, retrievals

TASK = Retrieval(
    512,
    "Question: amber falcon, calm otter?",
    (7, 8),
    (Answer("amber falcon", "58213", 0.1), Answer("calm otter", "4012", 0.9)),
)


# --- tasks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [512, 2048])
def test_a_task_has_its_answers_in_its_prompt_where_it_says(length: int) -> None:
    for retrieval in retrievals(length, 3):
        content = retrieval.content
        document, _, question = content.rpartition("\nQuestion:")
        assert len(retrieval.answers) > 1
        assert question == " " + ", ".join(answer.key for answer in retrieval.answers) + "?"
        for answer in retrieval.answers:
            assert document.count(f"of {answer.key} is {answer.value}.") == 1
            share = document.index(f"of {answer.key} is {answer.value}.") / len(content)
            assert abs(share - answer.depth) < 0.05
        assert abs(len(retrieval.token_ids) - length) < 40


def test_tasks_are_those_that_reports_of_earlier_versions_have() -> None:
    """Equal tasks let a report's answers be compared with an earlier report's, and by ``--oracle-from``."""
    found = hashlib.sha256(repr(retrievals(512, 4)).encode()).hexdigest()
    assert found.startswith("3be656d80d09e6f8")


def test_the_chat_template_gives_the_token_ids_of_a_task() -> None:
    tokenizer = AutoTokenizer.from_pretrained(RETRIEVAL_MODEL, local_files_only=True)
    for retrieval in retrievals(512, 2):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": retrieval.content}], add_generation_prompt=True, return_dict=False
        )
        assert tuple(ids) == retrieval.token_ids


# --- judgement --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Answer: amber falcon is 58213. calm otter is 4012.", [True, True]),
        ("amber falcon is 4012. calm otter is 58213.", [False, False]),
        ("amber falcon is 582134. calm otter is 401.", [False, False]),
        ("58213 4012", [False, False]),
        ("amber falcon is 58213.", [True, False]),
        ("", [False, False]),
    ],
)
def test_only_the_number_that_follows_its_key_is_right(response: str, right: list[bool]) -> None:
    assert judge(response, TASK.answers) == right


# --- counts -----------------------------------------------------------------------------------------------


def responses(wrong_tokens: bool = False) -> list[Response]:
    right, half = "amber falcon is 58213. calm otter is 4012.", "amber falcon is 58213."
    first: dict[str, Any] = {"tokens": (1, 2), "mode": "hisparse", "hits": 3, "misses": 1}
    first |= {"num_output_tokens": 10, "num_drafted": 9, "num_accepted": 6}
    second: dict[str, Any] = {"tokens": (4,) if wrong_tokens else (3,), "mode": "hisparse"}
    return [
        response_of(ORACLE, TASK, right, tokens=(1, 2)),
        response_of(ORACLE, TASK, half, tokens=(3,)),
        response_of("of some prompts", TASK, "", tokens=(9,)),
        response_of("hisparse", TASK, right, **first),
        response_of("hisparse", TASK, half, **second, num_output_tokens=4),
    ]


def test_summary_counts_by_length_and_depth_and_by_step() -> None:
    """The hisparse answers' 14 tokens include 6 accepted drafts, so 8 steps made them."""
    found = summary(responses())
    assert found[ORACLE]["lengths"] == {"512": [3, 4, 1, 2]}
    assert found[ORACLE]["depths"] == [[2, 2], [0, 0], [0, 0], [0, 0], [1, 2]]
    assert found["hisparse"]["modes"] == {"hisparse": 2}
    assert (found["hisparse"]["num_identical"], found["hisparse"]["num_compared"]) == (2, 2)
    assert found["of some prompts"]["num_compared"] == 0
    assert found["of some prompts"]["lengths"] == {"512": [0, 2, 0, 1]}
    names = ("num_output_tokens", "num_drafted", "num_accepted", "tokens_per_step")
    assert [found["hisparse"][name] for name in names] == [14, 9, 6, 1.75]
    assert [found[ORACLE][name] for name in names] == [0, 0, 0, None]


def test_tokens_are_compared_with_the_first_systems() -> None:
    *oracles, _, first, second = responses(wrong_tokens=True)
    found = summary([first, second, *oracles])
    assert found["hisparse"]["num_compared"] == 0
    assert (found[ORACLE]["num_identical"], found[ORACLE]["num_compared"]) == (1, 2)


def test_a_request_that_fails_leaves_the_others_compared_and_the_mean_length_as_it_is() -> None:
    served: dict[str, Any] = {"tokens": (1, 2), "num_prompt_tokens": 500}
    failed: dict[str, Any] = {"error": "HTTP 503: no"}
    found = summary(
        [
            *(response_of("dense", TASK, "", **facts) for facts in (served, failed, served)),
            *(response_of("hisparse", TASK, "", **facts) for facts in (served, served, failed)),
        ]
    )
    assert (found["hisparse"]["num_identical"], found["hisparse"]["num_compared"]) == (1, 2)
    assert [entry["mean_prompt_tokens"] for entry in found.values()] == [500, 500]


def test_pairs_differ_in_drafts_and_have_hot_buffers_for_them() -> None:
    runs = list(pair_runs(64, [0, 1, 3]))
    assert [(num_drafts, buffer) for num_drafts, buffer, _ in runs] == [(0, 192), (0, 65), (1, 192), (3, 260)]
    names = [name for _, _, modes in runs for name, _ in modes]
    assert names[:4] == ["dense", "hisparse", "auto", "hisparse, buffer 65"]
    assert "dense, 1 draft" in names
    assert names[-3:] == ["dense, 3 drafts", "hisparse, 3 drafts", "auto, 3 drafts"]
    assert len(set(names)) == len(names)


def test_other_tokens_fail_a_run_in_float32_alone() -> None:
    for dtype, kv_dtype, wrong, expected in (
        ("float32", "auto", True, 1),
        ("float32", "auto", False, 0),
        ("float32", "fp8_e4m3", True, 0),
        ("bfloat16", "auto", True, 0),
    ):
        answers = responses(wrong)
        facts = {"dtype": dtype, "kv_cache_dtype": kv_dtype}
        found = problems({**facts, "responses": answers, "systems": summary(answers)})
        assert len(found) == expected, (dtype, wrong)


def test_a_request_that_fails_is_counted_wrong_and_fails_the_run() -> None:
    answers = [response_of("hisparse", TASK, "", error="HTTP 503: no")]
    found = summary(answers)
    assert found["hisparse"]["lengths"] == {"512": [0, 2, 0, 1]}
    assert found["hisparse"]["num_failed"] == 1
    measured = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "responses": answers, "systems": found}
    assert problems(measured) == ["hisparse, 512 tokens: HTTP 503: no"]


def test_a_report_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"systems": summary(responses())}, Console(width=140))
    printed = capsys.readouterr().out
    assert "75.0% 3/4" in printed
    assert "2 of 2" in printed
    assert "1.75 66.7% 6/9" in " ".join(printed.split())


# --- clients ----------------------------------------------------------------------------------------------


def answering(status: int, body: object, seen: list[httpx.Request]) -> httpx.Client:
    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, json=body)

    return httpx.Client(transport=httpx.MockTransport(handle))


def test_generate_sends_the_tokens_and_judges_the_answer() -> None:
    seen: list[httpx.Request] = []
    drafts = {"spec_draft_token_num": 6, "spec_accept_token_num": 4}
    meta: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": 9, **drafts}
    meta["hisparse"] = {"mode": "hisparse", "hits": 5, "misses": 2}
    body = {"text": "calm otter is 4012.", "output_ids": [3, 4], "meta_info": meta}
    with answering(200, body, seen) as client:
        found = generate(client, "http://host", TASK, "hisparse", True)
    assert str(seen[0].url) == "http://host/generate"
    sent = json.loads(seen[0].content)
    assert (sent["input_ids"], sent["hisparse"]) == ([7, 8], True)
    assert (found.right, found.tokens) == ((False, True), (3, 4))
    assert (found.mode, found.hits, found.misses, found.num_prompt_tokens) == ("hisparse", 5, 2, 7)
    assert (found.num_output_tokens, found.num_drafted, found.num_accepted) == (9, 6, 4)
    assert not found.error


@pytest.mark.parametrize(
    ("status", "body", "message"), [(503, {"error": "full"}, "HTTP 503"), (200, {}, "KeyError")]
)
def test_a_failed_answer_says_why(status: int, body: object, message: str) -> None:
    with answering(status, body, []) as client:
        assert message in generate(client, "http://host", TASK, "hisparse", True).error
