# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.kv_format``'s ``store`` on a GPU, in one launch, for rows of 8- and 16-bit numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.triton_launch import begin, launch_options


def store(layer_pool: Tensor, slots: Tensor, values: Tensor, num_quantised: int, tile: int) -> None:
    """Write ``values`` to the rows ``slots`` of ``layer_pool``. The caller has checked the arguments.

    The first ``num_quantised`` numbers of a row are written in fp8, then a scale for each ``tile`` of them,
    then the other numbers in bfloat16.
    """
    num_rows, dim = values.shape
    if num_rows == 0:
        return
    if values.stride(1) != 1:
        values = values.contiguous()
    num_scales = -(-num_quantised // tile)
    with torch.cuda.device_of(layer_pool):
        store_kernel[(num_rows,)](
            values,
            slots,
            layer_pool,
            layer_pool.view(torch.float32) if num_quantised else layer_pool,
            layer_pool.view(torch.bfloat16),
            values.stride(0),
            layer_pool.stride(0),
            FP8_MAX=FP8_MAX,
            DIM=num_quantised,
            REST=dim - num_quantised,
            TILE=tile,
            SCALES_AT=num_quantised,
            REST_AT=num_quantised + 4 * num_scales,
            BLOCK_TILES=triton.next_power_of_2(max(1, num_scales)),
            BLOCK_TILE=triton.next_power_of_2(tile),
            BLOCK_REST=triton.next_power_of_2(max(1, dim - num_quantised)),
            **launch_options(layer_pool.device),
        )


@triton.jit
def store_kernel(
    values_ptr,
    slots_ptr,
    bytes_ptr,
    float32_ptr,
    bfloat16_ptr,
    values_stride,
    row_stride,
    FP8_MAX: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    REST_AT: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Store one row. ``float32_ptr`` and ``bfloat16_ptr`` are the pool too, as numbers of those types."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    byte_row = tl.load(slots_ptr + row) * row_stride
    values_row = values_ptr + row * values_stride
    if DIM > 0:
        tiles = tl.arange(0, BLOCK_TILES)
        within = tl.arange(0, BLOCK_TILE)[None, :]
        at = tiles[:, None] * TILE + within
        is_value = (within < TILE) & (at < DIM)
        values = tl.load(values_row + at, mask=is_value, other=0.0).to(tl.float32)

        # The next power of two and its reciprocal are computed from the exponent's bits.
        bits = tl.div_rn(tl.max(tl.abs(values), 1), FP8_MAX).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFFF) & 0x7F800000
        bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
        factors = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        quantised = tl.clamp(values * factors[:, None], -FP8_MAX, FP8_MAX).to(tl.float8e4nv)
        tl.store(bytes_ptr + byte_row + at, quantised.to(tl.uint8, bitcast=True), mask=is_value)

        is_scale = tiles * TILE < DIM
        scales = bits.to(tl.float32, bitcast=True)
        tl.store(float32_ptr + (byte_row + SCALES_AT) // 4 + tiles, scales, mask=is_scale)

    if REST > 0:
        rest_at = tl.arange(0, BLOCK_REST)
        is_rest = rest_at < REST
        rest = tl.load(values_row + DIM + rest_at, mask=is_rest, other=0.0).to(tl.bfloat16)
        tl.store(bfloat16_ptr + (byte_row + REST_AT) // 2 + rest_at, rest, mask=is_rest)
