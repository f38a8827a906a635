"""From which batch on micro-batches are worth it: the decision, and the requests of the trial."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decode_node.device_step import DeviceStep
from decode_node.hot_buffers import HotBuffers
from decode_node.memory import DecodeMemory
from decode_node.split_choice import MIN_REQS, MISS_SHARE, TrialRequests, fewest_to_split
from decode_node.step_buffers import StepInputs
from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.paging.pools import SlotCounts
from kernels.hot_state import HITS, MISSES
from tests.unit.kernels.table_rules import check_consistency
from tests.unit.model.model_specs import make_spec

PAGE_SIZE, TOP_K, CAPACITY = 16, 64, 128
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("secs", "fewest", "asked"),
    [
        ({16: (2, 1), 32: (2, 1), 48: (2, 1), 64: (2, 1)}, 32, [64, 48, 32]),
        ({32: (2, 1), 48: (1, 1), 64: (2, 1)}, 64, [64, 48]),
        ({32: (2, 1), 48: (2, 1), 64: (1.01, 1)}, None, [64]),
        ({32: (2, 1), 48: (2, 1), 64: None}, 32, [64, 48, 32]),
        ({8: (2, 1)}, None, []),
    ],
)
def test_micro_batches_from_where_all_larger_ones_gain(
    secs: dict[int, tuple[float, float] | None], fewest: int | None, asked: list[int]
) -> None:
    seen: list[int] = []

    def measure(size: int) -> tuple[float, float] | None:
        seen.append(size)
        return secs[size]

    found, measured = fewest_to_split(list(secs), measure)
    assert MIN_REQS == 32
    assert (found, seen) == (fewest, asked)
    assert measured == {size: secs[size] for size in asked if secs[size] is not None}


def empty_node(num_reqs: int, host: int, device: int) -> tuple[HotBuffers, StepInputs]:
    spec = make_spec(
        num_layers=2, index_group_of_layer=(0, 1), context_length=500, index_topk=TOP_K, kv_lora_rank=4,
        qk_rope_head_dim=2, index_head_dim=8,
    )  # fmt: skip
    totals = SlotCounts(host=host, device=device, index=host, lookup=2 * host, aux=1, req_row=num_reqs)
    memory = DecodeMemory(spec, totals, PAGE_SIZE, CPU)
    hot = HotBuffers(
        spec, memory, num_rows=num_reqs, num_lookup_slots=2 * host, max_capacity=CAPACITY, page_size=PAGE_SIZE
    )
    return hot, StepInputs.create(num_reqs, 1, CPU)


def test_a_trial_misses_its_share_and_leaves_nothing() -> None:
    num_reqs = 4
    hot, inputs = empty_node(num_reqs, host=4 * 400, device=4 * CAPACITY)
    state = hot.state
    before = [getattr(state, field.name) for field in dataclasses.fields(state)]
    before = [value.clone() for value in before if isinstance(value, torch.Tensor)]
    kernels = AttentionKernels.reference(hot.spec)
    requests = TrialRequests(hot, kernels, inputs, num_reqs)
    assert requests.fits
    assert inputs.num_real.tolist() == [num_reqs]
    queries = torch.randn((num_reqs, hot.spec.index_num_heads, 8), generator=torch.Generator().manual_seed(1))
    weights = torch.ones((num_reqs, hot.spec.index_num_heads))

    def step() -> list[int]:
        """Hits and misses of all requests in a step of one layer."""
        state.counters.zero_()
        access = DeviceStep(hot, kernels, inputs.seq_lens, inputs.req_rows, inputs.num_real_reqs)
        access._swap_in(0, access.select(0, queries, weights))
        check_consistency(state)
        counted: list[int] = state.counters.sum(dim=0).tolist()
        return counted

    selected = sum(step())
    assert step()[MISSES] == 0
    num_missed = 0
    for _ in range(20):
        requests.lose_some()
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


@pytest.mark.parametrize(("host", "device"), [(4 * 64, 4 * CAPACITY), (4 * 400, 4 * TOP_K)])
def test_what_the_pools_do_not_hold_is_not_tried(host: int, device: int) -> None:
    hot, inputs = empty_node(4, host, device)
    requests = TrialRequests(hot, AttentionKernels.reference(hot.spec), inputs, 4)
    assert not requests.fits
    requests.end()
    assert (hot.state.capacity == 0).all()
