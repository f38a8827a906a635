# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""Products of few rows of activations with a matrix, both in fp8 or both in bfloat16, which take as long as
the matrix takes to read.

The matrix is the wide operand of the tensor cores and the rows the narrow one. Its columns are cut into
parts, each a program's, so that a small matrix, too, fills the GPU: how many depends on its shape alone. Who
takes the result adds up the parts in their order, so a row has the same bits among any number of rows.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block_fp8 import BLOCK
from kernels.triton_launch import begin, launch_options, prefetch

BLOCK_ROWS: Final = 128
TILES: Final = {16: (4, 5), 32: (4, 5), 64: (4, 3)}
"""By the tokens of a tile: warps and stages that are fastest."""
TILE_TOKENS: Final = tuple(TILES)
ENOUGH_PROGRAMS: Final = 256
MOST_PARTS: Final = 8
FEWEST_BLOCKS: Final = 4
PREFETCHED_BLOCKS: Final = 2


def block_columns(values: Tensor) -> int:
    """Columns of a matrix that a program takes at a time: those of one scale, or as many bytes."""
    return BLOCK // values.itemsize


def num_parts(rows: int, blocks: int) -> int:
    """Parts of the columns of a matrix, which is so many blocks wide."""
    wanted = ENOUGH_PROGRAMS // -(-rows // BLOCK_ROWS)
    return max(1, min(wanted, MOST_PARTS, blocks // FEWEST_BLOCKS))


def linear_parts(
    x: Tensor, num_tokens: int, values: Tensor, x_scales: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """float32 [parts, num_tokens, rows], or bfloat16 if there is one part; see ``kernels.block_linear``.

    Scales: of an ``x`` and ``values`` in fp8; otherwise both are bfloat16.
    """
    rows, columns = values.shape
    parts = num_parts(rows, -(-columns // block_columns(values)))
    dtype = torch.bfloat16 if parts == 1 else torch.float32
    out = torch.empty((parts, num_tokens, rows), dtype=dtype, device=x.device)
    return run_linear(x, x_scales, values, scales, out)


def run_linear(
    x: Tensor,
    x_scales: Tensor | None,
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    *,
    block_rows: int = BLOCK_ROWS,
    tile: int = 0,
    num_warps: int = 0,
    num_stages: int = 0,
    prefetched: int = PREFETCHED_BLOCKS,
) -> Tensor:
    parts, num_tokens, rows = out.shape
    columns, block = values.shape[1], block_columns(values)
    tile = tile or next((tile for tile in TILE_TOKENS if tile >= num_tokens), TILE_TOKENS[-1])
    num_warps, num_stages = num_warps or TILES[tile][0], num_stages or TILES[tile][1]
    grid = (triton.cdiv(rows, block_rows), parts, triton.cdiv(num_tokens, tile))
    with torch.cuda.device_of(x):
        linear_kernel[grid](
            x,
            x if x_scales is None else x_scales,
            values,
            values if scales is None else scales,
            out,
            num_tokens,
            x.stride(0),
            0 if x_scales is None else x_scales.stride(0),
            ROWS=rows,
            COLUMNS=columns,
            HAS_SCALES=scales is not None,
            BLOCK=block,
            SCALE_BLOCK=BLOCK,
            PART_BLOCKS=triton.cdiv(triton.cdiv(columns, block), parts),
            PREFETCHED=prefetched,
            TILE=tile,
            BLOCK_ROWS=block_rows,
            num_warps=num_warps,
            num_stages=num_stages,
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
    PREFETCHED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Some rows of the matrix, a part of its columns, a tile of tokens: ``out[part, tile, n]``."""
    n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    first_block = part * PART_BLOCKS
    k = tl.arange(0, BLOCK)
    is_n = n < ROWS
    of_rows = values + n.to(tl.int64)[:, None] * COLUMNS
    ahead = first_block * BLOCK + tl.arange(0, PREFETCHED) * BLOCK
    prefetch(of_rows + tl.minimum(ahead, COLUMNS - 1)[None, :], OVERLAPS)
    begin(OVERLAPS)
    m = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_m = m < num_tokens
    of_tokens = x + m.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_ROWS, TILE), dtype=tl.float32)
    end = min(first_block + PART_BLOCKS, blocks)
    if HAS_SCALES:
        row_scales = scales + (tl.program_id(0) * BLOCK_ROWS // SCALE_BLOCK) * blocks
        of_scales = x_scales + m
        token_scale = tl.load(of_scales + first_block * scales_stride, mask=is_m, other=0.0)
        row_scale = tl.load(row_scales + first_block)
    for block in range(first_block, end):
        at = block * BLOCK + k
        is_k = (at < COLUMNS)[None, :]
        weights = tl.load(of_rows + at[None, :], mask=is_n[:, None] & is_k, other=0.0)
        tokens = tl.load(of_tokens + at[None, :], mask=is_m[:, None] & is_k, other=0.0)
        if HAS_SCALES:
            # A round ahead: they are not among what Triton pipelines.
            following = tl.minimum(block + 1, end - 1)
            next_token_scale = tl.load(of_scales + following * scales_stride, mask=is_m, other=0.0)
            next_row_scale = tl.load(row_scales + following)
            total += tl.dot(weights, tokens.T) * (token_scale * row_scale)[None, :]
            token_scale, row_scale = next_token_scale, next_row_scale
        else:
            total = tl.dot(weights, tokens.T, total)
    target = out + (part.to(tl.int64) * num_tokens + m)[None, :] * ROWS + n[:, None]
    tl.store(target, total, mask=is_m[None, :] & is_n[:, None])
