"""``hisparse-pd doctor`` as operators run it: on one machine alone, and on two that measure each other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from hisparse_pd.commands.doctor.bandwidth import MESSAGE_BYTES
from tests.integration.harness import REPO

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
