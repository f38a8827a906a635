"""The transfer benchmark runs and reports what it promises; its numbers are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_quick_run_reports_every_zone(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tools.bench.transfer", "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Wire, GB/s" in finished.stdout

    report = json.loads((tmp_path / "transfer.json").read_text())
    assert {"commit", "cpu", "num_cpus", "date", "command", "mooncake"} <= set(report["facts"])
    assert [(row["zone"], row["item_bytes"]) for row in report["wire"]] == [
        (zone, item_bytes) for zone in ("fresh", "fragmented") for item_bytes in (1152, 656)
    ]
    for row in report["wire"]:
        assert row["num_bytes"] == row["num_tokens"] * row["item_bytes"] * row["num_layers"]
        for key in ("shared_memory", "sender", "raw", "of_raw"):
            assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
    num_descriptors = [row["num_descriptors"] for row in report["wire"]]
    assert num_descriptors == sorted(num_descriptors)
