"""The choice of the transport on fake machines: what is chosen, what is refused, and the texts of both."""

from __future__ import annotations

import logging
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.settings import TransportSettings
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.serving.http.metrics import split_labels
from hisparse_pd.transfer.errors import TransferSetupError
from hisparse_pd.transfer.rdma import wanted_devices
from hisparse_pd.transfer.transport import (
    TCP,
    AskedProtocol,
    Transport,
    address_fault,
    addresses_of,
    choose_transport,
    is_local,
)
from tests.unit.transfer.fake_machine import (
    INFINIBAND,
    LINK_LOCAL_GID,
    ROCE,
    FakeDevice,
    FakeMachine,
    ipv4_gid,
)

HOST = "192.0.2.7"
SECOND = replace(ROCE, name="mlx5_1", uverbs="uverbs1")
DOWN = replace(SECOND, state="1: DOWN")
LINK_LOCAL = replace(ROCE, gids=[(LINK_LOCAL_GID, "RoCE v2")])


def choose(machine: Machine, asked: AskedProtocol, ib_device: str = "", **changes: Any) -> Transport:
    node: dict[str, Any] = {"host": HOST, "transfer_protocol": asked, "ib_device": ib_device, **changes}
    return choose_transport(TransportSettings(**node), 1 << 30, machine)


# --- rdma: refused where something is missing --------------------------------------------------------------


def test_devices_beside_the_memory_are_taken_alone_unless_others_are_named(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, ROCE, SECOND).machine

    def chosen(near: tuple[str, ...], ib_device: str = "") -> Transport:
        settings = TransportSettings(host=HOST, transfer_protocol="rdma", ib_device=ib_device)
        return choose_transport(settings, 1 << 30, machine, near)

    assert chosen(("mlx5_1", "mlx5_7")).devices == ("mlx5_1",)
    assert "left out: mlx5_0 of other NUMA nodes" in chosen(("mlx5_1",)).reason
    for near in ((), ("mlx5_7",), ("mlx5_0", "mlx5_1")):
        assert chosen(near).devices == ("mlx5_0", "mlx5_1")
        assert "left out" not in chosen(near).reason
    assert chosen(("mlx5_1",), "mlx5_0").devices == ("mlx5_0",)


@pytest.mark.parametrize("device", [ROCE, INFINIBAND, LINK_LOCAL])
def test_rdma_takes_a_usable_device(tmp_path: Path, device: FakeDevice) -> None:
    transport = choose(FakeMachine(tmp_path, device).machine, "rdma")
    assert (transport.protocol, transport.devices) == ("rdma", ("mlx5_0",))


@pytest.mark.parametrize(
    ("devices", "changes", "words"),
    [
        ([], {}, ["no RDMA device in", "class/infiniband", "tcp"]),
        ([DOWN, replace(ROCE, gids=[])], {}, ["mlx5_1 port 1", "'4: ACTIVE'", " | ", "mlx5_0", "no GID"]),
        ([ROCE, SECOND], {"memlock_bytes": lambda: 1 << 30}, ["2147483648 bytes", "each of 2 devices"]),
        ([ROCE], {"environ": {"MC_FORCE_TCP": "1"}}, ["MC_FORCE_TCP", "unset"]),
    ],
)
def test_rdma_is_refused_with_what_is_missing(
    tmp_path: Path, devices: list[FakeDevice], changes: dict[str, Any], words: list[str]
) -> None:
    machine = FakeMachine(tmp_path, *devices, **changes).machine
    with pytest.raises(TransferSetupError) as error:
        choose(machine, "rdma")
    for word in ["--transfer-protocol rdma", *words]:
        assert word in str(error.value)


def test_rdma_of_gpu_memory_needs_gpu_direct(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, ROCE).machine
    with pytest.raises(TransferSetupError, match="nvidia_peermem"):
        choose(machine, "rdma", device="cuda")
    assert choose(replace(machine, has_dma_buf=lambda: True), "rdma", device="cuda").protocol == "rdma"


# --- which devices ----------------------------------------------------------------------------------------


def test_unnamed_devices_are_used_as_far_as_they_can_be(tmp_path: Path) -> None:
    transport = choose(FakeMachine(tmp_path, ROCE, DOWN).machine, "rdma")
    assert transport.devices == ("mlx5_0",)
    assert "left out: mlx5_1 port 1 is in state '1: DOWN'" in transport.reason


def test_named_devices_are_used_and_no_others(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, ROCE, SECOND, replace(ROCE, name="mlx5_2", uverbs="uverbs2")).machine
    assert choose(machine, "rdma", " mlx5_2 , mlx5_1").devices == ("mlx5_2", "mlx5_1")
    assert choose(machine, "auto", "mlx5_1").devices == ("mlx5_1",)


@pytest.mark.parametrize(
    ("ib_device", "words"),
    [
        ("mlx5_7", ["mlx5_7 is not in", "has: mlx5_0, mlx5_1", "--ib-device"]),
        ("mlx5_0,mlx5_7", ["mlx5_7 is not in"]),
        ("mlx5_0, mlx5_1", ["mlx5_1 port 1 is in state '1: DOWN'"]),
    ],
)
def test_each_named_device_must_be_usable(tmp_path: Path, ib_device: str, words: list[str]) -> None:
    machine = FakeMachine(tmp_path, ROCE, DOWN).machine
    with pytest.raises(TransferSetupError) as error:
        choose(machine, "rdma", ib_device)
    for word in words:
        assert word in str(error.value)
    assert choose(machine, "auto", ib_device).protocol == "tcp"


def test_the_reason_tells_how_far_the_devices_reach(tmp_path: Path) -> None:
    def reason(name: str, *devices: FakeDevice) -> str:
        return choose(FakeMachine(tmp_path / name, *devices).machine, "rdma").reason

    assert reason("advertised", ROCE) == "RDMA devices usable: mlx5_0"
    other = replace(ROCE, gids=[(ipv4_gid("198.51.100.9"), "RoCE v2")])
    assert "the address 198.51.100.9, not the advertised 192.0.2.7" in reason("other", other)
    assert "same link only" in reason("link-local", LINK_LOCAL)
    both = "Ethernet and InfiniBand do not reach each other"
    assert both in reason("mixed", ROCE, replace(INFINIBAND, name="mlx5_1", uverbs="uverbs1"))


# --- auto -------------------------------------------------------------------------------------------------


def test_auto_takes_rdma_where_it_can_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transport = choose(FakeMachine(tmp_path, ROCE, SECOND).machine, "auto")
    assert (transport.protocol, transport.devices) == ("rdma", ("mlx5_0", "mlx5_1"))
    assert "KV transport: rdma (RDMA devices usable: mlx5_0, mlx5_1)" in caplog.text


@pytest.mark.parametrize(
    ("devices", "changes", "reason"),
    [
        ([DOWN], {}, "state '1: DOWN'"),
        ([LINK_LOCAL], {}, "same link only"),
        ([ROCE], {"memlock_bytes": lambda: 4096}, "limited to 4096 bytes"),
        ([ROCE], {"environ": {"MC_FORCE_TCP": "1"}}, "MC_FORCE_TCP"),
    ],
)
def test_auto_warns_when_it_does_not_take_the_devices_that_there_are(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    devices: list[FakeDevice],
    changes: dict[str, Any],
    reason: str,
) -> None:
    transport = choose(FakeMachine(tmp_path, *devices, **changes).machine, "auto")
    assert (transport.protocol, transport.devices) == ("tcp", ())
    assert reason in transport.reason
    (record,) = [record for record in caplog.records if "KV transport: tcp" in record.message]
    assert record.levelno == logging.WARNING


def test_auto_without_devices_is_tcp_and_nothing_to_warn_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    transport = choose(FakeMachine(tmp_path).machine, "auto", device="cuda")
    assert transport.protocol == "tcp"
    assert transport.reason.startswith("no RDMA: no RDMA device in")
    assert "nvidia_peermem" not in transport.reason
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_auto_leaves_out_a_device_that_may_not_reach_the_peer(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, LINK_LOCAL, SECOND).machine
    assert choose(machine, "auto").devices == ("mlx5_1",)
    assert choose(machine, "rdma").devices == ("mlx5_0", "mlx5_1")


# --- an operator's topology --------------------------------------------------------------------------------

BOTH = '{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cuda:0": [["mlx5_1"], []]}'


def machine_with(tmp_path: Path, topology: str) -> Machine:
    path = tmp_path / "topology.json"
    path.write_text(topology)
    return FakeMachine(tmp_path, ROCE, SECOND, environ={"MC_CUSTOM_TOPO_JSON": str(path)}).machine


def test_its_devices_are_used_as_if_they_were_named(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, BOTH)
    assert wanted_devices("", machine) == (("mlx5_1", "mlx5_0"), None)
    assert choose(machine, "rdma", "mlx5_0,mlx5_1").devices == ("mlx5_1", "mlx5_0")
    assert choose(machine, "rdma").devices == ("mlx5_1", "mlx5_0")


@pytest.mark.parametrize("asked", ["rdma", "auto"])
def test_a_device_that_it_leaves_out_is_not_used(tmp_path: Path, asked: AskedProtocol) -> None:
    machine = machine_with(tmp_path, '{"cpu:0": [["mlx5_1"], []]}')
    assert choose(machine, asked).devices == ("mlx5_1",)


@pytest.mark.parametrize(
    ("topology", "ib_device", "words"),
    [
        (BOTH, "mlx5_0", ["mlx5_1, mlx5_0", "instead of --ib-device mlx5_0"]),
        ('{"cpu:0": [["mlx5_7"], []]}', "", ["mlx5_7 is not in", "mlx5_0, mlx5_1"]),
        ('{"cpu:0": [["mlx5_0"]]}', "", ["is no topology", "unset it"]),
        ('{"cpu:0"', "", ["is no topology"]),
        ('{"cpu:0": [[], []]}', "mlx5_0", ["names no device"]),
    ],
)
def test_one_that_cannot_be_is_refused(
    tmp_path: Path, topology: str, ib_device: str, words: list[str]
) -> None:
    machine = machine_with(tmp_path, topology)
    with pytest.raises(TransferSetupError) as error:
        choose(machine, "rdma", ib_device)
    for word in words:
        assert word in str(error.value)
    assert choose(machine, "auto", ib_device).protocol == "tcp"
    assert choose(machine, "tcp", ib_device).protocol == "tcp"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, ROCE, environ={"MC_CUSTOM_TOPO_JSON": "/nowhere"}).machine
    with pytest.raises(TransferSetupError, match=r"MC_CUSTOM_TOPO_JSON=/nowhere is no topology.*No such"):
        choose(machine, "rdma")


# --- tcp --------------------------------------------------------------------------------------------------


def test_tcp_looks_at_no_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = FakeMachine(tmp_path, ROCE).machine
    assert choose(machine, "tcp") == TCP
    assert caplog.text == ""
    assert choose(machine, "tcp", "mlx5_0") == TCP
    assert "--ib-device mlx5_0 is not used" in caplog.text


# --- what metrics say -------------------------------------------------------------------------------------


def test_the_metric_holds_whatever_the_reason_says() -> None:
    transport = Transport("rdma", ("mlx5_0", "mlx5_1"), 'a "b" {c}\n\\d')
    name, labels = split_labels(transport.info_metric)
    assert name == "transfer_info"
    assert labels == {"protocol": "rdma", "devices": "mlx5_0,mlx5_1", "reason": "a 'b' (c)  d"}


def test_a_reason_stays_short(tmp_path: Path) -> None:
    down = [replace(DOWN, name=f"mlx5_{i}") for i in range(40)]
    transport = choose(FakeMachine(tmp_path, *down).machine, "auto")
    assert len(transport.reason) == 400
    assert transport.reason.endswith("...")


# --- the advertised address -------------------------------------------------------------------------------


def test_an_address_of_this_machine_is_no_fault() -> None:
    assert address_fault("127.0.0.1") is None
    assert address_fault("localhost") is None


def test_a_foreign_address_is_told() -> None:
    fault = address_fault("203.0.113.77")  # reserved for documentation
    assert fault is not None
    assert "203.0.113.77 belongs to no network interface" in fault.what
    assert "NAT" in fault.remedy
    assert not is_local(ip_address("203.0.113.77"))


def test_a_name_that_nobody_knows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("hisparse_pd.protocol.names.socket.getaddrinfo", unknown)
    fault = address_fault("node-a")
    assert fault is not None
    assert "node-a cannot be resolved" in fault.what


def test_resolving_takes_addresses_too() -> None:
    assert addresses_of("192.0.2.7") == {ip_address("192.0.2.7")}
    assert addresses_of("::1") == {ip_address("::1")}
