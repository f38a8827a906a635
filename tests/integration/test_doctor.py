"""``hisparse-pd doctor`` as operators run it: on one machine alone, and on two that measure each other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.commands.doctor.bandwidth import MESSAGE_BYTES
from tests.integration.harness import REPO
from tests.mooncake_master import Master

TIMEOUT_SECS = 120.0
COMMAND = [sys.executable, "-m", "hisparse_pd", "doctor", "--json"]


def doctor(*options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*COMMAND, *options], cwd=REPO, capture_output=True, text=True, timeout=TIMEOUT_SECS
    )
    report = json.loads(done.stdout)
    assert isinstance(report, dict), done.stderr
    return done.returncode, report


@pytest.mark.slow
def test_a_machine_alone() -> None:
    status, report = doctor("--transfer-protocol", "auto", "--host-pool-gib", "0.001")
    assert (status, report["ok"]) == (0, True), report
    assert {check["status"] for check in report["checks"]} <= {"ok", "info", "warn"}
    assert report["transport"]["protocol"] in ("tcp", "rdma")


@pytest.mark.slow
def test_two_machines_measure_each_other() -> None:
    serving = subprocess.Popen(
        [*COMMAND, "--serve", "--port", "0"],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        offer = json.loads(serving.stdout.readline())
        assert offer["transport"]["protocol"] == "tcp"
        status, report = doctor("--peer", f"127.0.0.1:{offer['port']}")
        assert (status, report["ok"]) == (0, True), report
        assert [(rate["over"], rate["message_bytes"]) for rate in report["bandwidth"]] == [
            (over, size) for over in ("tcp", "shm") for size in MESSAGE_BYTES
        ]
        (peer,) = [check for check in report["checks"] if check["name"].startswith("peer")]
        assert peer["found"].endswith("GB/s over shm")
        assert all(rate["bytes_per_sec"] > 0 for rate in report["bandwidth"])
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(TIMEOUT_SECS) == 0
    finally:
        serving.kill()
        serving.communicate()


@pytest.mark.slow
def test_a_store(tmp_path: Path) -> None:
    """An object is written, read and removed; without a master the remedy says what to start."""
    master = Master(tmp_path)
    try:
        status, report = doctor("--kv-store", master.address)
        assert (status, report["ok"]) == (0, True), report
        (check,) = [check for check in report["checks"] if check["name"] == f"store {master.address}"]
        assert check["found"] == "an object was written, read and removed over tcp"
    finally:
        master.kill()
    status, report = doctor("--kv-store", master.address)
    assert (status, report["ok"]) == (1, False)
    (check,) = [check for check in report["checks"] if check["status"] == "fail"]
    assert check["found"].startswith(f"no answer from the store at {master.address}")
    assert check["remedy"].startswith("start mooncake_master there")
