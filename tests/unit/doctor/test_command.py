"""The doctor's checks on fake machines: each of their outcomes, and the report of them."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from hisparse_pd.base.settings import TransportSettings
from hisparse_pd.commands.doctor import command as doctor
from hisparse_pd.commands.doctor.bandwidth import Rate
from hisparse_pd.commands.doctor.checks import (
    Check,
    CudaFacts,
    Status,
    check_address,
    check_cuda,
    check_descriptors,
    check_devices,
    check_gpu_direct,
    check_memlock,
    check_memory,
    check_mooncake,
    check_pinned,
    check_transport,
    check_verbs,
    cuda_facts,
    mooncake_version,
)
from hisparse_pd.commands.doctor.command import Report, examine, print_report
from hisparse_pd.commands.doctor.lane import check_lane, check_shared_pages
from hisparse_pd.commands.doctor.numa import check_numa
from hisparse_pd.commands.doctor.settings import DoctorSettings
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.transfer.transport import AskedProtocol, Transport
from tests.unit.memory.numa_machines import two_sockets
from tests.unit.transfer.fake_machine import GIB, INFINIBAND, LINK_LOCAL_GID, ROCE, FakeDevice, FakeMachine

HOST = "192.0.2.7"
OK, INFO, WARN, FAIL = Status.OK, Status.INFO, Status.WARN, Status.FAIL
H200 = CudaFacts("2.13.0", "13.0", ("NVIDIA H200 (140.0 GiB)",))
NO_CUDA = CudaFacts("2.13.0", "", error="this build of torch has no CUDA")
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
DOWN = replace(ROCE, name="mlx5_1", uverbs="uverbs1", state="1: DOWN")


@pytest.fixture(autouse=True, scope="module")
def packages_are_listed_once() -> Iterator[None]:
    """List the installed packages once: this reads files of all of them, in 0.3 s."""
    with pytest.MonkeyPatch.context() as patch:
        listed_once = functools.cache(metadata.packages_distributions)
        patch.setattr(metadata, "packages_distributions", listed_once)
        yield


def fail_to_load(error: type[Exception]) -> Callable[[], Any]:
    def load() -> Any:
        raise error("libibverbs.so.1: cannot open shared object file")

    return load


def assert_told(check: Check, status: Status, words: str = "", remedy: str = "") -> None:
    """Check the words of what was found, and that a remedy comes with warnings and failures only."""
    assert check.status is status
    assert words in check.found
    assert remedy in check.remedy
    assert bool(check.remedy) is (status in (WARN, FAIL))


# --- software ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "missing"), [("10.0.0.5", FAIL), ("127.0.0.1", WARN)])
def test_mooncake_and_its_library(tmp_path: Path, host: str, missing: Status) -> None:
    """A failure is only a warning on loopback, which may not need them."""
    good, bad = FakeMachine(tmp_path / "a", ROCE), FakeMachine(tmp_path / "b")
    bad.machine = replace(bad.machine, verbs_devices=fail_to_load(OSError))
    assert_told(check_verbs(host, good.machine), OK, "loads, devices with a driver: mlx5_0")
    assert_told(check_mooncake(host, mooncake_version), OK, "mooncake-transfer-engine")
    for check in (check_verbs(host, bad.machine), check_mooncake(host, fail_to_load(ImportError))):
        assert_told(check, missing, "cannot open shared object file", "libibverbs1")


@pytest.mark.parametrize(
    ("device", "facts", "driver", "status", "words"),
    [
        ("cuda", H200, DRIVER, OK, "H200 (140.0 GiB); driver 580.95.05, torch 2.13.0, CUDA 13.0"),
        ("cpu", H200, DRIVER, INFO, "H200"),
        ("cuda:0", NO_CUDA, DRIVER, FAIL, "this build of torch has no CUDA; driver 580.95.05"),
        ("cpu", NO_CUDA, "", INFO, "no CUDA; driver none"),
        ("cuda", CudaFacts(error="ImportError: no torch"), DRIVER, FAIL, "ImportError: no torch"),
        ("cpu", CudaFacts(error="ImportError: no torch"), DRIVER, FAIL, "torch cannot be imported: Import"),
    ],
)
def test_cuda(tmp_path: Path, device: str, facts: CudaFacts, driver: str, status: Status, words: str) -> None:
    fake = FakeMachine(tmp_path)
    fake.write("proc/driver/nvidia/version", driver)
    assert_told(check_cuda(device, facts, fake.machine), status, words)


@pytest.mark.parametrize(
    ("device", "facts", "status"),
    [
        ("cuda", H200, OK),
        ("cpu", H200, INFO),
        ("cpu", NO_CUDA, INFO),
        ("cuda", replace(H200, pin_error="RuntimeError: out of memory"), FAIL),
        ("cpu", replace(H200, pin_error="RuntimeError: out of memory"), INFO),
    ],
)
def test_pinned_memory(device: str, facts: CudaFacts, status: Status) -> None:
    assert_told(check_pinned(device, facts), status, facts.pin_error)


# --- memory -----------------------------------------------------------------------------------------------


POD = {
    "proc/self/cgroup": "0::/pod/one\n",
    "sys/fs/cgroup/pod/one/memory.max": f"{16 * GIB}\n",
    "sys/fs/cgroup/pod/one/memory.current": f"{6 * GIB}\n",
    "sys/fs/cgroup/pod/one/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
}
ABOVE = {f"sys/fs/cgroup/{group}/memory.current": "0" for group in ("pod", ".")} | {
    "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
    "sys/fs/cgroup/memory.max": str(9 * GIB),
}
VERSION_1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/pod\n0::/\n",
    "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": str(4 * GIB),
    "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": str(5 * GIB),
    "sys/fs/cgroup/memory/pod/memory.stat": "total_inactive_file 10\n",
}


@pytest.mark.parametrize(
    ("files", "num_gib", "status", "words"),
    [
        ({}, 0, INFO, "32.0 GiB in the machine"),
        ({}, 32, OK, "32.0 GiB in the machine"),
        ({}, 33, FAIL, "32.0 GiB in the machine"),
        (POD, 13, FAIL, "12.0 GiB in the control group"),
        (POD, 12, OK, "12.0 GiB in the control group"),
        (POD | ABOVE, 9, FAIL, "8.0 GiB in the control group"),
        (POD | ABOVE | {"sys/fs/cgroup/pod/one/memory.max": "max"}, 8, OK, "8.0 GiB in the control group"),
        (VERSION_1, 1, FAIL, "0 bytes in the control group"),
    ],
)
def test_free_memory(tmp_path: Path, files: dict[str, str], num_gib: int, status: Status, words: str) -> None:
    """Free memory is the least of the machine's and of what each control group above leaves."""
    fake = FakeMachine(tmp_path)
    for path, text in files.items():
        fake.write(path, text)
    check = check_memory(num_gib * GIB, fake.machine)
    assert_told(check, status, words)
    assert num_gib == 0 or f"{num_gib}.0 GiB asked for" in check.found


def test_a_machine_that_does_not_tell_its_memory(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.write("proc/meminfo", "")
    assert check_memory(GIB, fake.machine).status is WARN


@pytest.mark.parametrize(
    ("limit", "status", "of_router", "of_node"), [(1024, WARN, 384, 768), (1 << 20, OK, 8192, 8192)]
)
def test_descriptors_are_told_in_connections(
    limit: int, status: Status, of_router: int, of_node: int
) -> None:
    found = f"a router has {of_router} connections at most, a node {of_node}"
    assert_told(check_descriptors(limit), status, found, "nofile" if status is WARN else "")


@pytest.mark.parametrize(
    ("asked", "limit", "num_bytes", "status"),
    [
        ("rdma", None, 64 * GIB, OK),
        ("rdma", 64 * GIB, 64 * GIB, OK),
        ("rdma", 8 << 20, 64 * GIB, FAIL),
        ("auto", 8 << 20, 64 * GIB, WARN),
        ("tcp", 8 << 20, 64 * GIB, INFO),
    ],
)
def test_locked_memory(
    tmp_path: Path, asked: AskedProtocol, limit: int | None, num_bytes: int, status: Status
) -> None:
    fake = FakeMachine(tmp_path, memlock_bytes=lambda: limit)
    assert_told(check_memlock(num_bytes, 1, asked, fake.machine), status)
    fake.grant_ipc_lock()
    lifted = check_memlock(num_bytes, 1, asked, fake.machine)
    assert lifted.status in (OK, INFO)
    assert limit is None or "CAP_IPC_LOCK" in lifted.found


# --- RDMA -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "ib_device", "devices", "statuses"),
    [
        ("rdma", "", [ROCE], [OK]),
        ("rdma", "", [INFINIBAND], [OK]),
        ("rdma", "", [DOWN], [FAIL]),
        ("rdma", "", [ROCE, DOWN], [OK, WARN]),
        ("rdma", "mlx5_0", [ROCE, DOWN], [OK, INFO]),
        ("rdma", "mlx5_1", [ROCE, DOWN], [FAIL, INFO]),
        ("rdma", "mlx5_9", [ROCE], [FAIL, INFO]),
        ("auto", "", [ROCE, DOWN], [OK, WARN]),
        ("auto", "mlx5_1", [ROCE, DOWN], [WARN, INFO]),
        ("tcp", "", [ROCE, DOWN], [INFO, INFO]),
        ("tcp", "", [], [INFO]),
        ("auto", "", [], [WARN]),
        ("rdma", "", [], [FAIL]),
    ],
)
def test_each_device_gets_a_line(
    tmp_path: Path, asked: AskedProtocol, ib_device: str, devices: list[FakeDevice], statuses: list[Status]
) -> None:
    checks = check_devices(asked, ib_device, HOST, FakeMachine(tmp_path, *devices).machine)
    for check, status in zip(checks, statuses, strict=True):
        assert_told(check, status, "" if devices else "class/infiniband")


def test_the_line_of_a_device_shows_port_and_gid(tmp_path: Path) -> None:
    (good,) = check_devices("rdma", "", HOST, FakeMachine(tmp_path / "a", ROCE).machine)
    assert good.found == "4: ACTIVE, Ethernet; GID 3 192.0.2.7 of ens1f0, RoCE v2"
    link_local = replace(ROCE, gids=[(LINK_LOCAL_GID, "RoCE v2")])
    (near,) = check_devices("rdma", "", HOST, FakeMachine(tmp_path / "b", link_local).machine)
    assert "same link only" in near.found
    (other,) = check_devices("rdma", "", "198.51.100.4", FakeMachine(tmp_path / "c", ROCE).machine)
    assert "not the advertised 198.51.100.4" in other.found


@pytest.mark.parametrize(
    ("device", "asked", "has_dma_buf", "status"),
    [
        ("cuda", "rdma", True, OK),
        ("cuda", "rdma", False, FAIL),
        ("cuda", "auto", False, WARN),
        ("cuda", "tcp", False, INFO),
        ("cpu", "rdma", False, INFO),
        ("cpu", "rdma", True, INFO),
    ],
)
def test_gpu_direct(
    tmp_path: Path, device: str, asked: AskedProtocol, has_dma_buf: bool, status: Status
) -> None:
    machine = FakeMachine(tmp_path, has_dma_buf=lambda: has_dma_buf).machine
    assert_told(check_gpu_direct(device, asked, machine), status, "dma-buf")


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", INFO), ("203.0.113.77", WARN)])
def test_the_advertised_address(host: str, status: Status) -> None:
    assert_told(check_address(host), status)


def test_an_address_of_a_network_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse_pd.transfer.transport.is_local", lambda address: True)
    assert check_address(HOST).status is OK


@pytest.mark.parametrize(
    ("asked", "environ", "status", "words"),
    [
        ("rdma", {}, OK, "rdma: RDMA devices usable: mlx5_0"),
        ("auto", {}, OK, "rdma: RDMA devices usable: mlx5_0"),
        ("tcp", {}, OK, "tcp: asked for"),
        ("rdma", {"MC_IB_PORT": "7"}, FAIL, "not start: --transfer-protocol rdma: mlx5_0 has no port 7"),
        ("tcp", {"MC_TCP_PROTO": "1"}, FAIL, "would not start: MC_TCP_PROTO=1"),
    ],
)
def test_the_transport(
    tmp_path: Path, asked: AskedProtocol, environ: dict[str, str], status: Status, words: str
) -> None:
    machine = FakeMachine(tmp_path, ROCE, environ=environ).machine
    settings = TransportSettings(host=HOST, transfer_protocol=asked)
    check, transport = check_transport(settings, GIB, machine)
    assert_told(check, status, words)
    assert (transport is None) is (status is FAIL)


# --- the lane of one machine ------------------------------------------------------------------------------


def test_memory_passes_between_processes_of_this_machine(tmp_path: Path) -> None:
    assert check_lane("") == Check(
        "same-host lane", OK, "memory passes between processes of this machine, by abstract names"
    )
    assert check_lane(str(tmp_path)).found.endswith(f"by sockets in {tmp_path}")
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_broken_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other checks are made without it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = cuda_facts()
    assert (facts.torch_version, facts.devices) == ("", ())
    assert "ModuleNotFoundError" in facts.error
    assert check_lane("").status is OK


def test_a_directory_that_takes_no_socket_stops_a_node(tmp_path: Path) -> None:
    found = "a decode node would not start: no socket can be made in"
    assert_told(check_lane(str(tmp_path / "missing")), FAIL, found, "--same-host-lane off")


def no_memfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, "no memfd")


@pytest.mark.parametrize(
    ("name", "stand_in", "status", "words"),
    [
        ("os.memfd_create", no_memfd, FAIL, "no memfd"),
        ("os.geteuid", lambda: os.getuid() + 1, WARN, "run both as one"),
        ("hisparse_pd.transfer.lane_memory.Mapping.write", lambda *_: None, FAIL, "did not arrive"),
    ],
)
def test_memory_that_is_not_handed_over(
    monkeypatch: pytest.MonkeyPatch, name: str, stand_in: Callable[..., Any], status: Status, words: str
) -> None:
    monkeypatch.setattr(name, stand_in)
    assert_told(check_lane(""), status, words, "--same-host-lane off")


@pytest.mark.parametrize(
    ("text", "device", "status", "words"),
    [
        ("always within_size [advise] never deny force", "cuda", OK, "advise: pools get huge pages"),
        ("always [within_size] advise never deny force", "cpu", INFO, "within_size: pools get huge pages"),
        ("always within_size advise [never] deny force", "cuda", WARN, "never: pools have pages of 4 KiB"),
        ("always within_size advise never [deny] force", "cuda", WARN, "11 s for --host-pool-gib"),
        ("always within_size advise [never] deny force", "cpu", INFO, "never: pools have pages of 4 KiB"),
        (None, "cuda", WARN, "not there"),
    ],
)
def test_huge_pages_of_shared_memory(
    tmp_path: Path, text: str | None, device: str, status: Status, words: str
) -> None:
    fake = FakeMachine(tmp_path)
    if text is not None:
        fake.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", f"{text}\n")
    assert_told(check_shared_pages(device, 16 * GIB, fake.machine), status, words)


# --- NUMA -------------------------------------------------------------------------------------------------


def bind_all(*_: object) -> None:
    """Stand in for a kernel that grants every policy."""


def refuse(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_each_gpu_is_shown_with_its_node_cards_and_room_for_pools(tmp_path: Path) -> None:
    checks, near = check_numa(settings(device="cuda:3"), two_sockets(tmp_path).machine, bind_all)
    assert [check.name for check in checks] == [f"NUMA cuda:{number}" for number in range(3, 8)]
    for check, words in zip(checks, ["node 0, that of cuda:3 (0000:4B:00.0)", *["node 1"] * 4], strict=True):
        assert_told(check, OK, words)
        assert "256.0 GiB of it free" in check.found
    assert "CPUs 0-15,32-47; RDMA mlx5_0, mlx5_1; pools there" in checks[0].found
    assert near == ("mlx5_0", "mlx5_1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"device": "cpu"}, "without a GPU"), ({"numa": "off", "device": "cuda"}, "--numa off")],
)
def test_where_nothing_is_placed_one_line_says_why(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    ((check,), near) = check_numa(settings(**changes), two_sockets(tmp_path).machine, refuse)
    assert_told(check, OK if changes["device"] == "cuda" else INFO, words)
    assert near == ()
    ((check,), _) = check_numa(settings(device="cuda"), FakeMachine(tmp_path / "one").machine, refuse)
    assert_told(check, OK, "one NUMA node")


def test_a_numa_node_that_is_not_there_fails(tmp_path: Path) -> None:
    ((check,), _) = check_numa(settings(device="cuda", numa="3"), two_sockets(tmp_path).machine, bind_all)
    assert_told(check, FAIL, "a node would not start: --numa 3: this machine has the NUMA nodes 0, 1", "auto")


@pytest.mark.parametrize(
    ("changes", "node_of_cards", "allowed", "bind", "words", "remedy"),
    [
        ({}, 0, 64, refuse, "pools by first touch", "--cap-add SYS_NICE"),
        ({"host_pool_gib": 1848}, 0, 64, bind_all, "pools there first", "--host-pool-tokens"),
        ({"transfer_protocol": "rdma"}, 1, 64, bind_all, "", "mlx5_0 is on node 1"),
        ({"transfer_protocol": "rdma", "ib_device": "mlx5_2"}, 0, 64, bind_all, "", "mlx5_2 is on node 1"),
        ({}, 0, 16, bind_all, "not placed: cuda:4 (0000:5B:00.0) is on node 1, but", "cpuset"),
    ],
)  # fmt: skip
def test_a_rank_that_cannot_have_all_on_its_node_is_a_warning(
    tmp_path: Path,
    changes: dict[str, Any],
    node_of_cards: int,
    allowed: int,
    bind: Callable[..., None],
    words: str,
    remedy: str,
) -> None:
    fake = two_sockets(tmp_path, allowed_cpus=lambda: range(allowed))
    for number in range(2):
        fake.put_nic(f"mlx5_{number}", node_of_cards)
    checks, _ = check_numa(settings(device="cuda", **changes), fake.machine, bind)
    warned = [check for check in checks if check.status is WARN]
    assert_told(warned[0], WARN, words, remedy)
    is_one_node = allowed == 16 or "transfer_protocol" in changes
    assert len(warned) == (4 if is_one_node else 8)


@pytest.mark.usefixtures("no_cuda")
def test_the_transport_is_that_of_the_cards_beside_the_first_gpu(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path)
    second = replace(ROCE, name="mlx5_1", uverbs="uverbs1")
    fake.add(ROCE)
    fake.add(second)
    fake.put_nic("mlx5_1", 1)
    fake.machine = replace(fake.machine, has_dma_buf=lambda: True, verbs_devices=lambda: ("mlx5_0", "mlx5_1"))
    for device, name in (("cuda:0", "mlx5_0"), ("cuda:4", "mlx5_1")):
        report = examine(settings(transfer_protocol="rdma", device=device, host_pool_gib=1), fake.machine)
        assert report.transport is not None
        assert report.transport.devices == (name,)
    named = settings(transfer_protocol="rdma", device="cuda:0", ib_device="mlx5_0,mlx5_1")
    report = examine(named, fake.machine)
    assert report.transport is not None
    assert report.transport.devices == ("mlx5_0", "mlx5_1")


# --- the command ------------------------------------------------------------------------------------------


def settings(**values: Any) -> DoctorSettings:
    return DoctorSettings(advertise_host=HOST, **values)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_facts", lambda: NO_CUDA)


def test_a_good_machine_is_all_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_facts", lambda: H200)
    machine = FakeMachine(tmp_path, ROCE, has_dma_buf=lambda: True).machine
    report = examine(settings(transfer_protocol="rdma", device="cuda", host_pool_gib=16), machine)
    assert report.is_ok
    assert report.transport is not None
    assert report.transport.devices == ("mlx5_0",)
    assert {check.status for check in report.checks} <= {OK, WARN}


@pytest.mark.parametrize(
    ("changes", "devices", "name"),
    [
        ({"transfer_protocol": "rdma"}, [], "RDMA"),
        ({"transfer_protocol": "rdma", "ib_device": "mlx5_9"}, [ROCE], "RDMA mlx5_9"),
        ({"device": "cuda"}, [], "CUDA"),
        ({"host_pool_gib": 40}, [], "free memory"),
    ],
)
@pytest.mark.usefixtures("no_cuda")
def test_what_is_missing_fails(
    tmp_path: Path, changes: dict[str, Any], devices: list[FakeDevice], name: str
) -> None:
    report = examine(settings(**changes), FakeMachine(tmp_path, *devices).machine)
    assert not report.is_ok
    failed = [check for check in report.checks if check.status is FAIL]
    assert name in [check.name for check in failed]
    assert all(check.remedy for check in failed)
    assert (report.transport is None) == ("KV transport" in [check.name for check in failed])


@pytest.mark.usefixtures("no_cuda")
def test_the_pool_of_a_pair_of_devices_must_fit_the_limit_twice(tmp_path: Path) -> None:
    second = replace(ROCE, name="mlx5_1", uverbs="uverbs1")
    machine = FakeMachine(tmp_path, ROCE, second, memlock_bytes=lambda: 3 * GIB).machine
    one = examine(settings(transfer_protocol="rdma", ib_device="mlx5_1", host_pool_gib=2), machine)
    both = examine(settings(transfer_protocol="rdma", host_pool_gib=2), machine)
    assert one.is_ok
    assert [check.name for check in both.checks if check.status is FAIL] == ["locked memory", "KV transport"]


@pytest.mark.usefixtures("no_cuda")
def test_a_peer_that_is_not_there_fails(tmp_path: Path) -> None:
    report = examine(settings(peer="127.0.0.1:1", peer_timeout_secs=0.1), FakeMachine(tmp_path).machine)
    (check,) = [check for check in report.checks if check.status is FAIL]
    assert "no answer from tcp://127.0.0.1:1 within 0.1 s" in check.found
    assert "--serve" in check.remedy


@pytest.mark.usefixtures("no_cuda")
def test_no_peer_is_asked_when_there_is_no_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_peer", lambda *_: pytest.fail("it was asked"))
    report = examine(settings(transfer_protocol="rdma", peer="127.0.0.1:1"), FakeMachine(tmp_path).machine)
    assert report.transport is None


REPORT = Report(
    (
        Check("one", OK, "[fd00::2] is here"),
        Check("two", FAIL, "gone", "bring it back"),
        Check("three", OK, ""),
    ),
    Transport("rdma", ("mlx5_0",), "usable"),
    (Rate(1152, 512, 0.016, "rdma"),),
)


def test_the_report_for_programs() -> None:
    report = json.loads(json.dumps(REPORT.to_dict()))
    assert report["ok"] is False
    assert report["transport"] == {"protocol": "rdma", "devices": ["mlx5_0"], "reason": "usable"}
    two = {"name": "two", "status": "fail", "found": "gone", "remedy": "bring it back"}
    assert report["checks"][1] == two
    (rate,) = report["bandwidth"]
    assert rate["over"] == "rdma"
    assert rate["bytes_per_sec"] == pytest.approx(1152 * 512 / 0.016)
    assert rate["secs_per_message"] == pytest.approx(0.016 / 512)


def test_the_report_for_people() -> None:
    text = io.StringIO()
    print_report(REPORT, Console(file=text, width=100))
    for words in ("[fd00::2] is here", "-> bring it back", "0.037", "31.2", "1 failed"):
        assert words in text.getvalue()


def test_warnings_do_not_fail(tmp_path: Path) -> None:
    text = io.StringIO()
    report = Report((Check("one", WARN, "odd"),), None)
    print_report(report, Console(file=text, width=100))
    assert report.is_ok
    assert "all good, 1 warning\n" in text.getvalue()


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["10.0.0.1", "10.0.0.1:", ":8997", "10.0.0.1:0", "10.0.0.1:99999", "a:b"])
def test_a_peer_is_host_and_port(peer: str) -> None:
    with pytest.raises(ValidationError, match="HOST:PORT"):
        DoctorSettings(peer=peer)


def test_a_peer_may_have_an_ipv6_address() -> None:
    assert DoctorSettings(peer="[fd00::2]:8997").peer_address == ("fd00::2", "8997")


@pytest.mark.parametrize("values", [{"peer": "a:1", "serve": True}, {"host_pool_gib": -1}, {"no_such": 1}])
def test_settings_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DoctorSettings(**values)


def test_the_real_machine_can_be_examined() -> None:
    assert cuda_facts().torch_version
    assert examine(DoctorSettings(transfer_protocol="auto"), Machine()).is_ok
