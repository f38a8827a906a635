"""``hisparse-pd doctor`` between the machines: what it reports of RDMA, and the bandwidth it measures."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from hisparse_pd.commands.doctor.bandwidth import MESSAGE_BYTES
from tests.rdma.machines import DEVICE, Machine

COMMAND = (sys.executable, "-m", "hisparse_pd", "doctor", "--json", "--transfer-protocol", "rdma")

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1800)]


def test_the_doctors_of_two_machines_measure_rdma(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    serving = second.start(*COMMAND, "--serve", "--host", second.address, "--port", "0")
    try:
        offer = json.loads(serving.read_line())
        assert (offer["transport"]["protocol"], offer["transport"]["devices"]) == ("rdma", [DEVICE])
        assert offer["session"].startswith(f"{second.address}:")
        before = second.counters()["rcvd_pkts"]
        done = first.run(
            *(*COMMAND, "--advertise-host", first.address, "--ib-device", DEVICE),
            *("--peer", f"{second.address}:{offer['port']}", "--peer-timeout-secs", "300"),
        )
        serving.signal(signal.SIGTERM)
        assert serving.wait() == 0
    finally:
        serving.close()
    report = json.loads(done.stdout)
    assert report["ok"], report
    checks = {check["name"]: check for check in report["checks"]}
    for name in (f"RDMA {DEVICE}", "locked memory", "advertised address", "KV transport"):
        assert checks[name]["status"] == "ok", checks[name]
    assert f"GID 1 {first.address} of eth0, RoCE v2" in checks[f"RDMA {DEVICE}"]["found"]
    assert [rate["message_bytes"] for rate in report["bandwidth"]] == list(MESSAGE_BYTES)
    assert {rate["over"] for rate in report["bandwidth"]} == {"rdma"}, "they are two machines"
    assert second.counters()["rcvd_pkts"] > before
