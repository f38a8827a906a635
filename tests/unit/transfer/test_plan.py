"""Write plans: exactly the right bytes, in few descriptors, and never outside the registered memory."""

from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.core.paging.extents import SlotRanges, ranges_to_slots
from hisparse_pd.transfer import plan as plan_module
from hisparse_pd.transfer.plan import (
    DESCRIPTOR_COST_BYTES,
    MAX_DESCRIPTOR_BYTES,
    SLICE_BYTES,
    Descriptors,
    LayerWrites,
    PlanError,
    RegionView,
    RunPlan,
    SlicedWrites,
    cost,
    cut_long,
    descriptors,
    join_descriptors,
    plan_writes,
)
from tests.slot_plans import plan_slots

SRC_BASE, DST_BASE = 1 << 20, 1 << 30


def region(base_addr: int, num_layers: int, num_slots: int, item_bytes: int) -> RegionView:
    return RegionView(base_addr, num_layers * num_slots * item_bytes, num_layers, num_slots, item_bytes)


def run(src_start: int, dst_start: int, length: int) -> RunPlan:
    return RunPlan(np.array([src_start]), np.array([dst_start]), np.array([length]))


def carry_out(writes: Descriptors, memory_src: np.ndarray, memory_dst: np.ndarray) -> None:
    """Carry out ``writes`` as the transport would."""
    for src_addr, dst_addr, num_bytes in zip(*writes, strict=True):
        src, dst = src_addr - SRC_BASE, dst_addr - DST_BASE
        memory_dst[dst : dst + num_bytes] = memory_src[src : src + num_bytes]


@pytest.mark.parametrize(
    ("src", "dst", "runs"),
    [
        ([], [], []),
        ([4, 5, 6], [0, 1, 2], [(4, 0, 3)]),
        ([4, 5, 6], [0, 1, 9], [(4, 0, 2), (6, 9, 1)]),  # the destination breaks
        ([4, 5, 9], [0, 1, 2], [(4, 0, 2), (9, 2, 1)]),  # the source breaks
        ([4, 5, 8, 9], [0, 1, 5, 6], [(4, 0, 2), (8, 5, 2)]),  # both break at once
        ([9, 8, 7], [2, 1, 0], [(9, 2, 1), (8, 1, 1), (7, 0, 1)]),
    ],
)
def test_runs_are_contiguous_on_both_sides_and_as_long_as_can_be(
    src: list[int], dst: list[int], runs: list[tuple[int, int, int]]
) -> None:
    plan = plan_slots(src, dst)
    got = list(zip(plan.src_start.tolist(), plan.dst_start.tolist(), plan.length.tolist(), strict=True))
    assert got == runs
    assert (plan.num_runs, plan.num_tokens) == (len(runs), len(src))


@pytest.mark.I1
@settings(derandomize=True, max_examples=150)
@given(st.data())
def test_a_plan_moves_every_token_of_every_layer_and_no_other_byte(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 3))
    item_bytes = data.draw(st.integers(1, 5))
    num_slots_src, num_slots_dst = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    num_tokens = data.draw(st.integers(0, min(num_slots_src, num_slots_dst)))
    src = data.draw(st.permutations(range(num_slots_src)))[:num_tokens]
    dst = data.draw(st.permutations(range(num_slots_dst)))[:num_tokens]
    if data.draw(st.booleans()):  # long runs, as allocators make them
        src, dst = sorted(src), sorted(dst)
    layers = data.draw(st.lists(st.integers(0, num_layers - 1), unique=True))

    src_region = region(SRC_BASE, num_layers, num_slots_src, item_bytes)
    dst_region = region(DST_BASE, num_layers, num_slots_dst, item_bytes)
    memory_src = np.random.default_rng(0).integers(1, 256, src_region.num_bytes, dtype=np.uint8)
    memory_dst = np.zeros(dst_region.num_bytes, np.uint8)
    writes = descriptors(plan_slots(src, dst), src_region, dst_region, layers)
    carry_out(writes, memory_src, memory_dst)

    items_src = memory_src.reshape(num_layers, num_slots_src, item_bytes)
    expected = np.zeros((num_layers, num_slots_dst, item_bytes), np.uint8)
    for layer in layers:
        expected[layer, list(dst)] = items_src[layer, list(src)]
    np.testing.assert_array_equal(memory_dst.reshape(expected.shape), expected)
    assert writes.num_bytes == len(layers) * num_tokens * item_bytes


@pytest.mark.I8
def test_fresh_pages_of_a_long_prompt_are_one_descriptor_a_layer() -> None:
    src, dst = region(SRC_BASE, 4, 1 << 16, 1152), region(DST_BASE, 4, 1 << 16, 1152)
    writes = descriptors(plan_slots(np.arange(32768) + 64, np.arange(32768)), src, dst, range(4))
    assert writes.lengths.tolist() == [32768 * 1152] * 4


def test_different_numbers_of_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="3 source slots for 2 destination slots"):
        plan_slots([1, 2, 3], [1, 2])


def test_different_item_sizes_are_refused() -> None:
    with pytest.raises(PlanError, match="1152 bytes, destination items 656"):
        descriptors(run(0, 0, 1), region(SRC_BASE, 1, 4, 1152), region(DST_BASE, 1, 4, 656), [0])


@pytest.mark.parametrize(
    "bad",
    [
        run(-1, 0, 1),
        run(8, 0, 1),
        run(7, 0, 2),
        run(0, 0, 0),
        run(0, 0, -3),
        run(4, 0, 2**62),
        run(2**62, 0, 2**62),
        run(4, 0, 2**63 - 1),
        run(2**63 - 1, 0, 2),
    ],
)
def test_a_run_outside_the_source_or_the_destination_is_refused(bad: RunPlan) -> None:
    small, large = region(SRC_BASE, 1, 8, 16), region(DST_BASE, 1, 2**40, 16)
    with pytest.raises(PlanError, match="source run"):
        descriptors(bad, small, large, [0])
    mirrored = RunPlan(bad.dst_start, bad.src_start, bad.length)
    with pytest.raises(PlanError, match="run"):
        descriptors(mirrored, large, small, [0])


@pytest.mark.parametrize("layer", [-1, 2, 2**40])
def test_a_layer_outside_a_region_is_refused(layer: int) -> None:
    three, two = region(SRC_BASE, 3, 8, 16), region(DST_BASE, 2, 8, 16)
    with pytest.raises(PlanError, match=r"layers .* are not all in \[0, "):
        descriptors(run(0, 0, 1), three, two, [0, layer])


def test_a_region_that_is_smaller_than_its_shape_is_refused() -> None:
    with pytest.raises(PlanError, match="are 1024 bytes, the region at 0x100000 has 1023"):
        RegionView(SRC_BASE, 1023, 2, 8, 64)
    with pytest.raises(PlanError, match="every field must be positive"):
        RegionView(0, 1024, 2, 8, 64)


@pytest.mark.I6
def test_no_tokens_and_no_layers_are_no_descriptors() -> None:
    both = region(SRC_BASE, 2, 8, 16), region(DST_BASE, 2, 8, 16)
    assert descriptors(plan_slots([], []), *both, [0, 1]).lengths.size == 0
    assert descriptors(run(0, 0, 1), *both, []).lengths.size == 0
    assert join_descriptors([]).num_bytes == 0


# --- slices -----------------------------------------------------------------------------------------------


@pytest.mark.I8
def test_long_ranges_are_cut_in_order() -> None:
    columns = Descriptors(np.array([100, 0]), np.array([1000, 5]), np.array([10, 3]))
    src, dst, lengths = cut_long(columns, 4)
    assert src.tolist() == [100, 104, 108, 0]
    assert dst.tolist() == [1000, 1004, 1008, 5]
    assert lengths.tolist() == [4, 4, 2, 3]


@pytest.mark.I8
@settings(derandomize=True, max_examples=80)
@given(st.data())
def test_slices_are_the_writes_in_order_and_none_is_long(data: st.DataObject) -> None:
    """This holds for any blocks, and for ranges much longer than a slice."""
    slice_bytes = data.draw(st.sampled_from([1, 3, 40])) * DESCRIPTOR_COST_BYTES
    parts, expected = [], []
    for item_bytes in data.draw(st.lists(st.sampled_from([7, 1 << 14, 3 << 20]), max_size=3)):
        view = region(SRC_BASE, 4, 24, item_bytes), region(DST_BASE, 4, 24, item_bytes)
        slots = data.draw(st.permutations(range(24)))[: data.draw(st.integers(0, 24))]
        if data.draw(st.booleans()):
            slots = sorted(slots)
        first, stop = sorted(data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4))))
        part = LayerWrites(plan_slots(slots, slots), *view, first, stop)
        part.check()
        parts.append(part)
        whole = descriptors(part.runs, *view, range(first, stop))
        expected.append(cut_long(whole, MAX_DESCRIPTOR_BYTES))
    writes = SlicedWrites(parts, slice_bytes)
    for _ in range(2):
        slices = list(writes)
        for ours, theirs in zip(join_descriptors(slices), join_descriptors(expected), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for piece in slices:
            assert piece.lengths.size
            assert cost(piece) <= slice_bytes or piece.lengths.size == 1
    for piece, following in pairwise(slices):
        next_cost = cost(Descriptors(*(column[:1] for column in following)))
        assert cost(piece) + next_cost > slice_bytes, "a slice is shorter than need be"
    assert writes.num_bytes == sum(piece.num_bytes for piece in slices)


@pytest.mark.I1
@pytest.mark.I8
def test_of_a_long_prompt_only_one_slice_is_planned_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt has 5 GB, and no rows are adjacent: the addresses of all rows would take 150 MB."""
    num_tokens, num_layers, item_bytes = 104_000, 61, 656
    slots = 2 * np.arange(num_tokens)
    both = (
        region(1 << 20, num_layers, 2 * num_tokens, item_bytes),
        region(1 << 40, num_layers, 2 * num_tokens, item_bytes),
    )
    num_made = 0
    make = plan_module.descriptors

    def counted(*args: object) -> Descriptors:
        nonlocal num_made
        made = make(*args)  # type: ignore[arg-type]
        num_made += made.lengths.size
        return made

    monkeypatch.setattr(plan_module, "descriptors", counted)
    part = LayerWrites(plan_slots(slots, slots), *both, 0, num_layers)
    part.check()
    writes = SlicedWrites([part])
    slices = iter(writes)
    assert num_made == 0
    assert next(slices).lengths.size == num_made == SLICE_BYTES // DESCRIPTOR_COST_BYTES
    assert writes.num_bytes == num_layers * num_tokens * item_bytes


@pytest.mark.I1
def test_writes_that_leave_the_memory_are_refused_before_any_is_made() -> None:
    three, two = region(SRC_BASE, 3, 8, 16), region(DST_BASE, 2, 8, 16)
    LayerWrites(run(0, 0, 1), three, two, 0, 2).check()
    with pytest.raises(PlanError, match=r"destination layers .* are not all in \[0, 2\)"):
        LayerWrites(run(0, 0, 1), three, two, 0, 3).check()
    with pytest.raises(PlanError, match="source run"):
        LayerWrites(run(7, 0, 2), three, two, 0, 2).check()


ranges = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), max_size=12)


@pytest.mark.I1
@given(ranges, ranges)
def test_ranges_are_planned_like_their_slots_one_by_one(
    src: list[tuple[int, int]], dst: list[tuple[int, int]]
) -> None:
    """Whatever the ranges on either side are cut into, empty ones included."""
    num_slots = min(sum(length for _, length in side) for side in (src, dst))
    src_ranges, dst_ranges = (_first_slots(side, num_slots) for side in (src, dst))
    expected = plan_slots(ranges_to_slots(*src_ranges), ranges_to_slots(*dst_ranges))
    found = plan_writes(src_ranges, dst_ranges)
    assert [column.tolist() for column in astuple(found)] == [column.tolist() for column in astuple(expected)]


def _first_slots(ranges: list[tuple[int, int]], num_slots: int) -> SlotRanges:
    """Return ranges of 400 slots each, of which no two overlap, cut behind ``num_slots`` slots."""
    starts = np.array([500 * number + start for number, (start, _) in enumerate(ranges)], np.int64)
    lengths = np.array([length for _, length in ranges], np.int64)
    before = np.cumsum(lengths) - lengths
    return SlotRanges(starts, np.clip(num_slots - before, 0, lengths))


@pytest.mark.parametrize("num_long", [0, 1, plan_module.MOST_LONG, plan_module.MOST_LONG + 1])
def test_a_gpu_copies_every_byte_once(num_long: int) -> None:
    """A call of its copy engine costs the host, so it has few ranges, and these are long."""
    lengths = np.array([*(100, plan_module.PIECE_BYTES + 1), *[plan_module.LONG_BYTES] * num_long], np.int64)
    starts = np.cumsum(lengths) - lengths
    moves = plan_module.Descriptors(SRC_BASE + starts, DST_BASE + starts, lengths)
    runs, pieces = plan_module.for_gpu(moves)
    assert runs.lengths.size == (num_long if num_long <= plan_module.MOST_LONG else 0)
    assert runs.lengths.min(initial=plan_module.LONG_BYTES) >= plan_module.LONG_BYTES
    assert pieces.lengths.max() <= plan_module.PIECE_BYTES
    end = 0
    for src, dst, length in sorted(zip(*map(np.concatenate, zip(runs, pieces, strict=True)), strict=True)):
        assert (src, dst) == (SRC_BASE + end, DST_BASE + end)
        end += length
    assert end == lengths.sum()
