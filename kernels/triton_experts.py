# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.experts.run_experts`` in Triton: two grouped products, with weights in fp8 or the model's dtype.

A program takes one tile of ``Routing`` and some rows of its expert's matrix. If the ``Routing`` is rounded,
activations are rounded to fp8 before each product (``kernels.block_linear``); otherwise fp8 weights are
widened, which is exact. The scales of blocks are applied to their float32 products. Grids follow from shapes
alone, and programs beyond the last tile return, so that a CUDA graph can capture the launches. Consecutive
programs share a tile, so that its tokens, and weights that the expert's next tile reads again, are in the L2
cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.expert_routing import (
    FEW_TILE_ROWS,
    MANY_TILE_ROWS,
    ExpertMatrices,
    Routing,
    most_tiles,
)
from hisparse_pd.kernels.fp8_rows import Rounded, quantize_gated, quantize_rows
from hisparse_pd.kernels.gluon_experts import gather_rows, multiply_rows, takes_groups
from hisparse_pd.kernels.triton_launch import begin, launch_options


@dataclass(frozen=True)
class Tiling:
    """The block of a matrix that a program multiplies at a time, and how Triton compiles its loop."""

    block_rows: int
    """Rows of the matrix; they divide ``BLOCK``, so that a product has one scale."""
    block_columns: int
    num_warps: int
    num_stages: int


TILINGS: Final = {FEW_TILE_ROWS: Tiling(128, 64, 4, 4), MANY_TILE_ROWS: Tiling(128, 64, 8, 3)}
"""Tilings for products in bfloat16, by the rows of a tile."""
FLOAT32_TILING: Final = Tiling(32, 32, 4, 2)
"""Tiling for float32 products, which do not use tensor cores."""
ROUNDED_TILINGS: Final = {FEW_TILE_ROWS: Tiling(128, 128, 4, 4), MANY_TILE_ROWS: Tiling(128, 128, 8, 3)}
"""Tilings for products of fp8 with fp8, by the rows of a tile."""
NARROW_TILING: Final = Tiling(32, 128, 4, 8)
NARROW_BFLOAT16_TILING: Final = Tiling(64, 128, 4, 3)
"""Tilings for few tiles: they make more programs, each with as many loads of weights in flight as fit."""
ENOUGH_PROGRAMS: Final = 120
"""A launch of up to this many programs gets a narrow tiling: more would fill a GPU (an H200 has 132
multiprocessors) without it."""


def run_experts_triton(
    hidden: Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    first_expert: int,
    rounded: Rounded | None = None,
    *,
    has_others: bool = True,
) -> Tensor:
    """See ``kernels.experts.run_experts``. ``has_others``: whether some rows belong to other ranks' experts.
    Nothing is computed for these, so all results are set to zero first."""
    hidden = hidden.contiguous()
    num_rows = len(routing.order)
    results = (hidden.new_zeros if has_others else hidden.new_empty)((num_rows, hidden.shape[1]))
    with torch.cuda.device_of(hidden):
        if routing.is_rounded:
            tokens = rounded or quantize_rows(hidden, ue8m0=gate_up.ue8m0)
            _run_rounded(tokens, routing, gate_up, down, first_expert, results)
        else:
            inner = hidden.new_empty((num_rows, gate_up.values.shape[2]))
            _launch(hidden, None, gate_up, inner, routing, first_expert, is_first=True)
            _launch(inner, None, down, results, routing, first_expert, is_first=False)
    return results.view(-1, routing.top_k, results.shape[1])


def _run_rounded(
    tokens: Rounded,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    first_expert: int,
    results: Tensor,
) -> None:
    """Write both products of ``tokens`` in fp8 to ``results``, [num_rows, hidden_size]."""
    gates_and_ups = results.new_empty((len(results), 2 * gate_up.values.shape[2]))
    # Groups of warps multiply many rows on Hopper (``gluon_experts.py``); they read gathered rows.
    if all(takes_groups(tokens.values, each, routing) for each in (gate_up, down)):
        rows = gather_rows(tokens, routing, first_expert, len(gate_up.values))
        multiply_rows(rows, gate_up, gates_and_ups, routing, first_expert, is_first=True)
        del rows  # ``inner`` may take the memory
        inner = quantize_gated(gates_and_ups[None], ue8m0=down.ue8m0)
        multiply_rows(inner, down, results, routing, first_expert, is_first=False)
    else:
        _launch(*tokens, gate_up, gates_and_ups, routing, first_expert, is_first=True)
        inner = quantize_gated(gates_and_ups[None], ue8m0=down.ue8m0)
        _launch(*inner, down, results, routing, first_expert, is_first=False)


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    matrices: ExpertMatrices,
    out: Tensor,
    routing: Routing,
    first_expert: int,
    *,
    is_first: bool,
) -> None:
    """Launch one product. ``x_scales``: the scales of an fp8 ``x``, float32 [blocks of columns, rows of x];
    None if ``x`` is not rounded."""
    num_experts, num_matrices, rows, columns = matrices.values.shape
    num_tiles = most_tiles(len(routing.order), num_experts, routing.tile_rows)
    # Where activations are rounded, ``quantize_gated`` applies the gate; otherwise the first product does.
    is_gated = is_first and x_scales is None
    tiling = _tiling(x.dtype, routing.tile_rows, triton.cdiv(num_matrices * rows, BLOCK) * num_tiles)
    if is_gated:  # a program takes both matrices
        tiling = replace(tiling, block_rows=tiling.block_rows // num_matrices)
    grid = (triton.cdiv(rows, tiling.block_rows), num_tiles, 1 if is_gated else num_matrices)
    scales: Any = matrices.scales
    given_scales: Any = x_scales
    _product_kernel[grid](
        x,
        given_scales,
        matrices.values,
        scales,
        out,
        len(x),
        routing.order,
        routing.starts,
        routing.tile_starts,
        routing.tile_experts,
        routing.weights,
        first_expert,
        num_experts,
        routing.top_k,
        NUM_MATRICES=num_matrices,
        ROWS=rows,
        COLUMNS=columns,
        IS_FIRST=is_first,
        IS_GATED=is_gated,
        HAS_SCALES=scales is not None,
        IS_ROUNDED=x_scales is not None,
        SCALE_BLOCK=BLOCK,
        TILE_ROWS=routing.tile_rows,
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_COLUMNS=tiling.block_columns,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(x.device),
    )


def _tiling(dtype: torch.dtype, tile_rows: int, num_programs: int) -> Tiling:
    """Choose a tiling. ``num_programs``: how many there would be if each took BLOCK rows, as tilings that are
    not narrow do."""
    if dtype == torch.float32:
        return FLOAT32_TILING
    is_narrow = num_programs <= ENOUGH_PROGRAMS
    if dtype == FP8:
        return NARROW_TILING if is_narrow else ROUNDED_TILINGS[tile_rows]
    return NARROW_BFLOAT16_TILING if is_narrow else TILINGS[tile_rows]


@triton.jit(do_not_specialize=["num_sources"])
def _product_kernel(
    x,
    x_scales,
    values,
    scales,
    out,
    num_sources,
    order,
    starts,
    tile_starts,
    tile_experts,
    weights,
    first_expert,
    num_experts,
    top_k,
    NUM_MATRICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute ``out[tile] = x[tile] @ matrix.T``; the results of an expert's matrices are adjacent. If it
    IS_GATED, a program takes both matrices and writes ``silu`` of the first result times the second.

    The first product reads tokens and writes rows in the order of experts. The second reads those rows,
    weighs its results and writes them in the rows' original order. ``order`` to ``weights`` are those of
    ``Routing``; ``n`` are rows of a matrix, ``k`` its columns. ``x_scales``: [blocks of COLUMNS,
    num_sources]; ``scales``: [experts, NUM_MATRICES, blocks of ROWS, blocks of COLUMNS].
    """
    begin(OVERLAPS)
    tile = tl.load(tile_starts + first_expert) + tl.program_id(1)
    if tile >= tl.load(tile_starts + first_expert + num_experts):  # no tile of this rank's experts
        return
    expert = tl.load(tile_experts + tile)
    first = tl.load(starts + expert) + (tile - tl.load(tile_starts + expert)) * TILE_ROWS
    place = first + tl.arange(0, TILE_ROWS)  # a row's place in the order of experts
    is_row = place < tl.load(starts + expert + 1)
    row = tl.load(order + place, mask=is_row, other=0)
    source = row // top_k if IS_FIRST else place
    target = place if IS_FIRST else row

    n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    matrix = (expert - first_expert).to(tl.int64) * NUM_MATRICES + tl.program_id(2)
    blocks_across: tl.constexpr = tl.cdiv(COLUMNS, SCALE_BLOCK)
    # Scales are of blocks of SCALE_BLOCK rows and columns; this program's rows lie in one row of blocks.
    block_row = matrix * tl.cdiv(ROWS, SCALE_BLOCK) + tl.program_id(0) * BLOCK_ROWS // SCALE_BLOCK
    tokens = x + source.to(tl.int64)[:, None] * COLUMNS
    weight_rows = values + (matrix * ROWS + n)[:, None] * COLUMNS
    total = tl.zeros((TILE_ROWS, BLOCK_ROWS), dtype=tl.float32)
    total_up = total
    up_offset: tl.constexpr = tl.cdiv(ROWS, SCALE_BLOCK) * blocks_across
    if IS_ROUNDED:
        row_scales = x_scales + source
        row_scale = tl.load(row_scales, mask=is_row, other=0.0)
    if HAS_SCALES:
        block_scales = scales + block_row * blocks_across
        scale = tl.load(block_scales)
        if IS_GATED:
            up_scale = tl.load(block_scales + up_offset)

    for start in range(0, COLUMNS, BLOCK_COLUMNS):
        k = start + tl.arange(0, BLOCK_COLUMNS)
        is_column = (k < COLUMNS)[None, :]
        is_weight = (n < ROWS)[:, None] & is_column
        a = tl.load(tokens + k[None, :], mask=is_row[:, None] & is_column, other=0.0)
        b = tl.load(weight_rows + k[None, :], mask=is_weight, other=0.0)
        if IS_GATED:
            b_up = tl.load(weight_rows + ROWS * COLUMNS + k[None, :], mask=is_weight, other=0.0)
        following = tl.minimum(start + BLOCK_COLUMNS, COLUMNS - 1) // SCALE_BLOCK
        if IS_ROUNDED:
            total += tl.dot(a, b.T) * (row_scale * scale)[:, None]
            # Scales are loaded one round ahead, because Triton does not pipeline these loads.
            row_scale = tl.load(row_scales + following.to(tl.int64) * num_sources, mask=is_row, other=0.0)
        elif HAS_SCALES:
            total += tl.dot(a, b.to(a.dtype).T, input_precision="ieee") * scale
            if IS_GATED:
                total_up += tl.dot(a, b_up.to(a.dtype).T, input_precision="ieee") * up_scale
                up_scale = tl.load(block_scales + up_offset + following)
        else:
            total = tl.dot(a, b.T, total, input_precision="ieee")
            if IS_GATED:
                total_up = tl.dot(a, b_up.T, total_up, input_precision="ieee")
        if HAS_SCALES:
            scale = tl.load(block_scales + following)

    if not IS_FIRST:
        total *= tl.load(weights + row, mask=is_row, other=0.0)[:, None]
    mask = is_row[:, None] & (n < ROWS)[None, :]
    num_results: tl.constexpr = 1 if IS_GATED else NUM_MATRICES
    if IS_GATED:  # both are rounded first, so that they have the bits of separate results
        dtype: tl.constexpr = out.dtype.element_ty
        gate, up = total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * up
    out += target.to(tl.int64)[:, None] * (num_results * ROWS) + tl.program_id(2) * ROWS
    tl.store(out + n[None, :], total, mask=mask)
