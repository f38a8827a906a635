"""A topology of the operator's own beside --ib-device: taken, or refused with both values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.transfer.fake_machine import ROCE, FakeMachine
from transfer.errors import TransferSetupError
from transfer.machine import Machine
from transfer.topology import wanted_devices
from transfer.transport import Transport, choose_transport

SECOND = replace(ROCE, name="mlx5_1", uverbs="uverbs1")
BOTH = '{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cuda:0": [["mlx5_1"], []]}'


def machine_with(tmp_path: Path, topology: str) -> Machine:
    path = tmp_path / "topology.json"
    path.write_text(topology)
    return FakeMachine(tmp_path, ROCE, SECOND, environ={"MC_CUSTOM_TOPO_JSON": str(path)}).machine


def choose(machine: Machine, ib_device: str, asked: str = "rdma") -> Transport:
    return choose_transport(
        asked,
        ib_device,
        "192.0.2.7",
        num_host_bytes=1,
        uses_gpu=False,
        machine=machine,  # type: ignore[arg-type]
    )


def test_its_devices_are_used_as_if_they_were_named(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, BOTH)
    assert wanted_devices("", machine) == (("mlx5_1", "mlx5_0"), None)
    assert choose(machine, "mlx5_0,mlx5_1").devices == ("mlx5_1", "mlx5_0")
    assert choose(machine, "").devices == ("mlx5_1", "mlx5_0")


@pytest.mark.parametrize("asked", ["rdma", "auto"])
def test_a_device_that_it_leaves_out_is_not_used(tmp_path: Path, asked: str) -> None:
    machine = machine_with(tmp_path, '{"cpu:0": [["mlx5_1"], []]}')
    assert choose(machine, "", asked).devices == ("mlx5_1",)


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
        choose(machine, ib_device)
    for word in words:
        assert word in str(error.value)
    assert choose(machine, ib_device, "auto").protocol == "tcp"
    assert choose(machine, ib_device, "tcp").protocol == "tcp"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, ROCE, environ={"MC_CUSTOM_TOPO_JSON": "/nowhere"}).machine
    with pytest.raises(TransferSetupError, match=r"MC_CUSTOM_TOPO_JSON=/nowhere is no topology.*No such"):
        choose(machine, "")
