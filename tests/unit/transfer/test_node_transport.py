"""The transport of both kinds of nodes: chosen before the model loads, registered, and shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node import memory as decode_memory
from hisparse_pd.decode_node.engine import DecodeEngine
from hisparse_pd.engine import start
from hisparse_pd.prefill_node import memory as prefill_memory
from hisparse_pd.prefill_node.engine import PrefillEngine
from hisparse_pd.transfer.errors import TransferSetupError
from hisparse_pd.transfer.transport import choose_transport
from tests.unit.decode_node.support import (
    Checkpoint,
    EngineHarness,
    load_checkpoint,
    random_prompt,
)
from tests.unit.transfer.fake_machine import ROCE, FakeMachine

CPU, GPU = torch.device("cpu"), torch.device("meta")
PAGE_SIZE = 64


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Checkpoint:
    return load_checkpoint(tiny_checkpoint("v32"))


def test_a_decode_node_knows_what_it_registers_before_it_has_it(checkpoint: Checkpoint) -> None:
    totals = SlotCounts(host=192, device=128, index=256, lookup=384, aux=3, req_row=2)
    for device in (CPU, GPU):
        memory = decode_memory.DecodeMemory(checkpoint.spec, totals, PAGE_SIZE, device)
        assert memory.row_checks is not None
        tensors = (memory.k_host, memory.k_dev, memory.index, memory.row_checks, memory.aux)
        assert decode_memory.num_host_bytes(checkpoint.spec, totals, PAGE_SIZE, device) == host_bytes(tensors)


def test_a_prefill_node_knows_what_it_registers_before_it_has_it(checkpoint: Checkpoint) -> None:
    sizes = {"num_slots": 192, "num_aux_slots": 5}
    for device in (CPU, GPU):
        memory = prefill_memory.PrefillMemory(checkpoint.spec, device=device, **sizes)
        tensors = (*memory.sent, memory.aux)
        assert prefill_memory.num_host_bytes(checkpoint.spec, device=device, **sizes) == host_bytes(tensors)


def host_bytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.device == CPU)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_node_asks_for_the_memory_that_it_registers(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def transport(**settings: Any) -> Any:
        node = {"model_path": checkpoint.path, "advertise_host": "192.0.2.7", **settings}
        engine: Any = PrefillEngine if kind == "prefill" else DecodeEngine
        of_node = (PrefillSettings if kind == "prefill" else DecodeSettings)(**node)
        return choose_transport(of_node, engine.registered_host_bytes(of_node, checkpoint.spec))

    machine = FakeMachine(tmp_path, ROCE, memlock_bytes=lambda: 4096).machine
    monkeypatch.setattr("hisparse_pd.transfer.transport.Machine", lambda: machine)
    assert transport().protocol == "tcp"
    assert "limited to 4096 bytes" in transport(transfer_protocol="auto").reason
    with pytest.raises(TransferSetupError, match="limited to 4096 bytes"):
        transport(transfer_protocol="rdma", ib_device="mlx5_0")
    with pytest.raises(TransferSetupError, match="mlx5_9 is not in"):
        transport(transfer_protocol="rdma", ib_device="mlx5_9")


@pytest.mark.parametrize(
    ("engine", "settings_type"), [(PrefillEngine, PrefillSettings), (DecodeEngine, DecodeSettings)]
)
def test_the_memory_of_all_ranks_has_to_be_free(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, engine: Any, settings_type: Any
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(start, "check_host_memory", asked.append)
    for dp_size in (1, 3):
        settings = settings_type(model_path=checkpoint.path, dp_size=dp_size)
        of_rank = settings.of_rank(dp_size - 1)
        start.transport_of(of_rank, engine.registered_host_bytes(of_rank, checkpoint.spec))
    assert asked[1] == 3 * asked[0] > 0


def test_a_decode_node_registers_and_shows_its_transport(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with closing(EngineHarness(checkpoint, tmp_path)) as node:
        answer = node.generate(random_prompt(3, 40), 2)
        node.turn_until(lambda: answer.is_over and node.stats is not None)
        (register,) = node.double.registered.values()
        assert register.transfer_protocol == "tcp"
        assert node.stats is not None
        assert node.stats.gauges['transfer_info{protocol="tcp",devices="",reason="asked for"}'] == 1
