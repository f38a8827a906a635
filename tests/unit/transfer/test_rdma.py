"""RDMA devices of fake machines: how they are read, and each reason why a device cannot be used."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.core.memory.machine import Machine, gpu_direct, list_verbs_devices, memlock_fault, show_bytes
from hisparse_pd.transfer.rdma import (
    GidGrade,
    RdmaDevice,
    chosen_gid_index,
    device_fault,
    device_names,
    port_number,
    read_devices,
)
from tests.unit.transfer.fake_machine import (
    IB_GID,
    INFINIBAND,
    LINK_LOCAL_GID,
    ROCE,
    ZERO_GID,
    FakeDevice,
    FakeMachine,
    ipv4_gid,
)

ADDRESS = ip_address("192.0.2.7")
V2 = "RoCE v2"
V1 = "IB/RoCE v1"


def read(machine: Machine) -> RdmaDevice:
    (device,) = read_devices(machine).values()
    return device


def no_library() -> tuple[str, ...]:
    raise OSError("libibverbs.so.1: cannot open shared object file")


def test_what_sysfs_shows_is_read(tmp_path: Path) -> None:
    device = read(FakeMachine(tmp_path, ROCE).machine)
    port = device.port
    assert port is not None
    assert (device.name, device.uverbs, device.port_numbers) == ("mlx5_0", ("uverbs0",), (1,))
    assert (port.number, port.state, port.link_layer) == (1, "4: ACTIVE", "Ethernet")
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3], "an entry of zeros is no GID"
    assert (port.gids[3].ip, port.gids[3].type, port.gids[3].netdev) == (ADDRESS, V2, "ens1f0")
    assert port.gids[0].ip == ip_address(LINK_LOCAL_GID)


def test_gids_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    gids = [(ZERO_GID, "")] * 10 + [(ipv4_gid("192.0.2.7"), V2)]
    gids[2] = (ipv4_gid("192.0.2.8"), V2)
    port = read(FakeMachine(tmp_path, replace(ROCE, gids=gids)).machine).port
    assert port is not None
    assert [gid.index for gid in port.gids] == [2, 10]


@pytest.mark.parametrize(
    ("device", "gid_index", "grade", "index"),
    [
        (ROCE, None, GidGrade.ADVERTISED, 3),
        (replace(ROCE, gids=[(ipv4_gid("198.51.100.1"), V2)]), None, GidGrade.ROUTABLE, 0),
        (replace(ROCE, gids=[("2001:db8::1", V2)]), None, GidGrade.ROUTABLE, 0),
        (replace(ROCE, gids=[(LINK_LOCAL_GID, V1), (LINK_LOCAL_GID, V2)]), None, GidGrade.LINK_LOCAL, 1),
        (replace(ROCE, gids=[(ipv4_gid("192.0.2.7"), V1)]), None, GidGrade.ROCE_V1, 0),
        (replace(ROCE, gids=[(ipv4_gid("192.0.2.7"), V1)]), 0, GidGrade.LINK_LOCAL, 0),
        (replace(ROCE, gids=[(ZERO_GID, "")]), None, GidGrade.NONE, None),
        (ROCE, 1, GidGrade.LINK_LOCAL, 1),
        (ROCE, 4, GidGrade.NONE, None),
        (INFINIBAND, None, GidGrade.ROUTABLE, 0),
    ],
)
def test_the_gid_that_reaches_farthest_is_graded(
    tmp_path: Path, device: FakeDevice, gid_index: int | None, grade: GidGrade, index: int | None
) -> None:
    environ = {} if gid_index is None else {"MC_GID_INDEX": str(gid_index)}
    port = read(FakeMachine(tmp_path, device, environ=environ).machine).port
    assert port is not None
    found, gid = port.best_gid({ADDRESS})
    assert (found, gid and gid.index) == (grade, index)


@pytest.mark.parametrize(
    ("device", "changes", "words"),
    [
        (replace(ROCE, state="1: DOWN"), {}, ["mlx5_0 port 1", "'1: DOWN'", "'4: ACTIVE'", "cable"]),
        (replace(INFINIBAND, state="2: INIT"), {}, ["'2: INIT'", "subnet manager"]),
        (replace(ROCE, link_layer="Unspecified"), {}, ["'Unspecified'", "InfiniBand or Ethernet"]),
        (replace(ROCE, port=2), {}, ["no port 1", "its ports: 2", "MC_IB_PORT"]),
        (replace(ROCE, gids=[(ZERO_GID, "")]), {}, ["no GID", "zero", "address"]),
        (replace(INFINIBAND, gids=[(ZERO_GID, V1)]), {}, ["no GID", "zero"]),
        (replace(ROCE, gids=[(LINK_LOCAL_GID, V1)]), {}, ["RoCE v1 only", "RoCE v2", "MC_GID_INDEX=0"]),
        (ROCE, {"environ": {"MC_GID_INDEX": "9"}}, ["no GID at index 9", "0, 1, 2, 3", "MC_GID_INDEX"]),
        (replace(ROCE, uverbs=""), {}, ["no verbs device", "ib_uverbs"]),
        (replace(ROCE, has_node=False), {}, ["dev/infiniband/uverbs0 is not there", "--device"]),
        (ROCE, {"verbs_devices": lambda: ("mlx4_0",)}, ["ibverbs-providers"]),
        (ROCE, {"verbs_devices": no_library}, ["libibverbs1", "cannot open shared object file"]),
    ],
)
def test_a_device_that_cannot_be_used(
    tmp_path: Path, device: FakeDevice, changes: dict[str, Any], words: list[str]
) -> None:
    machine = FakeMachine(tmp_path, device, **changes).machine
    fault = str(device_fault(read(machine), machine))
    for word in words:
        assert word in fault


@pytest.mark.parametrize(
    ("device", "environ"),
    [
        (ROCE, {}),
        (INFINIBAND, {}),
        (replace(ROCE, port=2), {"MC_IB_PORT": "2"}),
        (replace(ROCE, gids=[(LINK_LOCAL_GID, V1)]), {"NCCL_IB_GID_INDEX": "0"}),
        (replace(ROCE, gids=[(LINK_LOCAL_GID, V2)]), {}),
        (replace(INFINIBAND, gids=[(IB_GID, V1)]), {"MC_GID_INDEX": "0"}),
    ],
)
def test_a_device_that_can_be_used(tmp_path: Path, device: FakeDevice, environ: dict[str, str]) -> None:
    machine = FakeMachine(tmp_path, device, environ=environ).machine
    assert device_fault(read(machine), machine) is None


def test_a_node_in_dev_that_is_not_open_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(tmp_path, ROCE).machine
    monkeypatch.setattr("hisparse_pd.transfer.rdma.os.access", lambda path, mode: False)
    assert "cannot be read and written by this user" in str(device_fault(read(machine), machine))


def test_the_real_library_answers() -> None:
    assert isinstance(list_verbs_devices(), tuple)


@pytest.mark.parametrize(("text", "number"), [(None, 1), ("2", 2), ("x", 0), ("256", 1), ("-1", 1)])
def test_the_port_is_read_as_mooncake_does(text: str | None, number: int) -> None:
    assert port_number({} if text is None else {"MC_IB_PORT": text}) == number


def test_mooncakes_gid_index_goes_before_that_of_nccl() -> None:
    assert chosen_gid_index({}) is None
    assert chosen_gid_index({"NCCL_IB_GID_INDEX": "3"}) == 3
    assert chosen_gid_index({"NCCL_IB_GID_INDEX": "3", "MC_GID_INDEX": "1"}) == 1
    assert chosen_gid_index({"MC_GID_INDEX": "-1"}) is None


def test_device_names_are_taken_apart() -> None:
    assert device_names(" mlx5_1, mlx5_0,,mlx5_1 ") == ("mlx5_1", "mlx5_0")
    assert device_names("") == ()


# --- locked memory ----------------------------------------------------------------------------------------


def test_locked_memory_within_its_limit(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, memlock_bytes=lambda: 8 << 20).machine
    assert memlock_fault(8 << 20, 1, machine) is None
    assert memlock_fault(1 << 40, 0, machine) is None
    assert memlock_fault(1 << 40, 9, FakeMachine(tmp_path / "unlimited").machine) is None


def test_locked_memory_counts_once_a_device(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, memlock_bytes=lambda: 8 << 20).machine
    fault = memlock_fault(5 << 20, 2, machine)
    assert fault is not None
    for words in (f"{8 << 20} bytes (8.0 MiB)", f"{10 << 20} bytes (10.0 MiB", "each of 2 devices"):
        assert words in fault.what
    assert "ulimit -l" in fault.remedy
    assert "LimitMEMLOCK" in fault.remedy


def test_ipc_lock_lifts_the_limit_but_not_in_a_user_namespace(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path, memlock_bytes=lambda: 4096)
    assert memlock_fault(4097, 1, fake.machine) is not None
    fake.grant_ipc_lock()
    assert memlock_fault(4097, 1, fake.machine) is None
    fake.grant_ipc_lock(uid_map="0 100000 65536")
    assert memlock_fault(4097, 1, fake.machine) is not None


def test_what_reaches_gpu_memory(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    assert gpu_direct(fake.machine) == ""
    assert gpu_direct(replace(fake.machine, has_dma_buf=lambda: True)) == "dma-buf"
    (tmp_path / "sys" / "module" / "nvidia_peermem").mkdir(parents=True)
    assert gpu_direct(fake.machine) == "nvidia_peermem"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text
