"""The canaries that the soak relies on: they die of a foreign byte, and of nothing that an owner does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from decode_node.memory import DecodeMemory
from hisparse_pd.paging.pools import PoolKind, SlotCounts
from protocol.messages import Room
from tests.faults.canaries import Canaries, CanaryPools
from tests.unit.model.model_specs import make_spec

SPEC = make_spec(num_layers=2, index_group_of_layer=(0, 1), kv_lora_rank=4, qk_rope_head_dim=4, index_topk=4)
NEED = SlotCounts(host=5, device=4, index=8, aux=1, req_row=1)


@pytest.fixture
def pools(tmp_path: Path) -> CanaryPools:
    made = CanaryPools(SlotCounts(host=20, device=8, index=20, lookup=40, aux=4, req_row=2), page_size=4)
    memory = DecodeMemory(SPEC, made.totals, 4, torch.device("cpu"))
    made.canaries = Canaries(memory, made.totals, tmp_path / "canaries.json")
    return made


def findings(pools: CanaryPools) -> list[str]:
    assert pools.canaries is not None
    return pools.canaries.findings


def flip(pools: CanaryPools, kind: PoolKind, slot: int) -> None:
    assert pools.canaries is not None
    pools.canaries._pools[kind][-1, slot, 3] ^= 255


def test_owners_may_write_and_others_may_not(pools: CanaryPools, tmp_path: Path) -> None:
    holding = pools.reserve(Room(1), NEED)
    for kind in (PoolKind.HOST, PoolKind.DEVICE, PoolKind.INDEX, PoolKind.AUX):
        flip(pools, kind, holding[kind][0].start)
    pools.check_integrity()
    pools.release(holding)
    pools.reserve(Room(2), NEED)
    assert findings(pools) == []
    flip(pools, PoolKind.HOST, 19)
    assert pools.canaries is not None
    pools.canaries._next_sweep_at = 0.0
    pools.check_integrity()
    (report,) = tmp_path.glob("canaries-*.json")
    assert json.loads(report.read_text())["findings"] == ["while free: host slots [19] of layer 1"]


@pytest.mark.parametrize("kind", [PoolKind.HOST, PoolKind.DEVICE, PoolKind.INDEX, PoolKind.AUX])
def test_a_slot_that_was_written_while_free_is_found_when_it_is_given_out(
    pools: CanaryPools, kind: PoolKind
) -> None:
    flip(pools, kind, 0)
    holding = pools.reserve(Room(1), NEED)
    assert [finding.split(":")[0] for finding in findings(pools)] == ["given to room 1"]
    if kind is PoolKind.DEVICE:
        flip(pools, kind, 4)
        pools.grow(holding, kind, 4)
        assert [finding.split(":")[0] for finding in findings(pools)][1:] == ["added to room 1"]
