"""Which batches are worth splitting, and how: the decision, and the requests of the trial."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decode_node.device_step import DeviceStep
from decode_node.forwards import Forwards
from decode_node.hot_buffers import HotBuffers
from decode_node.memory import DecodeMemory
from decode_node.split_choice import MIN_REQS, MISS_SHARE, SPLITS, Secs, Split, TrialRequests, choose_splits
from decode_node.step_buffers import StepInputs
from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.paging.pools import SlotCounts
from kernels.hot_state import HITS, MISSES
from tests.unit.kernels.table_rules import check_consistency
from tests.unit.model.model_specs import make_spec

PAGE_SIZE, TOP_K, CAPACITY = 16, 64, 128
CPU = torch.device("cpu")


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


class Graph:
    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


def test_steps_that_verify_drafts_have_graphs_where_others_are_split() -> None:
    forwards = Forwards.__new__(Forwards)
    whole, split, verifying = Graph(), Graph(), Graph()
    forwards._graphs = {
        (1, False): {4: (whole, "whole")},
        (1, True): {4: (split, "split")},
        (2, False): {4: (verifying, "verifying")},
    }
    assert [
        forwards.launch(3, num_new, is_split=is_split)
        for num_new, is_split in ((1, False), (1, True), (2, True), (2, False))
    ] == ["whole", "split", "verifying", "verifying"]
    assert (whole.num_replays, split.num_replays, verifying.num_replays) == (1, 1, 2)
