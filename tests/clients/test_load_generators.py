"""aiperf and guidellm put the pair under a short load; their reports show that all answers were right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.commands import run
from tests.clients.conftest import Served
from tests.clients.notes import NUMBERS, answer, question, sentences

pytestmark = pytest.mark.clients

BIN = Path(sys.executable).parent
NUM_REQUESTS = 12
NUM_CLIENTS = 3
MAX_TOKENS = 32
POLL_SECS = "1"
"""What guidellm waits for its next update. It forgets the last answer if this time is over just when that
comes, which its own 0.1 s often are on a busy machine."""


def write_prompts(path: Path, field: str, ending: str = "") -> None:
    """Write a line for each question, several times over."""
    lines = [json.dumps({field: question(key) + ending}) for key in NUMBERS]
    path.write_text("\n".join(lines * (NUM_REQUESTS // len(lines))) + "\n")


@pytest.mark.parametrize(
    ("endpoint", "limit"),
    [("chat", "max_tokens"), ("responses", "max_output_tokens"), ("messages", "max_tokens")],
)
def test_aiperf(tmp_path: Path, demo: Served, endpoint: str, limit: str) -> None:
    write_prompts(tmp_path / "prompts.jsonl", "text")
    # Offline, aiperf finds tokenizers only in the cache of their hub.
    cached = tmp_path / "hf" / "hub" / "models--demo--retrieval"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("local")
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / "local").symlink_to(demo.model_path)
    run(
        tmp_path,
        *(str(BIN / "aiperf"), "profile", "--model", demo.model, "--url", demo.url, "--streaming"),
        *("--endpoint-type", endpoint, "--tokenizer", "demo/retrieval", "--use-server-token-count"),
        *("--input-file", "prompts.jsonl", "--custom-dataset-type", "single_turn"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", str(NUM_CLIENTS), "--workers-max", "1"),
        *("--extra-inputs", "temperature:0", "--extra-inputs", f"{limit}:{MAX_TOKENS}"),
        *("--output-artifact-dir", "out", "--export-outputs-json", "--no-gpu-telemetry", "--ui", "none"),
        HF_HOME=str(tmp_path / "hf"),
    )
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report.get("error_request_count")
    assert not report["was_cancelled"]
    assert report["time_to_first_token"]["count"] == NUM_REQUESTS
    assert 5 < report["output_sequence_length"]["avg"] < MAX_TOKENS
    outputs = json.loads((tmp_path / "out" / "outputs.json").read_text())["data"]
    said = sorted(entry["response_text"] for entry in outputs)
    assert said == sorted(NUM_REQUESTS // len(NUMBERS) * [answer(key) for key in NUMBERS])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(tmp_path: Path, demo: Served, path: str) -> None:
    is_chat = path != "/v1/completions"
    write_prompts(tmp_path / "prompts.jsonl", "prompt", "" if is_chat else "\nAnswer:")
    backend: dict[str, Any] = {
        "kind": "openai_http",
        "target": demo.url,
        "model": demo.model,
        "request_format": path,
        "max_tokens": MAX_TOKENS,
        "extras": {"body": {"temperature": 0}},
    }
    scenario = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": [NUM_CLIENTS]},
        "constraints": [{"kind": "max_requests", "count": NUM_REQUESTS}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(demo.model_path)},
        "data": [{"kind": "json_file", "path": "prompts.jsonl"}],
        "outputs": [{"kind": "json", "path": "report.json"}],
    }
    (tmp_path / "scenario.json").write_text(json.dumps({"spec": scenario}))
    run(
        tmp_path,
        *(str(BIN / "guidellm"), "run", "--config", "scenario.json", "--disable-console"),
        HF_HOME=str(tmp_path / "hf"),
        GUIDELLM__MP_POLL_INTERVAL=POLL_SECS,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert made == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    said = sorted(request["output"] for request in benchmark["requests"]["successful"])
    right = [answer(key) if is_chat else sentences(key) for key in NUMBERS]
    assert said == sorted(NUM_REQUESTS // len(NUMBERS) * right)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["count"] == NUM_REQUESTS
