"""The benchmark of the layer-wise push runs and reports what it promises; its numbers are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.layer_push_report import draw, print_report


@pytest.mark.slow
def test_the_quick_run_reports_every_setting(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.layer_push", "--quick", "--no-pair", "--out", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "Tail of 256 tokens x 61 layers" in finished.stdout

    report = json.loads((tmp_path / "layer_push.json").read_text())
    assert {"commit", "cpu", "num_cpus", "date", "command", "mooncake"} <= set(report["facts"])
    settings = [0, 1, 2, 4, 8, 16]
    assert [(row["zone"], row["num_prompts"], row["push_layers"]) for row in report["tails"]] == [
        *((zone, 1, layers) for zone in ("fresh", "fragmented") for layers in settings),
        *(("fragmented", 4, layers) for layers in (0, 1, 1, 1, 1)),
    ]
    for row in report["tails"]:
        assert 0 < row["tail"]["min"] <= row["tail"]["median"] <= row["tail"]["max"]
        most = 1 if row["push_layers"] == 0 else -(-61 // row["push_layers"])
        assert 2 <= row["batches"]["min"] / row["num_prompts"] <= most + 1
    assert (tmp_path / "layer_push.png").read_bytes().startswith(b"\x89PNG")


def test_first_tokens_are_reported_beside_the_tails(tmp_path: Path) -> None:
    secs = {"median": 0.2, "min": 0.1, "max": 0.4, "values": [0.1, 0.2, 0.4]}
    saved = {"median": 0.003, "low": -0.001, "high": 0.004}
    ttft = [
        {"num_tokens": num_tokens, "push_layers": layers, "secs": secs, "saved_secs": saved}
        for num_tokens in (1024, 4096)
        for layers in (0, 1)
    ]
    measured = dict.fromkeys(("tail", "hooks", "plan", "forward", "transport", "batches"), secs)
    tail = {
        "zone": "fresh",
        "num_tokens": 64,
        "num_prompts": 1,
        "num_layers": 61,
        "layer_millis": 1.0,
        "push_layers": 0,
        "min_batch_bytes": 0,
        **measured,
    }
    facts = {"cpu": "a CPU", "num_cpus": 2, "date": "today", "commit": "0" * 40}
    report = {"ttft": ttft, "tails": [tail], "num_threads": 1, "facts": facts}
    console = Console(record=True, width=150, file=(tmp_path / "console").open("w"))
    with console.file:
        print_report(console, report)
    text = console.export_text()
    assert "200.0 (100.0-400.0)" in text
    assert "+3.0 (-1.0 to +4.0)" in text
    draw(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
