# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.experts.run_experts`` on a GPU for weights in four bits: two grouped products and the gate.

bfloat16 on Hopper goes to ``kernels.int4_experts``. Other GPUs and float32 have the Triton kernel of this
module, which gives the same bits in bfloat16.

A program takes one tile of ``Routing`` and some rows of its expert's matrix, as in
``kernels.triton_experts``. The matrix is the left operand of its products: each thread loads 16 bytes of it,
makes the weights' whole numbers of them in its registers, where tensor cores read them (``kernels.int4`` has
the layout), and so they never pass through shared memory. Tokens are the right operand, so a tile may have as
few as 16 rows. A group's scales multiply its float32 sum. A row is added up by groups, and within a group in
steps of 16 columns, whatever the tile, so its bits depend on that row alone.

Where activations are rounded to fp8, they come as bfloat16, which has all numbers of fp8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels import int4_experts
from hisparse_pd.kernels.block_fp8 import SMALLEST_PEAK
from hisparse_pd.kernels.expert_routing import Routing, most_tiles
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.int4 import MIDDLE, UNIT_ROWS, Int4Matrices, unit_columns
from hisparse_pd.kernels.triton_fp8 import gated_rows_triton, round_blocks
from hisparse_pd.kernels.triton_int4_tokens import lay_out
from hisparse_pd.kernels.triton_launch import begin, launch_options


@dataclass(frozen=True)
class Int4Tiling:
    """The rows of the matrix that a program takes, a multiple of UNIT_ROWS, and how Triton compiles it."""

    block_rows: int
    num_warps: int
    num_stages: int


TILINGS: Final = {
    16: Int4Tiling(256, 8, 4),
    32: Int4Tiling(128, 4, 4),
    64: Int4Tiling(128, 8, 3),
    128: Int4Tiling(128, 8, 3),
}
"""Tilings in bfloat16, by the rows of a tile. Tokens of few rows are read again for each block of the matrix,
so that large blocks leave the L2 cache to the weights."""
FLOAT32_TILING: Final = Int4Tiling(64, 4, 2)
"""Tiling for float32 products, which do not use tensor cores."""


def run_int4_triton(
    hidden: Tensor,
    routing: Routing,
    gate_up: Int4Matrices,
    down: Int4Matrices,
    first_expert: int,
    *,
    has_others: bool = True,
) -> Tensor:
    """See ``kernels.experts.run_experts``. ``has_others``: whether some rows belong to other ranks' experts.
    Nothing is computed for these, so all results are set to zero first."""
    hidden = hidden.contiguous()
    if all(int4_experts.takes(hidden, each) for each in (gate_up, down)):
        return _run_by_teams(hidden, routing, gate_up, down, first_expert, has_others=has_others)
    num_rows = len(routing.order)
    results = (hidden.new_zeros if has_others else hidden.new_empty)((num_rows, hidden.shape[1]))
    gates_and_ups = hidden.new_empty((num_rows, 2 * gate_up.rows))
    with torch.cuda.device_of(hidden):
        tokens, scales = round_tokens_triton(hidden, is_gated=False) if routing.is_rounded else (hidden, None)
        _launch(tokens, scales, gate_up, gates_and_ups, routing, first_expert, is_first=True)
        if routing.is_rounded:
            inner, scales = round_tokens_triton(gates_and_ups, is_gated=True)
        else:
            inner = gated_rows_triton(gates_and_ups[None], hidden.dtype)
        _launch(inner, scales, down, results, routing, first_expert, is_first=False)
    return results.view(-1, routing.top_k, results.shape[1])


def _run_by_teams(
    hidden: Tensor,
    routing: Routing,
    gate_up: Int4Matrices,
    down: Int4Matrices,
    first_expert: int,
    *,
    has_others: bool,
) -> Tensor:
    """Do ``run_int4_triton`` on Hopper (``kernels.int4_experts``)."""
    num_rows = len(routing.order)
    with torch.cuda.device_of(hidden):
        tokens = lay_out(hidden, routing, first_expert, gate_up, is_first=True)
        gates_and_ups = hidden.new_empty((num_rows, 2 * gate_up.rows))
        int4_experts.multiply(tokens, gate_up, gates_and_ups, routing, first_expert)
        del tokens  # ``results`` may take the memory
        inner = lay_out(gates_and_ups, routing, first_expert, down, is_first=False)
        results = (hidden.new_zeros if has_others else hidden.new_empty)((num_rows, hidden.shape[1]))
        int4_experts.multiply(inner, down, results, routing, first_expert)
    return results.view(-1, routing.top_k, results.shape[1])


def _launch(
    x: Tensor,
    token_scales: Tensor | None,
    matrices: Int4Matrices,
    out: Tensor,
    routing: Routing,
    first_expert: int,
    *,
    is_first: bool,
) -> None:
    """Launch one product. ``token_scales``: the scales of the rows of ``x``, or None."""
    num_experts, num_matrices = matrices.values.shape[:2]
    num_tiles = most_tiles(len(routing.order), num_experts, routing.tile_rows)
    tiling = FLOAT32_TILING if x.dtype == torch.float32 else TILINGS[routing.tile_rows]
    given_scales: Any = token_scales
    zeros: Any = matrices.zeros
    group_size = matrices.form.group_size
    _int4_product_kernel[(triton.cdiv(matrices.rows, tiling.block_rows), num_tiles, num_matrices)](
        x,
        given_scales,
        matrices.values,
        matrices.scales,
        zeros,
        out,
        routing.order,
        routing.starts,
        routing.tile_starts,
        routing.tile_experts,
        routing.weights,
        first_expert,
        num_experts,
        routing.top_k,
        NUM_MATRICES=num_matrices,
        ROWS=matrices.rows,
        COLUMNS=matrices.columns,
        GROUP=group_size,
        UNIT_COLUMNS=unit_columns(group_size),
        UNIT_ROWS=UNIT_ROWS,
        MIDDLE=MIDDLE,
        IS_FIRST=is_first,
        HAS_TOKEN_SCALES=token_scales is not None,
        HAS_ZEROS=zeros is not None,
        IS_BFLOAT16=x.dtype == torch.bfloat16,
        TILE_ROWS=routing.tile_rows,
        BLOCK_ROWS=tiling.block_rows,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(x.device),
    )


@triton.jit
def _int4_product_kernel(
    x,
    token_scales,
    values,
    scales,
    zeros,
    out,
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
    GROUP: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    UNIT_ROWS: tl.constexpr,
    MIDDLE: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute ``out[tile] = x[tile] @ matrix.T``; the results of an expert's matrices are adjacent.

    The first product reads tokens and writes rows in the order of experts. The second reads those rows,
    weighs its results and writes them in the rows' original order. ``order`` to ``weights`` are those of
    ``Routing``; ``n`` are rows of a matrix, ``k`` its columns. ``scales`` and ``zeros``: [experts,
    NUM_MATRICES, groups, ROWS].
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

    first_n = tl.program_id(0) * BLOCK_ROWS
    n = first_n + tl.arange(0, BLOCK_ROWS)
    matrix = (expert - first_expert).to(tl.int64) * NUM_MATRICES + tl.program_id(2)
    GROUPS: tl.constexpr = COLUMNS // GROUP
    STEPS: tl.constexpr = UNIT_COLUMNS // 16
    UNIT: tl.constexpr = 128 * STEPS
    UNITS_DOWN: tl.constexpr = (ROWS + UNIT_ROWS - 1) // UNIT_ROWS
    UNITS_ACROSS: tl.constexpr = COLUMNS // UNIT_COLUMNS
    IS_WHOLE: tl.constexpr = ROWS % BLOCK_ROWS == 0
    # The threads that multiply the units of this program's rows, 128 for each unit.
    thread = tl.arange(0, BLOCK_ROWS * 2)
    unit = tl.program_id(0) * (BLOCK_ROWS // UNIT_ROWS) + thread // 128
    is_unit = (unit < UNITS_DOWN)[:, None]
    packed_rows = values + (matrix * UNITS_DOWN + unit)[:, None] * (UNITS_ACROSS * UNIT)
    packed_rows += (thread % 128 * STEPS)[:, None] + tl.arange(0, STEPS)[None, :]
    tokens = x + source.to(tl.int64)[:, None] * COLUMNS
    group_scales = scales + matrix * (GROUPS * ROWS) + n
    scale = _scales_of(group_scales, n, ROWS, IS_WHOLE)
    if HAS_ZEROS:
        # The first of a thread's two rows in a unit; the other one is 8 further.
        upper = unit * UNIT_ROWS + thread % 128 // 32 * 16 + thread % 32 // 4
        group_zeros = zeros + matrix * (GROUPS * ROWS) + upper
        zero, lower_zero = _zeros_of(group_zeros, upper, ROWS, IS_WHOLE)
    total = tl.zeros((BLOCK_ROWS, TILE_ROWS), dtype=tl.float32)
    for group in range(0, GROUPS):
        part = tl.zeros((BLOCK_ROWS, TILE_ROWS), dtype=tl.float32)
        for start in tl.static_range(0, GROUP, UNIT_COLUMNS):
            k = group * GROUP + start + tl.arange(0, UNIT_COLUMNS)
            a = tl.load(tokens + k[None, :], mask=is_row[:, None], other=0.0)
            packed_at = packed_rows + (group * (GROUP // UNIT_COLUMNS) + start // UNIT_COLUMNS) * UNIT
            packed = tl.load(packed_at) if IS_WHOLE else tl.load(packed_at, mask=is_unit, other=0)
            if HAS_ZEROS:
                b = _weights_of(packed, zero[:, None], lower_zero[:, None], BLOCK_ROWS, STEPS, IS_BFLOAT16)
            else:
                middle = tl.full((1, 1), MIDDLE, tl.int32)
                b = _weights_of(packed, middle, middle, BLOCK_ROWS, STEPS, IS_BFLOAT16)
            part = tl.dot(b, a.T, part, input_precision="ieee")
        total += part * scale[:, None]
        # Scales and zeros are loaded one round ahead, because Triton does not pipeline these loads.
        following = tl.minimum(group + 1, GROUPS - 1) * ROWS
        scale = _scales_of(group_scales + following, n, ROWS, IS_WHOLE)
        if HAS_ZEROS:
            zero, lower_zero = _zeros_of(group_zeros + following, upper, ROWS, IS_WHOLE)

    if HAS_TOKEN_SCALES:
        total *= tl.load(token_scales + source, mask=is_row, other=0.0)[None, :]
    if not IS_FIRST:
        total *= tl.load(weights + row, mask=is_row, other=0.0)[None, :]
    out += target.to(tl.int64)[None, :] * (NUM_MATRICES * ROWS) + tl.program_id(2) * ROWS
    tl.store(out + n[:, None], total, mask=is_row[None, :] & (n < ROWS)[:, None])


@triton.jit
def _scales_of(addresses, n, ROWS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Return the scales of the rows ``n`` in float32, with zeros after the last row."""
    if IS_WHOLE:
        return tl.load(addresses).to(tl.float32)
    else:
        return tl.load(addresses, mask=n < ROWS, other=0.0).to(tl.float32)


@triton.jit
def _zeros_of(addresses, n, ROWS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Return the zeros of the rows ``n`` and ``n + 8`` in int32."""
    if IS_WHOLE:
        return tl.load(addresses).to(tl.int32), tl.load(addresses + 8).to(tl.int32)
    else:
        upper = tl.load(addresses, mask=n < ROWS, other=0)
        return upper.to(tl.int32), tl.load(addresses + 8, mask=n + 8 < ROWS, other=0).to(tl.int32)


@triton.jit
def _weights_of(
    packed, zero, lower_zero, BLOCK_ROWS: tl.constexpr, STEPS: tl.constexpr, IS_BFLOAT16: tl.constexpr
):
    """Return whole numbers, weights without their scales: [BLOCK_ROWS, 16 * STEPS], bfloat16 or float32.

    ``packed``: int32 [2 * BLOCK_ROWS, STEPS]; ``zero`` and ``lower_zero``: int32 [2 * BLOCK_ROWS or 1, 1], of
    a thread's two rows. In bfloat16, 0x4300 is 128, and with four bits at its end 128 + q; -(128 + zero) is
    added, which is exact.
    """
    if IS_BFLOAT16:
        a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
            "{"
            ".reg .b32 ones, a, b, c, d;"
            "mov.b32 ones, 0x3f803f80;"
            "shr.u32 b, $8, 4;"
            "shr.u32 c, $8, 8;"
            "shr.u32 d, $8, 12;"
            "lop3.b32 a, $8, 0x000f000f, 0x43004300, 0xea;"
            "lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;"
            "lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;"
            "lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;"
            "fma.rn.bf16x2 a, a, ones, $9;"
            "fma.rn.bf16x2 b, b, ones, $10;"
            "fma.rn.bf16x2 c, c, ones, $9;"
            "fma.rn.bf16x2 d, d, ones, $10;"
            "mov.b32 {$0, $1}, a;"
            "mov.b32 {$2, $3}, b;"
            "mov.b32 {$4, $5}, c;"
            "mov.b32 {$6, $7}, d;"
            "}",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [packed, zero * 0x10001 | -0x3CFF3D00, lower_zero * 0x10001 | -0x3CFF3D00],  # 0xC300C300
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )
    else:
        a0 = ((packed & 15) - zero).to(tl.float32)
        b0 = ((packed >> 4 & 15) - lower_zero).to(tl.float32)
        c0 = ((packed >> 8 & 15) - zero).to(tl.float32)
        d0 = ((packed >> 12 & 15) - lower_zero).to(tl.float32)
        a1 = ((packed >> 16 & 15) - zero).to(tl.float32)
        b1 = ((packed >> 20 & 15) - lower_zero).to(tl.float32)
        c1 = ((packed >> 24 & 15) - zero).to(tl.float32)
        d1 = ((packed >> 28 & 15) - lower_zero).to(tl.float32)
    # Joined, the last dimensions are: column + 8, row + 8, column + 1.
    even = tl.join(tl.join(a0, c0), tl.join(b0, d0))
    odd = tl.join(tl.join(a1, c1), tl.join(b1, d1))
    parts = tl.reshape(tl.join(even, odd), (BLOCK_ROWS // 16, 8, 4, STEPS, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 5, 1, 3, 4, 2, 6)), (BLOCK_ROWS, STEPS * 16))


def round_tokens_triton(x: Tensor, *, is_gated: bool) -> tuple[Tensor, Tensor]:
    """Do ``kernels.int4.round_tokens`` in one launch for ``x`` [rows, columns]; with ``is_gated`` for
    ``silu(gate) * up`` of ``x`` [rows, 2 * columns], the gate's columns first."""
    columns = x.shape[1] // 2 if is_gated else x.shape[1]
    values = x.new_empty((len(x), columns))
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        _round_tokens_kernel[(len(x),)](
            x,
            values,
            scales,
            COLUMNS=columns,
            BLOCK_COLUMNS=triton.next_power_of_2(columns),
            IS_GATED=is_gated,
            LARGEST=FP8_MAX,
            SMALLEST_PEAK=SMALLEST_PEAK,
            num_warps=8,
            **launch_options(x.device),
        )
    return values, scales


@triton.jit
def _round_tokens_kernel(
    x,
    values,
    scales,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_GATED: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Round one row."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMNS)
    is_column = column < COLUMNS
    source = x + row * (2 * COLUMNS if IS_GATED else COLUMNS) + column
    number = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(source + COLUMNS, mask=is_column, other=0.0).to(tl.float32)
        number = number / (1.0 + tl.exp(-number)) * up
    rounded, scale = round_blocks(number, 0, LARGEST, SMALLEST_PEAK, False)
    tl.store(values + row * COLUMNS + column, rounded.to(values.dtype.element_ty), mask=is_column)
    tl.store(scales + row + tl.arange(0, 1), scale)
