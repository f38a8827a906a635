"""The parts of the accuracy benchmark: tasks, judgement, counts, and the client of an endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from tools.bench.accuracy import CONTROL, ORACLE, chat, failed, generate, judged, pair_runs, problems
from tools.bench.accuracy_report import Response, print_report, summary
from tools.bench.retrieval import RETRIEVAL_MODEL, Answer, Task, judge, read_tasks, retrievals
from tools.checkpoints import oracle

TASK = Task(
    (Answer("58213", "amber falcon", 0.1), Answer("4012", "calm otter", 0.9)),
    ({"role": "user", "content": "Question: amber falcon, calm otter?"},),
    length=512,
)


# --- tasks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [512, 2048])
def test_a_task_has_its_answers_in_its_prompt_where_it_says(length: int) -> None:
    for retrieval in retrievals(length, 3):
        content = retrieval.task.messages[0]["content"]
        document, _, question = content.rpartition("\nQuestion:")
        assert len(retrieval.task.answers) > 1
        assert question == " " + ", ".join(answer.after for answer in retrieval.task.answers) + "?"
        for answer in retrieval.task.answers:
            assert document.count(f"of {answer.after} is {answer.value}.") == 1
            assert answer.depth is not None
            share = document.index(f"of {answer.after} is {answer.value}.") / len(content)
            assert abs(share - answer.depth) < 0.05
        assert abs(len(retrieval.token_ids) - length) < 40


def test_the_chat_template_gives_the_token_ids_of_a_task() -> None:
    tokenizer = AutoTokenizer.from_pretrained(RETRIEVAL_MODEL, local_files_only=True)
    for retrieval in retrievals(512, 2):
        ids = tokenizer.apply_chat_template(
            list(retrieval.task.messages), add_generation_prompt=True, return_dict=False
        )
        assert tuple(ids) == retrieval.token_ids


def test_an_instruction_stands_before_the_document() -> None:
    plain, instructed = (retrievals(512, 1, text)[0].task for text in ("", "Answer briefly."))
    content = plain.messages[0]["content"]
    assert instructed.messages[0]["content"] == f"Answer briefly.\n\n{content}"


def test_a_file_of_tasks_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [
        {"prompt": "Capital of France?", "answers": [{"value": "Paris"}], "length": 5},
        {"messages": [{"role": "user", "content": "2+2?"}], "answers": [{"value": "4", "depth": 0.5}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_tasks(path)
    assert first.messages == ({"role": "user", "content": "Capital of France?"},)
    assert (first.length, first.answers[0].value) == (5, "Paris")
    assert second.answers[0].depth == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "answers": [{"value": "b"}]}\n{"prompt": 1, "answers": []}', "line 2"),
        ('{"answers": [{"value": "b"}]}', "expected messages or prompt"),
        ('{"prompt": "a", "answers": []}', "at least one answer"),
        ("", "no tasks"),
        ("no json", "line 1"),
    ],
)
def test_a_malformed_file_of_tasks_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_tasks(path)


# --- judgement --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Answer: amber falcon is 58213. calm otter is 4012.", [True, True]),
        ("amber falcon: 58213\ncalm otter: 4012", [True, True]),
        ("**Amber Falcon** is **58213**; calm otter = 4012", [True, True]),
        ("amber falcon is 4012. calm otter is 58213.", [False, False]),
        ("amber falcon is 582134. calm otter is 4012.5", [False, False]),
        ("amber falcon is 58,213. calm otter is unknown, 4012", [False, False]),
        ("58213 4012", [False, False]),
        ("amber falcon is 58213.", [True, False]),
        ("", [False, False]),
    ],
)
def test_only_the_number_that_follows_its_key_is_right(response: str, right: list[bool]) -> None:
    assert judge(response, TASK.answers) == right


def test_an_answer_without_a_key_may_stand_anywhere_as_a_whole_word() -> None:
    answers = (Answer("Paris"),)
    assert judge("It is paris, of course.", answers) == [True]
    assert judge("It is Parisian.", answers) == [False]


# --- counts -----------------------------------------------------------------------------------------------


def responses(wrong_tokens: bool = False) -> list[Response]:
    right, half = "amber falcon is 58213. calm otter is 4012.", "amber falcon is 58213."
    first: dict[str, Any] = {"tokens": (1, 2), "mode": "hisparse", "hits": 3, "misses": 1}
    first |= {"num_output_tokens": 10, "num_drafted": 9, "num_accepted": 6}
    second: dict[str, Any] = {"tokens": (4,) if wrong_tokens else (3,), "mode": "hisparse"}
    return [
        judged(ORACLE, TASK, right, tokens=(1, 2)),
        judged(ORACLE, TASK, half, tokens=(3,)),
        judged(CONTROL, TASK, "", tokens=(9,)),
        judged("hisparse", TASK, right, **first),
        judged("hisparse", TASK, half, **second, num_output_tokens=4),
    ]


def test_summary_counts_by_length_and_depth_and_by_step() -> None:
    """Of 14 tokens 2 are the prefill node's and 6 accepted drafts: 6 steps made 12."""
    found = summary(responses())
    assert found[ORACLE]["lengths"] == {"512": [3, 4, 1, 2]}
    assert found[ORACLE]["depths"] == [[2, 2], [0, 0], [0, 0], [0, 0], [1, 2]]
    assert found["hisparse"]["modes"] == {"hisparse": 2}
    assert (found["hisparse"]["num_identical"], found["hisparse"]["num_compared"]) == (2, 2)
    assert found[CONTROL]["num_compared"] == 0
    assert found[CONTROL]["lengths"] == {"512": [0, 2, 0, 1]}
    names = ("num_output_tokens", "num_drafted", "num_accepted", "tokens_per_step")
    assert [found["hisparse"][name] for name in names] == [14, 9, 6, 2.0]
    assert [found[ORACLE][name] for name in names] == [0, 0, 0, None]


def test_tokens_are_compared_with_the_first_systems() -> None:
    without_oracle = [response for response in responses(wrong_tokens=True) if response.system != CONTROL]
    found = summary([*without_oracle[2:], *without_oracle[:2]])
    assert found["hisparse"]["num_compared"] == 0
    assert (found[ORACLE]["num_identical"], found[ORACLE]["num_compared"]) == (1, 2)


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
    answers = [failed("hisparse", TASK, "HTTP 503: no")]
    found = summary(answers)
    assert found["hisparse"]["lengths"] == {"512": [0, 2, 0, 1]}
    assert found["hisparse"]["num_failed"] == 1
    assert problems({"responses": answers, "systems": found}) == ["hisparse, 512 tokens: HTTP 503: no"]


def test_a_report_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"systems": summary(responses())}, Console(width=140))
    printed = capsys.readouterr().out
    assert "75.0% 3/4" in printed
    assert "2 of 2" in printed
    assert "2.00 66.7% 6/9" in " ".join(printed.split())


# --- clients ----------------------------------------------------------------------------------------------


def answering(status: int, body: object, seen: list[httpx.Request]) -> httpx.Client:
    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, json=body)

    return httpx.Client(transport=httpx.MockTransport(handle))


def test_chat_sends_the_task_and_judges_the_answer() -> None:
    seen: list[httpx.Request] = []
    body = {
        "choices": [{"message": {"content": "calm otter is 4012."}}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 9,
            "completion_tokens_details": {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2},
            "hisparse": {"mode": "hisparse", "hits": 5, "misses": 2},
        },
    }
    with answering(200, body, seen) as client:
        found = chat(client, "http://host/v1/", "hisparse true", {"model": "m", "hisparse": True}, TASK)
    assert str(seen[0].url) == "http://host/v1/chat/completions"
    assert json.loads(seen[0].content) == {"model": "m", "hisparse": True, "messages": list(TASK.messages)}
    assert found.right == (False, True)
    assert (found.mode, found.hits, found.misses, found.num_prompt_tokens) == ("hisparse", 5, 2, 7)
    assert (found.num_output_tokens, found.num_drafted, found.num_accepted) == (9, 6, 4)
    assert not found.error


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [(503, {"error": "full"}, "HTTP 503"), (200, {"choices": []}, "IndexError"), (200, {}, "KeyError")],
)
def test_a_failed_answer_says_why(status: int, body: object, message: str) -> None:
    with answering(status, body, []) as client:
        assert message in chat(client, "http://host/v1", "m", {}, TASK).error
        retrieval = retrievals(512, 1)[0]
        if status != 200 or body == {}:
            assert message in generate(client, "http://host", retrieval, "hisparse", True).error


# --- the control ------------------------------------------------------------------------------------------


def test_selection_by_lot_is_another_and_never_of_the_future() -> None:
    model = oracle.load(RETRIEVAL_MODEL)
    prompt = retrievals(512, 1)[0].token_ids[:300]
    ids = torch.tensor([prompt])
    own = model(ids).logits
    oracle.select_at_random(model, seed=0)
    by_lot = model(ids).logits
    assert not torch.allclose(own[0, -1], by_lot[0, -1])
    # Up to index_topk tokens everything that is past is selected, by lot or not.
    top_k = model.config.index_topk
    torch.testing.assert_close(own[0, :top_k], by_lot[0, :top_k])


def test_a_model_without_indexers_has_no_control() -> None:
    with pytest.raises(ValueError, match="no indexer"):
        oracle.select_at_random(torch.nn.Linear(1, 1), seed=0)
