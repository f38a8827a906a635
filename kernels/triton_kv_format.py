# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.kv_format`` on a GPU: stores rows in fp8 or bfloat16 in one launch (``store``), and unpacks fp8
items (``unpack``).

``KvFormat`` and ``IndexKeyFormat`` call these with checked arguments. Rows are bytes in the pool; a kernel
gets the pool several times, as numbers of each type that a row has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.triton_launch import begin, launch_options


def store(layer_pool: Tensor, slots: Tensor, values: Tensor, num_quantised: int, tile: int) -> None:
    """Write ``values`` to the rows ``slots`` of ``layer_pool``. The caller has checked the arguments.

    The first ``num_quantised`` numbers of a row are written in fp8, then a float32 scale for each ``tile`` of
    them, then the other numbers in bfloat16. With 0, all are bfloat16, and rows need not be whole float32
    words.
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
    """Store one row. ``float32_ptr`` and ``bfloat16_ptr`` are the pool too, as numbers of those types.
    SCALES_AT, REST_AT and ``row_stride`` are in bytes."""
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

        scales, factors = power_of_two_scales(tl.max(tl.abs(values), 1), FP8_MAX)
        quantised = tl.clamp(values * factors[:, None], -FP8_MAX, FP8_MAX).to(tl.float8e4nv)
        tl.store(bytes_ptr + byte_row + at, quantised.to(tl.uint8, bitcast=True), mask=is_value)

        is_scale = tiles * TILE < DIM
        tl.store(float32_ptr + (byte_row + SCALES_AT) // 4 + tiles, scales, mask=is_scale)

    if REST > 0:
        rest_at = tl.arange(0, BLOCK_REST)
        is_rest = rest_at < REST
        rest = tl.load(values_row + DIM + rest_at, mask=is_rest, other=0.0).to(tl.bfloat16)
        tl.store(bfloat16_ptr + (byte_row + REST_AT) // 2 + rest_at, rest, mask=is_rest)


@triton.jit
def power_of_two_scales(peaks, FP8_MAX: tl.constexpr):
    """Return the scales of float32 blocks with these largest magnitudes, and the scales' reciprocals.

    They are those of ``kernels.kv_format``, computed from the exponents' bits.
    """
    # Round up to a power of two: carry into the exponent, clear the mantissa. 0 and infinity become 1.0. The
    # reciprocal has the mirrored exponent.
    bits = (tl.div_rn(peaks, FP8_MAX).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


UNPACKED_ROWS = 16
"""Rows that one program unpacks, which are of one page."""


def unpack(
    layer_pool: Tensor, page_ids: Tensor, page_size: int, out: Tensor, num_quantised: int, tile: int
) -> None:
    """Write the fp8 items of whole pages to ``out`` in bfloat16. The caller has checked the arguments, which
    are those of ``KvFormat.unpack``; ``num_quantised`` and ``tile`` are as in ``store``."""
    num_pages, dim = len(page_ids), out.shape[1]
    if num_pages == 0:
        return
    with torch.cuda.device_of(layer_pool):
        unpack_kernel[(num_pages, triton.cdiv(page_size, UNPACKED_ROWS))](
            layer_pool.view(torch.float8_e4m3fn),
            layer_pool.view(torch.float32),
            layer_pool.view(torch.bfloat16),
            page_ids,
            out,
            page_size,
            ROW_BYTES=layer_pool.stride(0),
            DIM=num_quantised,
            REST=dim - num_quantised,
            TILE=tile,
            REST_AT=num_quantised + 4 * -(-num_quantised // tile),
            ROWS=UNPACKED_ROWS,
            BLOCK_DIM=triton.next_power_of_2(num_quantised),
            BLOCK_REST=triton.next_power_of_2(max(1, dim - num_quantised)),
            **launch_options(layer_pool.device),
        )


@triton.jit(do_not_specialize=["page_size"])
def unpack_kernel(
    fp8_ptr,
    float32_ptr,
    bfloat16_ptr,
    page_ids_ptr,
    out_ptr,
    page_size,
    ROW_BYTES: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
    REST_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Unpack ROWS rows of one page. The first three pointers are the pool, as numbers of those types. Scales
    begin at byte DIM of a row, the bfloat16 numbers at byte REST_AT."""
    begin(OVERLAPS)
    number = tl.program_id(0).to(tl.int64)
    page_id = tl.load(page_ids_ptr + number).to(tl.int64)
    if page_id < 0:  # no page: its rows of the result stay as they are
        return
    in_page = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (in_page < page_size)[:, None]
    rows = (page_id * page_size + in_page)[:, None]
    out_rows = out_ptr + (number * page_size + in_page)[:, None] * (DIM + REST)
    at = tl.arange(0, BLOCK_DIM)[None, :]
    is_value = is_row & (at < DIM)
    values = tl.load(fp8_ptr + rows * ROW_BYTES + at, mask=is_value, other=0.0).to(tl.float32)
    scales = tl.load(
        float32_ptr + rows * (ROW_BYTES // 4) + (DIM // 4 + at // TILE), mask=is_value, other=0.0
    )
    tl.store(out_rows + at, (values * scales).to(tl.bfloat16), mask=is_value)
    if REST > 0:
        rest_at = tl.arange(0, BLOCK_REST)[None, :]
        is_rest = is_row & (rest_at < REST)
        rest = tl.load(
            bfloat16_ptr + rows * (ROW_BYTES // 2) + (REST_AT // 2 + rest_at), mask=is_rest, other=0.0
        )
        tl.store(out_rows + DIM + rest_at, rest, mask=is_rest)
