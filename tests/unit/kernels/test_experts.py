"""Routed experts: block-scaled fp8 weights, the routing tables, the reference, and the interpreted kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK, dequantize, quantize, scales_shape
from hisparse_pd.kernels.expert_routing import (
    FEW_TILE_ROWS,
    MANY_TILE_ROWS,
    ExpertMatrices,
    Routing,
    most_tiles,
    rounds,
)
from hisparse_pd.kernels.experts import run_experts
from tests.unit.kernels.triton_here import compiled_for_hopper, interpreted, needs_triton, output_of

NUM_EXPERTS, TOP_K = 7, 3


def draw(num_tokens: int, hidden: int = 160, inner: int = 136) -> tuple[Tensor, ...]:
    """Return tokens, expert ids, weights, and the matrices of every expert as a rank holds them."""
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden)
    expert_ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, TOP_K)
    gate_up = torch.randn(NUM_EXPERTS, 2, inner, hidden) / hidden**0.5
    down = torch.randn(NUM_EXPERTS, 1, hidden, inner) / inner**0.5
    return x, expert_ids, weights, gate_up, down


def matrices(dense: Tensor, *, is_fp8: bool) -> ExpertMatrices:
    if not is_fp8:
        return ExpertMatrices(dense, None)
    values, scales = zip(*(quantize(matrix) for matrix in dense.flatten(0, 1)), strict=True)
    num = dense.shape[:2]
    return ExpertMatrices(torch.stack(values).unflatten(0, num), torch.stack(scales).unflatten(0, num))


def part(whole: ExpertMatrices, experts: slice) -> ExpertMatrices:
    return ExpertMatrices(whole.values[experts], None if whole.scales is None else whole.scales[experts])


def one_by_one(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: ExpertMatrices, down: ExpertMatrices
) -> Tensor:
    """Compute one token and one expert at a time, in float64."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for token, ids in enumerate(expert_ids.tolist()):
        for choice, expert in enumerate(ids):
            gate, up = gate_up.of(expert, torch.float64) @ x[token].double()
            result = down.of(expert, torch.float64)[0] @ (torch.nn.functional.silu(gate) * up)
            total[token] += weights[token, choice] * result
    return total.float()


# --- weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 300), (5, 128)])
def test_block_scales_bound_the_error_of_a_weight(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(shape) * torch.logspace(-4, 2, shape[1])
    values, scales = quantize(matrix)
    assert tuple(scales.shape) == scales_shape(*shape)
    back = dequantize(values, scales, torch.float32)
    largest_of_block = (
        scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]] * 448
    )
    # e4m3 has 3 bits of mantissa, and steps of 2^-9 below its normal range.
    assert torch.all((back - matrix).abs() <= matrix.abs() / 16 + largest_of_block * 2**-10 / 448)


def test_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales of \[129, 4\]: expected \[2, 1\], got \[1, 1\]"):
        dequantize(torch.zeros(129, 4).to(torch.float8_e4m3fn), torch.ones(1, 1), torch.float32)


# --- routing ---------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 300), st.integers(0, 2**31))
def test_every_row_is_in_exactly_one_tile_of_its_expert(
    num_experts: int, top_k: int, num_tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    top_k = min(top_k, num_experts)
    popular = torch.rand(num_experts) ** 4
    expert_ids = torch.multinomial(popular.expand(num_tokens, -1) + 1e-9, top_k)
    routing = Routing.plan(expert_ids, torch.rand(num_tokens, top_k), num_experts)
    flat = expert_ids.flatten()
    seen: list[int] = []
    num_tiles = int(routing.tile_starts[-1])
    assert num_tiles <= most_tiles(len(flat), num_experts, routing.tile_rows) == len(routing.tile_experts)
    for tile in range(num_tiles):
        expert = int(routing.tile_experts[tile])
        assert routing.tile_starts[expert] <= tile < routing.tile_starts[expert + 1]
        first = int(routing.starts[expert] + (tile - routing.tile_starts[expert]) * routing.tile_rows)
        rows = routing.order[first : min(first + routing.tile_rows, int(routing.starts[expert + 1]))]
        assert len(rows) > 0
        assert torch.all(flat[rows.long()] == expert)
        seen += rows.tolist()
    assert sorted(seen) == list(range(num_tokens * top_k))


# --- products --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 90])
def test_the_experts_of_all_ranks_add_up(num_tokens: int, is_fp8: bool) -> None:
    x, expert_ids, weights, *dense = draw(num_tokens)
    gate_up, down = (matrices(matrix, is_fp8=is_fp8) for matrix in dense)
    routing = Routing.plan(expert_ids, weights, NUM_EXPERTS)
    total = torch.zeros(num_tokens, TOP_K, x.shape[1])
    for first, end in ((0, 2), (2, 3), (3, NUM_EXPERTS)):
        experts = slice(first, end)
        added = run_experts(x, routing, part(gate_up, experts), part(down, experts), first)
        is_of_others = (expert_ids < first) | (expert_ids >= end)
        assert torch.all(added[is_of_others] == 0)
        total += added
    assert torch.equal(total, run_experts(x, routing, gate_up, down, 0))
    torch.testing.assert_close(total.sum(dim=1), one_by_one(x, expert_ids, weights, gate_up, down))


def padded(x: Tensor, expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add a token of padding after every token; padding belongs to no expert."""
    mixed = torch.full((2 * len(x), x.shape[1]), torch.nan)
    ids = torch.full((2 * len(x), TOP_K), NUM_EXPERTS)
    of_ids = torch.full((2 * len(x), TOP_K), torch.nan)
    mixed[::2], ids[::2], of_ids[::2] = x, expert_ids, weights
    return mixed, ids, of_ids


@pytest.mark.parametrize("num_tokens", [1, 5, 90])
def test_padding_gets_nothing_and_changes_nothing(num_tokens: int) -> None:
    x, expert_ids, weights, *dense = draw(num_tokens)
    gate_up, down = (matrices(matrix, is_fp8=False) for matrix in dense)
    expected = run_experts(x, Routing.plan(expert_ids, weights, NUM_EXPERTS), gate_up, down, 0)
    mixed, ids, of_ids = padded(x, expert_ids, weights)
    found = run_experts(mixed, Routing.plan(ids, of_ids, NUM_EXPERTS), gate_up, down, 0)
    assert torch.equal(found[::2], expected)
    assert torch.all(found[1::2] == 0)


def test_activations_are_rounded_where_the_routing_says_so() -> None:
    """Activations are rounded twice, each time by up to half a step of 3 bits of mantissa, which is far more
    than the rounding of bfloat16."""
    x, expert_ids, weights, *dense = draw(60)
    gate_up, down = (matrices(matrix, is_fp8=True) for matrix in dense)
    results = []
    for is_rounded in (False, True):
        routing = Routing.plan(expert_ids, weights, NUM_EXPERTS, is_rounded=is_rounded)
        results.append(run_experts(x.bfloat16(), routing, gate_up, down, 0).sum(dim=1).float())
    exact, rounded = results
    assert 0.01 <= (rounded - exact).norm() / exact.norm() <= 0.08


@pytest.mark.parametrize(
    ("device", "dtype", "is_fp8", "expected"),
    [
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.float32, True, False),
        ("cpu", torch.bfloat16, True, False),
        ("cuda", torch.bfloat16, False, False),
    ],
)
def test_what_is_rounded(device: str, dtype: torch.dtype, is_fp8: bool, expected: bool) -> None:
    hidden: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert rounds(hidden, matrices(torch.zeros(1, 1, 2, 2), is_fp8=is_fp8)) is expected


def test_tiles_of_few_rows_have_one_size() -> None:
    for num_tokens in (1, 60, 3000):
        _, expert_ids, weights, *_ = draw(num_tokens)
        expected = MANY_TILE_ROWS if num_tokens == 3000 else FEW_TILE_ROWS
        for kind in ("is_rounded", "in_bfloat16"):
            assert Routing.plan(expert_ids, weights, NUM_EXPERTS, **{kind: True}).tile_rows == expected


def interpret_cases() -> None:
    from hisparse_pd.kernels.triton_experts import run_experts_triton

    for num_tokens, is_fp8 in ((1, False), (1, True), (60, True), (9, False)):
        x, expert_ids, weights, *dense = draw(num_tokens)
        gate_up, down = (matrices(matrix, is_fp8=is_fp8) for matrix in dense)
        routing = Routing.plan(expert_ids, weights, NUM_EXPERTS)
        for first, end in ((0, NUM_EXPERTS), (2, 5)):
            experts = slice(first, end)
            shard = part(gate_up, experts), part(down, experts), first
            torch.testing.assert_close(
                run_experts_triton(x, routing, *shard), run_experts(x, routing, *shard)
            )
        mixed, ids, of_ids = padded(x, expert_ids, weights)
        found = run_experts_triton(mixed, Routing.plan(ids, of_ids, NUM_EXPERTS), gate_up, down, 0)
        torch.testing.assert_close(found[::2], run_experts(x, routing, gate_up, down, 0))
        assert torch.all(found[1::2] == 0)


@needs_triton
def test_interpreted_kernel() -> None:
    interpreted(interpret_cases)


def compile_kernel() -> None:
    from hisparse_pd.kernels.triton_experts import (
        NARROW_BFLOAT16_TILING,
        NARROW_TILING,
        ROUNDED_TILINGS,
        TILINGS,
        _product_kernel,
    )

    result = {}
    cases = [("fp8e4nv", rows, tiling, False) for rows, tiling in ROUNDED_TILINGS.items()]
    cases += [("fp8e4nv", FEW_TILE_ROWS, NARROW_TILING, False)]
    for tile_rows, tiling in (*TILINGS.items(), (FEW_TILE_ROWS, NARROW_BFLOAT16_TILING)):
        half = replace(tiling, block_rows=tiling.block_rows // 2)
        cases += [("bf16", tile_rows, half, True), ("bf16", tile_rows, tiling, False)]
    for dtype, tile_rows, tiling, is_gated in cases:
        is_rounded = dtype == "fp8e4nv"
        pointers = {"x": f"*{dtype}", "out": "*bf16", "values": f"*{dtype}"}
        pointers |= dict.fromkeys(("x_scales", "scales", "weights"), "*fp32")
        pointers |= dict.fromkeys(("order", "starts", "tile_starts", "tile_experts"), "*i32")
        constants = {
            "NUM_MATRICES": 2,
            "ROWS": 2048,
            "COLUMNS": 7168,
            "IS_FIRST": True,
            "IS_GATED": is_gated,
            "HAS_SCALES": is_rounded,
            "IS_ROUNDED": is_rounded,
            "SCALE_BLOCK": BLOCK,
            "TILE_ROWS": tile_rows,
            "BLOCK_ROWS": tiling.block_rows,
            "BLOCK_COLUMNS": tiling.block_columns,
            "OVERLAPS": True,
        }
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        result[f"{dtype} {tile_rows} {tiling} {is_gated}"] = compiled_for_hopper(
            _product_kernel, pointers, constants, list(pointers), **options
        )
    print(json.dumps(result))


@needs_triton
def test_weights_come_wide_and_meet_the_tensor_cores(tmp_path: Path) -> None:
    output = output_of(compile_kernel, TRITON_CACHE_DIR=str(tmp_path))
    for case, compiled in json.loads(output.splitlines()[-1]).items():
        lines = compiled["ptx"].splitlines()
        kind = "e4m3.e4m3" if case.startswith("fp8") else "bf16"
        assert any("mma" in line and kind in line for line in lines), case
        assert any("cp.async" in line and "], 0x10" in line for line in lines), case
        assert not any("cvt" in line and "e4m3" in line for line in lines), case
        assert compiled["shared_bytes"] <= 227 << 10
