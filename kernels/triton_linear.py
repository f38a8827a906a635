# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""Products of activations with a matrix on a GPU, both in fp8 or both in bfloat16, by split-K.

``kernels.block_linear`` calls ``linear_parts``. Columns are cut into parts whose number depends on the
matrix's shape alone. A part's columns are added up in order, and then the parts, so that a token has the same
bits among any number of tokens. For few tokens each part has its own program, so that the product of a small
matrix fills the GPU too and takes as long as reading the matrix; the caller adds up the parts. For many
tokens a program adds them up itself; on Hopper that is a program of ``kernels.gluon_linear``. The tensor
cores' wide operand is the matrix if tokens are few, and the tokens if they are many. Rows are the matrix's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels import gluon_linear
from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.fp8_rows import FEW_ROWS
from hisparse_pd.kernels.triton_launch import begin, launch_options, prefetch

ENOUGH_PROGRAMS: Final = 256
"""Programs that fill a GPU; a matrix with fewer tiles of PART_ROWS rows is cut into parts until there are as
many."""
PART_ROWS: Final = 128
MOST_PARTS: Final = 8
FEWEST_BLOCKS: Final = 4
"""Fewest blocks of columns in a part."""
PREFETCHED_BLOCKS: Final = 2
"""Blocks of columns that a program prefetches while the preceding kernel still runs."""


@dataclass(frozen=True)
class Tiling:
    """The sizes of one program's tile of the result, and how Triton compiles its loop."""

    tokens: int
    rows: int
    """Rows of the matrix; they divide ``BLOCK``, so that they have one scale."""
    num_stages: int
    num_warps: int = 4


FEW: Final = (Tiling(16, 128, 5), Tiling(32, 128, 5), Tiling(64, 128, 3))
"""Tilings for up to FEW_ROWS tokens; the first that holds all tokens is used."""
MANY: Final = Tiling(128, 64, 4)
"""Tiling for more tokens."""


def block_columns(values: Tensor) -> int:
    """Return how many columns of a matrix a program takes at a time: those of one scale, or as many bytes."""
    return BLOCK // values.itemsize


def num_parts(values: Tensor) -> int:
    """Return the number of parts into which the columns of a matrix are cut: for one of 512 rows and 7168
    columns in fp8, which are 56 blocks, 8 parts of 7 blocks."""
    rows, columns = values.shape
    wanted = ENOUGH_PROGRAMS // -(-rows // PART_ROWS)
    blocks = -(-columns // block_columns(values))
    part_blocks = -(-blocks // max(1, min(wanted, MOST_PARTS, blocks // FEWEST_BLOCKS)))
    return -(-blocks // part_blocks)


def linear_parts(
    x: Tensor, num_tokens: int, values: Tensor, x_scales: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """Return ``x @ values.T`` in parts, float32 [parts, num_tokens, rows], or their sum, bfloat16 [1,
    num_tokens, rows]. Up to FEW_ROWS tokens give the parts, and so does, on Hopper, one tile of tokens with
    many columns (``gluon_linear.is_split``); more give the sum. A single part is bfloat16, too.

    ``x``: [>= num_tokens, columns]; ``values``: [rows, columns]. Both are fp8 with scales, float32 [blocks
    across, len(x)] and [blocks down, blocks across], or both are bfloat16.
    """
    (rows, columns), block = values.shape, block_columns(values)
    blocks, parts = triton.cdiv(columns, block), num_parts(values)
    # Who multiplies: a program for each part if there are few tokens, else ``gluon_linear`` where it can.
    is_few = num_tokens <= FEW_ROWS
    by_gluon = not is_few and gluon_linear.takes_groups(x, values)
    programs = parts if is_few or (by_gluon and gluon_linear.is_split(num_tokens, blocks)) else 1
    tiling = next((few for few in FEW if few.tokens >= num_tokens), MANY)
    dtype = torch.bfloat16 if programs == 1 else torch.float32
    out = torch.empty((programs, num_tokens, rows), dtype=dtype, device=x.device)
    sizes = {
        "ROWS": rows,
        "COLUMNS": columns,
        "HAS_SCALES": scales is not None,
        "BLOCK": block,
        "SCALE_BLOCK": BLOCK,
        "PART_BLOCKS": triton.cdiv(blocks, parts),
        "PARTS": parts // programs,
    }
    scales_stride = 0 if x_scales is None else x_scales.stride(0)
    # Without scales a kernel gets any tensor in their place, and does not read it.
    x_scales, scales = (x if x_scales is None else x_scales), (values if scales is None else scales)
    with torch.cuda.device_of(x):
        if by_gluon:
            gluon_linear.many_rows_parts(x, x_scales, values, scales, out, scales_stride, sizes)
            return out
        linear_kernel[(triton.cdiv(rows, tiling.rows), programs, triton.cdiv(num_tokens, tiling.tokens))](
            x,
            x_scales,
            values,
            scales,
            out,
            num_tokens,
            x.stride(0),
            scales_stride,
            **sizes,
            MATRIX_IS_WIDE=is_few,
            PREFETCHED=PREFETCHED_BLOCKS,
            TILE=tiling.tokens,
            BLOCK_ROWS=tiling.rows,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **launch_options(x.device),
        )
    return out


@triton.jit(do_not_specialize=["num_tokens", "scales_stride"])
def linear_kernel(
    x,
    x_scales,
    values,
    scales,
    out,
    num_tokens,
    x_stride,
    scales_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    MATRIX_IS_WIDE: tl.constexpr,
    PREFETCHED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute ``out[part, tile, n]`` for some rows of the matrix, a part of its columns or all, and a tile of
    tokens. ``MATRIX_IS_WIDE``: the matrix is the wide operand. ``m`` are tokens, ``n`` rows of the matrix and
    ``k`` columns.
    """
    n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    first_block = part * PART_BLOCKS
    end_block = min(first_block + PARTS * PART_BLOCKS, blocks)
    k = tl.arange(0, BLOCK)
    is_n = n < ROWS
    matrix_rows = values + n.to(tl.int64)[:, None] * COLUMNS
    ahead = first_block * BLOCK + tl.arange(0, PREFETCHED) * BLOCK
    prefetch(matrix_rows + tl.minimum(ahead, COLUMNS - 1)[None, :], OVERLAPS)
    begin(OVERLAPS)
    m = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_m = m < num_tokens
    token_rows = x + m.to(tl.int64)[:, None] * x_stride
    if MATRIX_IS_WIDE:
        total = tl.zeros((BLOCK_ROWS, TILE), dtype=tl.float32)
    else:
        total = tl.zeros((TILE, BLOCK_ROWS), dtype=tl.float32)
    whole = total
    if HAS_SCALES:
        row_scales = scales + (tl.program_id(0) * BLOCK_ROWS // SCALE_BLOCK) * blocks
        token_scales = x_scales + m
        token_scale = tl.load(token_scales + first_block * scales_stride, mask=is_m, other=0.0)
        row_scale = tl.load(row_scales + first_block)
    for block in range(first_block, end_block):
        column = block * BLOCK + k
        is_k = (column < COLUMNS)[None, :]
        weights = tl.load(matrix_rows + column[None, :], mask=is_n[:, None] & is_k, other=0.0)
        tokens = tl.load(token_rows + column[None, :], mask=is_m[:, None] & is_k, other=0.0)
        if HAS_SCALES:
            # Scales are loaded one round ahead, because Triton does not pipeline these loads.
            following = tl.minimum(block + 1, end_block - 1)
            next_token_scale = tl.load(token_scales + following * scales_stride, mask=is_m, other=0.0)
            next_row_scale = tl.load(row_scales + following)
            scale = token_scale * row_scale
            if MATRIX_IS_WIDE:
                total += tl.dot(weights, tokens.T) * scale[None, :]
            else:
                total += tl.dot(tokens, weights.T) * scale[:, None]
            token_scale, row_scale = next_token_scale, next_row_scale
        elif MATRIX_IS_WIDE:
            total = tl.dot(weights, tokens.T, total)
        else:
            total = tl.dot(tokens, weights.T, total)
        if PARTS > 1:  # noqa: SIM102 (the outer condition is a constant, the inner one is not)
            if (block + 1) % PART_BLOCKS == 0:
                whole += total
                total = tl.zeros((TILE, BLOCK_ROWS), dtype=tl.float32)
    if PARTS > 1:
        total = whole if blocks % PART_BLOCKS == 0 else whole + total
    target = out + part.to(tl.int64) * num_tokens * ROWS
    m = m.to(tl.int64)
    if MATRIX_IS_WIDE:
        tl.store(target + m[None, :] * ROWS + n[:, None], total, mask=is_m[None, :] & is_n[:, None])
    else:
        tl.store(target + m[:, None] * ROWS + n[None, :], total, mask=is_m[:, None] & is_n[None, :])
