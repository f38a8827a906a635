"""Split steps: which batches are split, the requests of the trial, and what parts attend to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.attention_parts import AttentionParts, MissCopies, StepInParts
from hisparse_pd.decode_node.device_step import DeviceStep, NewPositions
from hisparse_pd.decode_node.forwards import CapturedForward, Forwards
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.decode_node.micro_batches import matmuls_without
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.split_choice import (
    MIN_REQS,
    MISS_SHARE,
    SPLITS,
    Secs,
    Split,
    TrialRequests,
    choose_splits,
)
from hisparse_pd.decode_node.step_buffers import StepInputs
from hisparse_pd.kernels.hot_state import HITS, MISSES
from tests.unit.kernels.table_rules import check_consistency
from tests.unit.model.model_specs import make_spec

PAGE_SIZE, TOP_K, CAPACITY, NUM_REQS, HOST = 16, 64, 128, 5, 5 * 400
CPU = torch.device("cpu")
SIZES = {
    "num_layers": 4, "context_length": 500, "index_topk": TOP_K, "num_heads": 2, "kv_lora_rank": 4,
    "qk_rope_head_dim": 2, "index_num_heads": 2, "index_head_dim": 8, "dtype": torch.float32,
    "kv_format": "float32", "index_format": "float32",
}  # fmt: skip
SPEC = make_spec(**SIZES, index_group_of_layer=(0, 1, 2, 3))


def empty_node(
    spec: ModelSpec, host: int = HOST, device: int = NUM_REQS * CAPACITY
) -> tuple[RequestTables, StepInputs]:
    totals = SlotCounts(host=host, device=device, index=host, lookup=2 * host, aux=1, req_row=NUM_REQS)
    memory = DecodeMemory(spec, totals, PAGE_SIZE, CPU)
    hot = RequestTables(
        spec, memory, num_rows=NUM_REQS, num_lookup_slots=2 * host, max_capacity=CAPACITY, page_size=PAGE_SIZE
    )
    return hot, StepInputs.create(NUM_REQS, 1, CPU)


def new_positions(inputs: StepInputs) -> NewPositions:
    return NewPositions(inputs.seq_lens, inputs.req_rows, inputs.num_real_reqs)


def secs_of(whole: float, *of_splits: float) -> Secs:
    return dict(zip((Split.WHOLE, *SPLITS), (whole, *of_splits), strict=True))


PARTS_GAIN, MICRO_BATCHES_GAIN = secs_of(2, 1, 1.5), secs_of(2, 3, 1)
NONE_GAINS, TOO_LITTLE = secs_of(1, 1, 1), secs_of(1.01, 1, 1)


@pytest.mark.parametrize(
    ("secs", "chosen", "asked"),
    [
        (
            {16: PARTS_GAIN, 32: PARTS_GAIN, 48: PARTS_GAIN, 64: MICRO_BATCHES_GAIN},
            {32: Split.PARTS, 48: Split.PARTS, 64: Split.MICRO_BATCHES},
            [64, 48, 32],
        ),
        ({32: PARTS_GAIN, 48: NONE_GAINS, 64: PARTS_GAIN}, {64: Split.PARTS}, [64, 48]),
        ({32: PARTS_GAIN, 48: PARTS_GAIN, 64: TOO_LITTLE}, {}, [64]),
        (
            {32: MICRO_BATCHES_GAIN, 48: MICRO_BATCHES_GAIN, 64: None},
            {32: Split.MICRO_BATCHES, 48: Split.MICRO_BATCHES},
            [64, 48, 32],
        ),
        ({8: PARTS_GAIN}, {}, []),
    ],
)
def test_batches_are_split_from_where_all_larger_ones_gain(
    secs: dict[int, Secs | None], chosen: dict[int, Split], asked: list[int]
) -> None:
    seen: list[int] = []

    def measure(size: int) -> Secs | None:
        seen.append(size)
        return secs[size]

    found, measured = choose_splits(list(secs), measure)
    assert MIN_REQS == 32
    assert (found, seen) == (chosen, asked)
    assert measured == {size: secs[size] for size in asked if secs[size] is not None}


def test_a_trial_misses_its_share_and_leaves_nothing() -> None:
    hot, inputs = empty_node(SPEC)
    state = hot.state
    before = [getattr(state, field.name) for field in dataclasses.fields(state)]
    before = [value.clone() for value in before if isinstance(value, torch.Tensor)]
    kernels = AttentionKernels.reference(hot.spec)
    requests = TrialRequests(hot, kernels, inputs, NUM_REQS)
    assert requests.fits
    assert inputs.num_real.tolist() == [NUM_REQS]
    queries = torch.randn((NUM_REQS, 2, 8), generator=torch.Generator().manual_seed(1))
    weights = torch.ones((NUM_REQS, 2))

    def step() -> list[int]:
        """Return hits and misses of all requests in a step of one layer."""
        state.counters.zero_()
        access = DeviceStep(hot, kernels, new_positions(inputs))
        access.page_in(0, access.select(0, queries, weights))
        check_consistency(state)
        counted: list[int] = state.counters.sum(dim=0).tolist()
        return counted

    selected = sum(step())
    assert step()[MISSES] == 0
    num_missed = 0
    for _ in range(20):
        requests.drop_entries()
        check_consistency(state)
        counted = step()
        assert counted[HITS] + counted[MISSES] == selected
        num_missed += counted[MISSES]
    assert num_missed / 20 / selected == pytest.approx(MISS_SHARE, rel=0.1)
    requests.end()
    after = [getattr(state, field.name) for field in dataclasses.fields(state)]
    after = [value for value in after if isinstance(value, torch.Tensor)]
    assert all(map(torch.equal, before, after))
    assert inputs.num_real.tolist() == [0]


def test_a_trial_that_is_to_miss_nothing_keeps_its_entries() -> None:
    hot, inputs = empty_node(SPEC)
    kernels = AttentionKernels.reference(hot.spec)
    requests = TrialRequests(hot, kernels, inputs, NUM_REQS, miss_share=0.0)
    access = DeviceStep(hot, kernels, new_positions(inputs))
    access.page_in(0, access.select(0, torch.randn((NUM_REQS, 2, 8)), torch.ones((NUM_REQS, 2))))
    before = hot.state.hot_to_lookup.clone()
    requests.drop_entries()
    assert torch.equal(hot.state.hot_to_lookup, before)
    assert (before >= 0).any()


@pytest.mark.parametrize(("host", "device"), [(NUM_REQS * 64, NUM_REQS * CAPACITY), (HOST, NUM_REQS * TOP_K)])
def test_what_the_pools_do_not_hold_is_not_tried(host: int, device: int) -> None:
    hot, inputs = empty_node(SPEC, host, device)
    requests = TrialRequests(hot, AttentionKernels.reference(hot.spec), inputs, NUM_REQS)
    assert not requests.fits
    requests.end()
    assert (hot.state.capacity == 0).all()


class Graph:
    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


def test_steps_that_verify_drafts_have_graphs_where_others_are_split() -> None:
    forwards: Any = Forwards.__new__(Forwards)
    captured: Any = CapturedForward
    whole, split, verifying = Graph(), Graph(), Graph()
    forwards.graphs = {
        (1, False): {4: captured(whole, "whole")},
        (1, True): {4: captured(split, "split")},
        (2, False): {4: captured(verifying, "verifying")},
    }
    assert [
        forwards.launch(3, num_new, is_split=is_split)
        for num_new, is_split in ((1, False), (1, True), (2, True), (2, False))
    ] == ["whole", "split", "verifying", "verifying"]
    assert (whole.num_replays, split.num_replays, verifying.num_replays) == (1, 1, 2)


class Node:
    def __init__(self, spec: ModelSpec, num_real: int, *, in_parts: bool) -> None:
        self.hot, self.inputs = empty_node(spec)
        k_host = self.hot.memory.k_host
        k_host.copy_(torch.randn((spec.num_kv_layers, k_host.shape[1], spec.item_dim)).view(torch.uint8))
        self.kernels = AttentionKernels.reference(spec)
        self.requests = TrialRequests(self.hot, self.kernels, self.inputs, NUM_REQS)
        self.inputs.num_real.fill_(num_real)
        self.parts = AttentionParts(self.kernels, MissCopies(self.hot, NUM_REQS)) if in_parts else None

    def step(self) -> list[Tensor]:
        """Return what each layer attends to for random queries, keys and items."""
        spec, inputs = self.hot.spec, self.inputs
        new = new_positions(inputs)
        access = DeviceStep(self.hot, self.kernels, new)
        if self.parts is not None:
            access = StepInParts(self.hot, self.kernels, new, self.parts)
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
@pytest.mark.parametrize("num_real", [5, pytest.param(4, marks=pytest.mark.slow), 2, 0])
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
            node.requests.drop_entries()
            of_node += [attended[:num_real] for attended in node.step()]
            check_consistency(node.hot.state)
        found.append(of_node)
        assert (node.hot.state.counters[:num_real, MISSES] > 0).all()
        node.hot.memory.close()
    assert all(map(torch.equal, *found))


def test_matrix_products_leave_room_for_as_long_as_they_are_asked_to() -> None:
    carveout = torch._C._get_sm_carveout_experimental
    with matmuls_without(16):
        assert carveout() == 16
    assert carveout() is None
    with pytest.raises(ZeroDivisionError), matmuls_without(16):
        raise ZeroDivisionError
    assert carveout() is None


def test_a_torch_without_that_setting_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with matmuls_without(16):
        assert torch._C._get_sm_carveout_experimental() is None
