"""A step whose attention runs in parts attends to what a whole one does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode_node.attention_parts import AttentionParts, MissCopies
from decode_node.device_step import DeviceStep
from decode_node.hot_buffers import HotBuffers
from decode_node.memory import DecodeMemory
from decode_node.split_choice import TrialRequests
from decode_node.step_buffers import StepInputs
from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.model.spec import ModelSpec
from hisparse_pd.paging.pools import SlotCounts
from kernels.hot_state import MISSES
from tests.unit.kernels.table_rules import check_consistency
from tests.unit.model.model_specs import make_spec

PAGE_SIZE, TOP_K, CAPACITY, NUM_REQS, HOST = 16, 64, 128, 5, 5 * 400
CPU = torch.device("cpu")
SIZES = {
    "num_layers": 4, "context_length": 500, "index_topk": TOP_K, "num_heads": 2, "kv_lora_rank": 4,
    "qk_rope_head_dim": 2, "index_num_heads": 2, "index_head_dim": 8, "dtype": torch.float32,
    "kv_format": "float32", "index_format": "float32",
}  # fmt: skip


class Node:
    def __init__(self, spec: ModelSpec, num_real: int, *, in_parts: bool) -> None:
        totals = SlotCounts(
            host=HOST, device=NUM_REQS * CAPACITY, index=HOST, lookup=2 * HOST, aux=1, req_row=NUM_REQS
        )
        memory = DecodeMemory(spec, totals, PAGE_SIZE, CPU)
        memory.k_host.copy_(
            torch.randn((spec.num_kv_layers, memory.k_host.shape[1], spec.item_dim)).view(torch.uint8)
        )
        self.hot = HotBuffers(
            spec, memory, num_rows=NUM_REQS, num_lookup_slots=2 * HOST, max_capacity=CAPACITY,
            page_size=PAGE_SIZE,
        )  # fmt: skip
        self.kernels = AttentionKernels.reference(spec)
        self.inputs = StepInputs.create(NUM_REQS, 1, CPU)
        self.requests = TrialRequests(self.hot, self.kernels, self.inputs, NUM_REQS)
        self.inputs.num_real.fill_(num_real)
        self.parts = AttentionParts(self.kernels, MissCopies(self.hot, NUM_REQS)) if in_parts else None

    def step(self) -> list[Tensor]:
        """What each layer attends to, of random queries, keys and items."""
        spec, inputs = self.hot.spec, self.inputs
        access = DeviceStep(
            self.hot, self.kernels, inputs.seq_lens, inputs.req_rows, inputs.num_real_reqs, parts=self.parts
        )
        attended, selected = [], torch.empty(0)
        for layer, group in enumerate(spec.index_group_of_layer):
            is_first = layer == spec.layers_of_group[group][0]
            has_kv = layer == spec.kv_layer_of_layer.index(spec.kv_layer_of_layer[layer])
            access.write(
                layer,
                torch.randn((NUM_REQS, spec.item_dim)) if has_kv else None,
                torch.randn((NUM_REQS, spec.index_head_dim)) if is_first else None,
            )
            if is_first:
                q_index = torch.randn((NUM_REQS, spec.index_num_heads, spec.index_head_dim))
                selected = access.select(group, q_index, torch.ones((NUM_REQS, spec.index_num_heads)))
            q = torch.randn((NUM_REQS, spec.num_heads, spec.item_dim))
            attended.append(access.attend(layer, q, selected, 0.5))
        return attended


@pytest.mark.I3
@pytest.mark.parametrize("num_real", [5, 4, 2, 0])
@pytest.mark.parametrize(
    "shared",
    [
        {"index_group_of_layer": (0, 1, 2, 3)},
        {"index_group_of_layer": (0, 0, 1, 1)},
        {"index_group_of_layer": (0, 0, 1, 2), "kv_source_layers": (0, 1, 2, 0)},
    ],
)
def test_parts_attend_to_what_the_whole_batch_does(num_real: int, shared: dict[str, tuple[int, ...]]) -> None:
    spec = make_spec(**SIZES, **shared)
    found: list[list[Tensor]] = []
    for in_parts in (False, True):
        torch.manual_seed(0)
        node = Node(spec, num_real, in_parts=in_parts)
        of_node = []
        for _ in range(3):
            node.requests.lose_some()
            of_node += [attended[:num_real] for attended in node.step()]
            check_consistency(node.hot.state)
        found.append(of_node)
        assert (node.hot.state.counters[:num_real, MISSES] > 0).all()
        node.hot.memory.close()
    assert all(map(torch.equal, *found))
