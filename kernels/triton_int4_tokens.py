# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""Activations in the layout from which ``kernels.int4_experts`` copies them to tensor cores.

``lay_out`` makes it in one launch: of tokens for a layer's first product, of gates and ups for its second
one. The rows of ``Routing`` are in the order of experts, cut into slices of 128 bytes, so that a tile's part
of a slice is one piece of memory. A slice's eight pieces of 16 bytes are swizzled as tensor cores read them:
the row with number ``r`` of its expert has piece ``i`` at place ``i ^ r % 8``.

Activations in fp8 meet weights that are the bytes of packed numbers (``kernels.int4``): of 16 numbers those
of columns 0, 8, 1, 9, 2, 10 and so on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import SMALLEST_PEAK
from hisparse_pd.kernels.expert_routing import Routing, most_tiles
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.int4 import Int4Matrices
from hisparse_pd.kernels.int4_experts import FP8_ONE, SLICE_BYTES, STAGE_COLUMNS, LaidOut
from hisparse_pd.kernels.triton_fp8 import round_blocks
from hisparse_pd.kernels.triton_launch import begin, launch_options


def lay_out(
    x: Tensor, routing: Routing, first_expert: int, matrices: Int4Matrices, *, is_first: bool
) -> LaidOut:
    """Return the other operand of a product with ``matrices``, those of the experts from ``first_expert`` on.

    ``x``: bfloat16; if it ``is_first``, the tokens [num_tokens, columns], and otherwise gates and ups in the
    order of experts, [num_rows, 2 * columns], of which it is ``silu(gate) * up``. Results of the first
    product stay in that order, those of the second are weighed and in the rows' original order. Where
    ``routing.is_rounded``, numbers are those of ``kernels.int4.round_tokens``.
    """
    num_rows, columns, num_experts = len(routing.order), matrices.columns, len(matrices.values)
    group_size = matrices.form.group_size
    number_bytes = 1 if routing.is_rounded else 2
    num_slices = triton.cdiv(columns, STAGE_COLUMNS) * STAGE_COLUMNS * number_bytes // SLICE_BYTES
    values = torch.empty((num_slices, num_rows, SLICE_BYTES), dtype=torch.uint8, device=x.device)
    factors = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    targets = torch.empty(num_rows, dtype=torch.int32, device=x.device)
    sums = factors.new_empty((columns // group_size, num_rows)) if routing.is_rounded else None
    given_sums: Any = sums
    num_tiles = most_tiles(num_rows, num_experts, routing.tile_rows)
    if num_tiles:
        numbers = values.view(torch.float8_e4m3fn if routing.is_rounded else torch.bfloat16)
        _lay_out_kernel[(num_tiles * routing.tile_rows,)](
            x,
            numbers,
            given_sums,
            factors,
            targets,
            routing.order,
            routing.starts,
            routing.tile_starts,
            routing.tile_experts,
            routing.weights,
            num_rows,
            first_expert,
            num_experts,
            routing.top_k,
            COLUMNS=columns,
            BLOCK_COLUMNS=triton.next_power_of_2(columns),
            SLICE=SLICE_BYTES // number_bytes,
            TILE_ROWS=routing.tile_rows,
            GROUP=group_size,
            IS_FIRST=is_first,
            IS_ROUNDED=routing.is_rounded,
            ONE=FP8_ONE,
            LARGEST=FP8_MAX,
            SMALLEST_PEAK=SMALLEST_PEAK,
            num_warps=8,
            **launch_options(x.device),
        )
    return LaidOut(values, sums, factors, targets)


@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_experts", "top_k"])
def _lay_out_kernel(
    x,
    numbers,
    sums,
    factors,
    targets,
    order,
    starts,
    tile_starts,
    tile_experts,
    weights,
    num_rows,
    first_expert,
    num_experts,
    top_k,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    ONE: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Lay out one row, if its tile has it. SLICE: numbers of a slice."""
    begin(OVERLAPS)
    tile = tl.load(tile_starts + first_expert) + tl.program_id(0) // TILE_ROWS
    if tile >= tl.load(tile_starts + first_expert + num_experts):  # no tile of this rank's experts
        return
    expert = tl.load(tile_experts + tile)
    of_expert = (tile - tl.load(tile_starts + expert)) * TILE_ROWS + tl.program_id(0) % TILE_ROWS
    place = tl.load(starts + expert) + of_expert
    if place >= tl.load(starts + expert + 1):
        return
    row = tl.load(order + place)
    column = tl.arange(0, BLOCK_COLUMNS)
    is_column = column < COLUMNS
    if IS_FIRST:
        source = x + (row // top_k).to(tl.int64) * COLUMNS + column
        number = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
        factor = 1.0
    else:
        source = x + place.to(tl.int64) * (2 * COLUMNS) + column
        number = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
        up = tl.load(source + COLUMNS, mask=is_column, other=0.0).to(tl.float32)
        number = number / (1.0 + tl.exp(-number)) * up
        factor = tl.load(weights + row)
    PIECE: tl.constexpr = SLICE // 8  # numbers in 16 bytes
    PIECES: tl.constexpr = BLOCK_COLUMNS // PIECE
    if IS_ROUNDED:
        rounded, scale = round_blocks(number, 0, LARGEST, SMALLEST_PEAK, False)
        factor = tl.sum(scale, axis=0) * factor
        group = tl.arange(0, BLOCK_COLUMNS // GROUP)
        total = tl.sum(tl.reshape(rounded.to(tl.float32), (BLOCK_COLUMNS // GROUP, GROUP)), axis=1)
        tl.store(sums + group.to(tl.int64) * num_rows + place, total / ONE, mask=group < COLUMNS // GROUP)
        pieces = tl.reshape(tl.permute(tl.reshape(rounded, (PIECES, 2, 4, 2)), (0, 2, 3, 1)), (PIECES, PIECE))
    else:
        pieces = tl.reshape(number.to(numbers.dtype.element_ty), (PIECES, PIECE))
    piece = tl.arange(0, PIECES)
    target = ((piece // 8).to(tl.int64) * num_rows + place) * SLICE + (piece % 8 ^ of_expert % 8) * PIECE
    target = numbers + target[:, None] + tl.arange(0, PIECE)[None, :]
    tl.store(target, pieces, mask=(piece < COLUMNS // PIECE)[:, None])
    tl.store(factors + place, factor)
    tl.store(targets + place, place if IS_FIRST else row)
