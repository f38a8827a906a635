# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.fp8_rows`` on a GPU, in one launch instead of five, and what other kernels of the layers share.

One kernel, ``_quantize_kernel``, serves ``quantize_rows``, ``quantize_gated`` and ``gated_rows`` of
``fp8_rows``: it adds up the parts of a row, applies the gate if there is one, and rounds to fp8 or to a plain
dtype. ``round_blocks`` and ``sum_parts`` are its steps that other kernels also take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK, SMALLEST_PEAK
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.triton_launch import begin, launch_options

MOST_PER_PROGRAM = 4
"""With more than FEW_ROWS rows, a program takes this many rows, and this many blocks of each."""
FEW_ROWS = 32
"""Up to this many rows, a program takes one block of one row. Products of few rows leave many parts to add
up, so a block is work enough for a program."""


def quantize_rows_triton(x: Tensor, values: Tensor, scales: Tensor, *, ue8m0: bool) -> None:
    """Do ``kernels.fp8_rows.quantize_rows`` for ``x`` [rows, columns].

    Fills ``values``, fp8 [>= rows, columns], and ``scales``, float32 [blocks across, >= rows], of a
    ``Rounded``. ``ue8m0``: scales are powers of two.
    """
    _launch(x[None], values, scales, is_gated=False, ue8m0=ue8m0)


def quantize_gated_triton(gate_up: Tensor, values: Tensor, scales: Tensor, *, ue8m0: bool) -> None:
    """Do ``kernels.fp8_rows.quantize_gated`` in the same way for ``gate_up`` [parts, rows, 2 * columns]."""
    _launch(gate_up, values, scales, is_gated=True, ue8m0=ue8m0)


def gated_rows_triton(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``kernels.fp8_rows.gated_rows``."""
    columns = gate_up.shape[2] // 2
    out = torch.empty((gate_up.shape[1], columns), dtype=dtype, device=gate_up.device)
    _launch(gate_up, out, None, is_gated=True, ue8m0=False)
    return out


def _launch(x: Tensor, values: Tensor, scales: Tensor | None, *, is_gated: bool, ue8m0: bool) -> None:
    """Fill ``values`` [>= rows, columns] from ``x``, and ``scales`` if there are any.

    ``x``: [parts, rows, columns]; with ``is_gated`` [parts, rows, 2 * columns], the gate first. Further rows
    of ``values`` become zeros.
    """
    num_rows, columns = values.shape
    num_blocks = triton.cdiv(columns, BLOCK)
    if num_rows and columns:
        each = 1 if num_rows <= FEW_ROWS else MOST_PER_PROGRAM  # rows, and blocks of each row
        grid = (triton.cdiv(num_rows, each), triton.cdiv(num_blocks, each))
        with torch.cuda.device_of(x):
            _quantize_kernel[grid](
                x,
                values,
                values if scales is None else scales,
                x.shape[1],
                num_rows,
                x.stride(0),
                x.stride(1),
                PARTS=len(x),
                COLUMNS=columns,
                IS_GATED=is_gated,
                ROUNDS=scales is not None,
                UE8M0=ue8m0,
                BLOCK=BLOCK,
                ROWS=each,
                BLOCKS=each,
                LARGEST=FP8_MAX,
                SMALLEST_PEAK=SMALLEST_PEAK,
                num_warps=each,
                **launch_options(x.device),
            )


@triton.jit(do_not_specialize=["num_given", "num_rows"])
def _quantize_kernel(
    x,
    values,
    scales,
    num_given,
    num_rows,
    x_part,
    x_stride,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROUNDS: tl.constexpr,
    UE8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Round some blocks of some rows. Rows after the given ones become zeros."""
    begin(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    column = block * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    source = x + row.to(tl.int64) * x_stride + column
    is_given = (row < num_given) & (column < COLUMNS)
    number = sum_parts(source, x_part, 0, is_given, PARTS)
    if IS_GATED:
        up = sum_parts(source, x_part, COLUMNS, is_given, PARTS)
        if PARTS > 1:  # parts are float32, a single one is bfloat16: both must give the same bits
            number, up = number.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
        number = number / (1.0 + tl.exp(-number)) * up
    target = values + row.to(tl.int64) * COLUMNS + column
    if ROUNDS:
        rounded, scale = round_blocks(number, 2, LARGEST, SMALLEST_PEAK, UE8M0)
        tl.store(target, rounded, mask=(row < num_rows) & (column < COLUMNS))
        is_block = (row < num_rows) & (block * BLOCK < COLUMNS)
        tl.store(scales + block.to(tl.int64) * num_rows + row, scale, mask=is_block)
    else:
        tl.store(target, number, mask=(row < num_rows) & (column < COLUMNS))


@triton.jit
def round_blocks(
    number, axis: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_PEAK: tl.constexpr, UE8M0: tl.constexpr
):
    """Return float32 blocks along ``axis`` in fp8, and their scales. A block's largest magnitude becomes
    LARGEST; with UE8M0 the scale is rounded up to a power of two."""
    peak = tl.maximum(tl.max(tl.abs(number), axis=axis, keep_dims=True), SMALLEST_PEAK)
    scale = tl.div_rn(peak, LARGEST)
    if UE8M0:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, scale)
    quotient = number * inverse
    if not UE8M0:
        # A rounded quotient and its remainder give the correctly rounded quotient with fewer instructions
        # than a division; only quotients that are 0 in fp8 may differ.
        rest = tl.fma(-quotient, tl.broadcast_to(scale, number.shape), number)
        quotient = tl.where(number == 0.0, number, tl.fma(rest, inverse, quotient))  # a zero keeps its sign
    return quotient.to(tl.float8e4nv), scale


def part_strides(name: str, parts: Tensor) -> dict[str, int]:
    """Return the arguments of a kernel that say where the parts of a sum, and their rows, are in memory."""
    return {f"{name}_part_stride": parts.stride(0), f"{name}_row_stride": parts.stride(1)}


@triton.jit
def sum_parts(start, part_stride, at, mask, PARTS: tl.constexpr):
    """Return the float32 sum of the numbers ``at`` of each part, in the parts' order."""
    total = tl.load(start + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(start + part * part_stride + at, mask=mask, other=0.0).to(tl.float32)
    return total
