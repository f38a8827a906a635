"""Experts in four bits: the layout, the definition, and the kernel interpreted and compiled."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.expert_routing import INT4_TILE_ROWS, Routing
from hisparse_pd.kernels.experts import run_experts
from hisparse_pd.kernels.int4 import (
    GROUP_SIZES,
    MIDDLE,
    Int4Form,
    Int4Matrices,
    dequantize,
    pack,
    packed_shape,
    quantize,
    round_tokens,
    unpack,
)
from tests.unit.kernels.triton_here import (
    compiled_for_hopper,
    compiles_launches,
    interpreted,
    interprets_loops,
    needs_triton,
    output_of,
)

NUM_EXPERTS, TOP_K = 5, 2
FORMS = [Int4Form(group, has_zeros, torch.float32) for group in GROUP_SIZES for has_zeros in (False, True)]


def matrices_of(dense: Tensor, form: Int4Form) -> Int4Matrices:
    """Return ``dense`` [num_experts, num_matrices, rows, columns] in four bits."""
    num_experts, num_matrices, rows, columns = dense.shape
    found = Int4Matrices.empty(num_experts, num_matrices, rows, columns, form, torch.device("cpu"))
    for place in itertools.product(*map(range, dense.shape[:2])):
        values, scales, zeros = quantize(dense[place], form)
        found.values[place] = pack(values, form.group_size)
        found.scales[place] = scales
        if zeros is not None and found.zeros is not None:
            found.zeros[place] = zeros
    return found


def draw(num_tokens: int, form: Int4Form, hidden: int = 256, inner: int = 128) -> tuple[Tensor, ...]:
    """Return tokens, expert ids, weights, and the matrices of every expert."""
    generator = torch.Generator().manual_seed(num_tokens + form.group_size)
    x = torch.randn(num_tokens, hidden, generator=generator)
    ids = [torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)]
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    gate_up = torch.randn(NUM_EXPERTS, 2, inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(NUM_EXPERTS, 1, hidden, inner, generator=generator) / inner**0.5
    return x, torch.stack(ids), weights, gate_up, down


def part(whole: Int4Matrices, experts: slice) -> Int4Matrices:
    zeros = None if whole.zeros is None else whole.zeros[experts]
    return replace(whole, values=whole.values[experts], scales=whole.scales[experts], zeros=zeros)


# --- layout and definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_every_number_has_one_place(rows: int, group_size: int) -> None:
    columns = 3 * group_size
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    packed = pack(values, group_size)
    assert packed.shape == packed_shape(rows, columns, Int4Form(group_size, has_zeros=False))
    assert torch.equal(unpack(packed)[:rows], values)
    assert not unpack(packed)[rows:].any()


def test_a_word_has_the_numbers_of_its_thread_in_the_documented_order() -> None:
    values = torch.zeros((64, 64), dtype=torch.uint8)
    warp, i, j, step = 2, 5, 3, 1
    rows, columns = 16 * warp + i, 16 * step + 2 * j
    offsets = ((0, 0), (8, 0), (0, 8), (8, 8), (0, 1), (8, 1), (0, 9), (8, 9))
    for number, (row, column) in enumerate(offsets):
        values[rows + row, columns + column] = number + 1
    packed = pack(values, 64)
    word = int(packed[0, 0, 32 * warp + 4 * i + j, step]) & 0xFFFFFFFF
    assert [word >> 4 * number & 15 for number in range(8)] == list(range(1, 9))
    assert int((packed != 0).sum()) == 1


def test_a_weight_is_rounded_once() -> None:
    values = torch.tensor([[0, 15] * 16, [3, 8] * 16], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.3, 1.7]]), torch.tensor([[5, 8]], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize(values, scales, zeros, dtype)
        expected = torch.tensor([[-5 * 0.3, 10 * 0.3], [-5 * 1.7, 0.0]]).to(dtype)
        torch.testing.assert_close(found[:, :2], expected, rtol=1e-7, atol=0)
        assert torch.equal(
            dequantize(values, scales, None, dtype),
            dequantize(values, scales, torch.full_like(zeros, MIDDLE), dtype),
        )


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_within_half_a_step(form: Int4Form) -> None:
    dense = torch.randn(1, 1, 48, 256, generator=torch.Generator().manual_seed(2))
    found = matrices_of(dense, form)
    errors = (found.of(0, torch.float32) - dense[0]).abs().view(48, -1, form.group_size).amax(dim=2)
    # Besides rounding to steps, the largest number of a group may be cut off by half a step of its zero.
    assert (errors <= found.scales[0, 0].t() * 1.01).all()
    assert (errors <= found.scales[0, 0].t() * 0.51).float().mean() > (0.5 if form.has_zeros else 0.99)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_experts_compute_with_the_weights_that_the_numbers_stand_for(num_tokens: int, form: Int4Form) -> None:
    if not num_tokens:
        x, ids, weights, *dense = (
            each[:0] if number < 3 else each for number, each in enumerate(draw(1, form))
        )
    else:
        x, ids, weights, *dense = draw(num_tokens, form)
    gate_up, down = (matrices_of(matrix, form) for matrix in dense)
    routing = Routing.plan(ids, weights, NUM_EXPERTS, in_int4=True)
    total = torch.zeros(num_tokens, TOP_K, x.shape[1])
    for first, end in ((0, 2), (2, NUM_EXPERTS)):
        experts = slice(first, end)
        total += run_experts(x, routing, part(gate_up, experts), part(down, experts), first)
    for token, choices in enumerate(ids.tolist()):
        for choice, expert in enumerate(choices):
            gate, up = gate_up.of(expert, torch.float64) @ x[token].double()
            inner = torch.nn.functional.silu(gate) * up
            expected = down.of(expert, torch.float64)[0] @ inner * weights[token, choice]
            torch.testing.assert_close(total[token, choice].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_rows_fp8_numbers_depend_on_that_row_alone() -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 6)[:, None]
    values, scales = round_tokens(x)
    assert torch.equal(values.abs().amax(dim=1), torch.full((6,), 448.0))
    assert ((values * scales[:, None] - x).abs() <= x.abs() / 16 + scales[:, None] * 2**-10).all()
    for row in range(6):
        alone, scale = round_tokens(x[row : row + 1])
        assert torch.equal(alone[0], values[row])
        assert torch.equal(scale[0], scales[row])


@pytest.mark.I5
@pytest.mark.parametrize("form", [FORMS[1], FORMS[2]])
def test_a_row_has_the_same_bits_alone_and_among_others(form: Int4Form) -> None:
    x, ids, weights, *dense = draw(40, form)
    gate_up, down = (matrices_of(matrix, form) for matrix in dense)

    def results_of(rows: slice) -> Tensor:
        routing = Routing.plan(ids[rows], weights[rows], NUM_EXPERTS, in_int4=True)
        return run_experts(x[rows], routing, gate_up, down, 0)

    many = results_of(slice(0, 40))
    for rows in (slice(0, 1), slice(7, 8), slice(3, 30)):
        assert torch.equal(results_of(rows), many[rows])


@pytest.mark.parametrize(
    ("num_tokens", "tile_rows"), [(1, 16), (20, 16), (40, 32), (80, 64), (81, 128), (9000, 128)]
)
def test_a_tile_has_twice_the_rows_of_an_average_expert(num_tokens: int, tile_rows: int) -> None:
    ids = torch.zeros((num_tokens, TOP_K), dtype=torch.int64)
    assert Routing.plan(ids, ids, NUM_EXPERTS, in_int4=True).tile_rows == tile_rows


# --- the kernel ------------------------------------------------------------------------------------------


def interpret_cases() -> None:
    from hisparse_pd.kernels.triton_int4 import round_tokens_triton, run_int4_triton

    # Sizes that a block of the kernel's is no part of, too.
    sizes = ((1, 160, 96), (3, 96, 160), (50, 256, 192), (9, 64, 320), (2, 256, 384), (30, 256, 128))
    for form, (num_tokens, hidden, inner) in zip(FORMS, sizes, strict=True):
        x, ids, weights, *dense = draw(num_tokens, form, hidden, inner)
        gate_up, down = (matrices_of(matrix, form) for matrix in dense)
        routing = Routing.plan(ids, weights, NUM_EXPERTS, in_int4=True)
        for first, end in ((0, NUM_EXPERTS), (1, 3)):
            shard = part(gate_up, slice(first, end)), part(down, slice(first, end)), first
            found = run_int4_triton(x, routing, *shard)
            torch.testing.assert_close(found, run_experts(x, routing, *shard), rtol=1e-4, atol=1e-5)
    for x, is_gated in ((torch.randn(3, 200), False), (torch.randn(2, 400), True)):
        values, scales = round_tokens_triton(x, is_gated=is_gated)
        gate, up = x.chunk(2, dim=1)
        expected, expected_scales = round_tokens(torch.nn.functional.silu(gate) * up if is_gated else x)
        torch.testing.assert_close(scales, expected_scales)
        # The interpreter rounds some halves the wrong way, and drops carries.
        assert (values == expected).float().mean() > 0.85


@interprets_loops
def test_interpreted_kernel() -> None:
    interpreted(interpret_cases)


ORDER_IN_FP8 = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
"""The columns of each 16 whose numbers are adjacent."""


def lay_out_cases() -> None:
    """Undo the layout of each row."""
    from hisparse_pd.kernels.triton_int4_tokens import lay_out

    columns, num_rows = 160, 80
    matrices = Int4Matrices.empty(3, 1, 64, columns, Int4Form(32, has_zeros=False), torch.device("cpu"))
    ids = torch.stack((torch.zeros(40, dtype=torch.int64), torch.arange(40) % NUM_EXPERTS), dim=1)
    for is_rounded, is_first in itertools.product((False, True), repeat=2):
        routing = Routing.plan(ids, torch.rand(ids.shape), NUM_EXPERTS, is_rounded=is_rounded, in_int4=True)
        order = routing.order.long()
        x = torch.randn((40, columns) if is_first else (num_rows, 2 * columns)).bfloat16()
        found = lay_out(x, routing, 1, matrices, is_first=is_first)
        gate, up = x.float().chunk(2, dim=1)
        expected = x[order // TOP_K].float() if is_first else torch.nn.functional.silu(gate) * up
        factors = torch.ones(num_rows) if is_first else routing.weights[order]
        if is_rounded:
            expected, scales = round_tokens(expected)
            factors = factors * scales
        starts = routing.starts.tolist()
        places = range(starts[1], starts[4])  # of this rank's experts
        for place in places:
            of_expert = place - max(start for start in starts if start <= place)
            pieces = found.values[:, place].reshape(-1, 8, 16)
            row = pieces[:, [piece ^ of_expert % 8 for piece in range(8)]].flatten()
            numbers = row.view(torch.float8_e4m3fn if is_rounded else torch.bfloat16)[:columns].float()
            wanted = expected[place]
            if is_rounded:
                wanted = wanted.view(-1, 16)[:, ORDER_IN_FP8].flatten()
                assert found.sums is not None
                sums = numbers.view(-1, 32).sum(dim=1) / 512
                torch.testing.assert_close(found.sums[:, place], sums, rtol=1e-5, atol=1e-5)
            # The interpreter rounds some halves the wrong way, and drops carries.
            is_near = (numbers - wanted).abs() <= wanted.abs() * (0.13 if is_rounded else 0.01)
            assert is_near.float().mean() > 0.9
        own = list(places)
        torch.testing.assert_close(found.factors[own], factors[own])
        assert torch.equal(found.targets[own].long(), torch.tensor(own) if is_first else order[own])


@interprets_loops
def test_rows_are_laid_out_as_documented() -> None:
    interpreted(lay_out_cases)


def compile_lay_out() -> None:
    from hisparse_pd.kernels.triton_int4_tokens import lay_out

    meta = torch.device("meta")
    tables = torch.empty(16, dtype=torch.int32, device=meta)
    with compiles_launches() as launched:
        for is_rounded, is_first in itertools.product((False, True), repeat=2):
            sizes = (2, 2048, 7168) if is_first else (1, 7168, 2048)
            matrices = Int4Matrices.empty(32, *sizes, Int4Form(128, has_zeros=False), meta)
            order = torch.empty(40, dtype=torch.int32, device=meta)
            weights = torch.empty(40, device=meta)
            routing = Routing(order, tables, tables, tables, weights, 8, 16, is_rounded=is_rounded)
            x = torch.empty((5, 7168) if is_first else (40, 4096), dtype=torch.bfloat16, device=meta)
            lay_out(x, routing, 0, matrices, is_first=is_first)
    assert launched == {"_lay_out_kernel"}


@needs_triton
def test_lay_out_compiles_for_hopper(tmp_path: Path) -> None:
    output_of(compile_lay_out, TRITON_CACHE_DIR=str(tmp_path))


def compile_kernel() -> None:
    from hisparse_pd.kernels.triton_int4 import TILINGS, _int4_product_kernel

    result = {}
    for (tile_rows, tiling), is_full in itertools.product(TILINGS.items(), (False, True)):
        pointers = {"x": "*bf16", "out": "*bf16", "values": "*i32", "scales": "*bf16"}
        pointers |= dict.fromkeys(("token_scales", "weights"), "*fp32") | {"zeros": "*u8"}
        pointers |= dict.fromkeys(("order", "starts", "tile_starts", "tile_experts"), "*i32")
        constants = {
            **{"NUM_MATRICES": 1, "ROWS": 7168, "COLUMNS": 2048, "GROUP": 128, "UNIT_COLUMNS": 64},
            **{"UNIT_ROWS": 64, "MIDDLE": MIDDLE, "IS_FIRST": False, "IS_BFLOAT16": True, "OVERLAPS": True},
            **{"HAS_TOKEN_SCALES": is_full, "HAS_ZEROS": is_full},
            **{"TILE_ROWS": tile_rows, "BLOCK_ROWS": tiling.block_rows},
        }
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        result[f"{tile_rows} {is_full}"] = compiled_for_hopper(
            _int4_product_kernel, pointers, constants, list(pointers), **options
        )
    with compiles_launches() as launched:
        for form, num_tokens in itertools.product((Int4Form(128, True), Int4Form(64, False)), (5, 4000)):
            compile_launches(replace(form, rounds_tokens=form.has_zeros), num_tokens)
    assert launched == {"_int4_product_kernel", "_round_tokens_kernel", "_quantize_kernel"}
    print(json.dumps(result))


def compile_launches(form: Int4Form, num_tokens: int) -> None:
    """Launch a layer's kernels at DeepSeek-V3.2's sizes, with tensors that have no memory."""
    from hisparse_pd.kernels.triton_int4 import run_int4_triton

    meta, num_experts, top_k = torch.device("meta"), 256, 8
    tile_rows = 16 if num_tokens == 5 else 128
    tables = torch.empty(16, dtype=torch.int32, device=meta)
    order = torch.empty(num_tokens * top_k, dtype=torch.int32, device=meta)
    weights = torch.empty(num_tokens * top_k, device=meta)
    routing = Routing(order, tables, tables, tables, weights, top_k, tile_rows, is_rounded=form.rounds_tokens)
    gate_up, down = (
        Int4Matrices.empty(num_experts // 8, *sizes, form, meta)
        for sizes in ((2, 2048, 7168), (1, 7168, 2048))
    )
    run_int4_triton(
        torch.empty((num_tokens, 7168), dtype=torch.bfloat16, device=meta), routing, gate_up, down, 0
    )


@needs_triton
def test_weights_meet_the_tensor_cores_in_registers(tmp_path: Path) -> None:
    """They are loaded in 16 bytes, and only their packed form is in shared memory."""
    output = output_of(compile_kernel, TRITON_CACHE_DIR=str(tmp_path))
    found = json.loads(output.splitlines()[-1])
    assert len(found) == 2 * len(INT4_TILE_ROWS)
    for case, compiled in found.items():
        lines = compiled["ptx"].splitlines()
        products = [line for line in lines if "wgmma.mma_async" in line]
        assert products, case
        assert all("bf16.bf16" in line and "}, {" in line for line in products), case
        assert any("ld.shared.v4" in line for line in lines), case
        assert any("cp.async" in line and "], 0x10" in line for line in lines), case
        assert compiled["shared_bytes"] <= 227 << 10
