"""lm-eval on a task of our own: the model reads numbers out of notes, and every score must be full."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.commands import run
from tests.clients.conftest import Served
from tests.clients.notes import NOTES, NUMBERS, sentences

pytestmark = pytest.mark.clients

GENERATE = """
output_type: generate_until
doc_to_text: "{{notes}}\\nQuestion: {{key}}?{{opening}}"
doc_to_target: "{{right}}"
generation_kwargs: {until: ["<eos>"], max_gen_toks: 32, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
output_type: multiple_choice
doc_to_text: "{{notes}}\\nQuestion: {{key}}?{{opening}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(right)}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
SCORE = """
output_type: loglikelihood
doc_to_text: "{{notes}}\\nQuestion: {{key}}?{{opening}}"
doc_to_target: "{{right}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
"""


def evaluate(
    tmp_path: Path,
    demo: Served,
    task: str,
    *options: str,
    chats: bool = False,
    batch_size: int = 1,
    tokenizer: str = "huggingface",
) -> dict[str, Any]:
    """Run a task over all notes; return its metrics."""
    documents = [
        {
            "notes": NOTES,
            "key": key,
            "opening": "" if chats else "\nAnswer:",
            "right": f"Answer:{sentences(key)}" if chats else sentences(key),
            "choices": [f" {key} is {number}." for number in NUMBERS.values()],
        }
        for key in NUMBERS
    ]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    lines = [f"{name}: {json.dumps(value)}" for name, value in {"task": "numbers", **source}.items()]
    (tmp_path / "numbers.yaml").write_text("\n".join([*lines, "test_split: test", task.strip()]) + "\n")
    path = "chat/completions" if chats else "completions"
    model = {
        "model": demo.model,
        "base_url": f"{demo.v1}/{path}",
        "tokenizer": demo.model_path,
        "tokenizer_backend": "None" if chats else tokenizer,
        "max_length": 8192,
        "max_retries": 1,
        "num_concurrent": 2,
    }
    run(
        tmp_path,
        *(sys.executable, "-m", "lm_eval", "run", "--tasks", "numbers", "--include_path", str(tmp_path)),
        *("--model", "local-chat-completions" if chats else "local-completions"),
        *("--model_args", *(f"{name}={value}" for name, value in model.items())),
        *("--batch_size", str(batch_size), "--output_path", str(tmp_path / "out"), *options),
        HF_HOME=str(tmp_path / "hf"),
    )
    (results,) = (tmp_path / "out").rglob("results_*.json")
    told = json.loads(results.read_text())
    assert told["n-samples"]["numbers"]["effective"] == len(NUMBERS)
    metrics: dict[str, Any] = told["results"]["numbers"]
    return metrics


def test_generate_until(tmp_path: Path, demo: Served) -> None:
    assert evaluate(tmp_path, demo, GENERATE, batch_size=3)["exact_match,none"] == 1.0


def test_generate_until_by_chats(tmp_path: Path, demo: Served) -> None:
    metrics = evaluate(tmp_path, demo, GENERATE, "--apply_chat_template", chats=True)
    assert metrics["exact_match,none"] == 1.0


def test_a_choice_by_loglikelihood(tmp_path: Path, demo: Served) -> None:
    """Each of six numbers is scored as the answer; the right one is the likeliest."""
    assert evaluate(tmp_path, demo, CHOOSE, batch_size=6)["acc,none"] == 1.0


@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
def test_loglikelihood(tmp_path: Path, demo: Served, tokenizer: str) -> None:
    """``acc`` is 1 if every token of the right answer is the one that the model would have written."""
    metrics = evaluate(tmp_path, demo, SCORE, tokenizer=tokenizer)
    assert metrics["acc,none"] == 1.0
    assert 1.0 <= metrics["perplexity,none"] < 1.5
