# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""Products of many rows of activations with a matrix on Hopper, both in fp8 or both in bfloat16.

``kernels.triton_linear`` calls it where it pays, and computes fewer rows by a Triton kernel with the same
bits: both add up a part's columns in order (split-K), and then the parts.

A tile of the result is 128 tokens by 128 rows of the matrix. A program is persistent: there are as many as
multiprocessors, and each takes tiles one after the other, in an order in which concurrent programs share data
in L2. Its warps are specialised. One warp loads blocks of both operands by TMA, STAGES blocks ahead. Two
groups of four warps multiply them (wgmma), each with half of the tile's tokens: while one group scales a
block of fp8, the other can use the tensor cores.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hisparse_pd.kernels.cuda_launch import HOPPER, num_multiprocessors
from hisparse_pd.kernels.triton_launch import begin, launch_options

HALF: Final = 64
"""Tokens of one group of multiplying warps: half of a tile's."""
BLOCK_ROWS: Final = 128
"""Rows of the matrix in a tile."""
TOGETHER: Final = 16
"""Tiles of tokens that, in the order of tiles, come before the next rows of the matrix: concurrent programs
then share the tokens and the rows in L2."""
STAGES: Final = 5
"""Blocks of columns, of both operands, that shared memory holds."""
SHORT_BLOCKS: Final = 16
"""Most blocks of columns that one program adds up as fast as several programs do in parts."""
GROUP_REGISTERS: Final = 240
LOADER_REGISTERS: Final = 24
"""Registers of a thread of the multiplying warps, and of the loading warp, which needs few."""


def takes_groups(x: Tensor, values: Tensor) -> bool:
    """Return whether groups of warps can multiply these operands (``many_rows_parts``): on Hopper, with rows
    aligned to 16 bytes, which TMA requires."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != HOPPER:
        return False
    strides = x.stride(0), values.stride(0)
    return x.data_ptr() % 16 == 0 and not any(stride * x.itemsize % 16 for stride in strides)


def is_split(num_tokens: int, blocks: int) -> bool:
    """Return whether each part of a tile is computed separately: for one tile of tokens and many columns."""
    return num_tokens <= 2 * HALF and blocks > SHORT_BLOCKS


def num_tiles(num_tokens: int, rows: int) -> int:
    """Return the number of tiles of a result [num_tokens, rows]."""
    return -(-num_tokens // (2 * HALF)) * -(-rows // BLOCK_ROWS)


def many_rows_parts(
    x: Tensor,
    x_scales: Tensor,
    values: Tensor,
    scales: Tensor,
    out: Tensor,
    scales_stride: int,
    sizes: dict[str, Any],
) -> None:
    """Write the product to ``out``: [parts, num_tokens, rows] if it ``is_split``, otherwise the sum of the
    parts, [1, num_tokens, rows].

    ``x``: [num_tokens, columns]; ``values``: [rows, columns]. ``x_scales``: float32 [blocks, >= num_tokens],
    with ``scales_stride`` from block to block; ``scales``: float32 [blocks of rows, blocks]. Without scales,
    both are any tensor. ``sizes``: the constants that ``kernels.triton_linear.linear_kernel`` has, too.
    """
    (splits, num_tokens, rows), (columns, block) = out.shape, (values.shape[1], sizes["BLOCK"])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.itemsize, rank=2)
    num_units = num_tiles(num_tokens, rows) * splits
    many_rows_kernel[(min(num_units, num_multiprocessors(x.device)),)](
        TensorDescriptor(x, [num_tokens, columns], [x.stride(0), 1], [HALF, block], layout),
        TensorDescriptor(values, [rows, columns], [columns, 1], [BLOCK_ROWS, block], layout),
        x_scales,
        scales,
        out,
        num_tokens,
        num_units,
        scales_stride,
        **sizes,
        SPLITS=splits,
        HALF=HALF,
        BLOCK_ROWS=BLOCK_ROWS,
        TOGETHER=TOGETHER,
        STAGES=STAGES,
        GROUP_REGISTERS=GROUP_REGISTERS,
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
        **launch_options(x.device),
    )


@gluon.jit(do_not_specialize=["num_tokens", "num_units", "scales_stride"])
def many_rows_kernel(
    x,
    values,
    x_scales,
    scales,
    out,
    num_tokens,
    num_units,
    scales_stride,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    BLOCK: gl.constexpr,
    SCALE_BLOCK: gl.constexpr,
    PART_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Compute units of work. With SPLITS > 1 a unit is one of a tile's SPLITS parts, and PARTS is 1.
    Otherwise it is a whole tile, whose PARTS parts are computed one after the other.
    """
    stages = new_ring(x, values, BLOCK, HALF, BLOCK_ROWS, STAGES)
    begin(OVERLAPS)
    # The functions of the warps take these by number, because they take tuples and no keywords.
    sizes: gl.constexpr = (
        ROWS,
        COLUMNS,
        BLOCK,
        PART_BLOCKS,
        PARTS,
        SPLITS,
        HALF,
        BLOCK_ROWS,
        TOGETHER,
        STAGES,
    )
    arguments = (x_scales, scales, out, stages, num_tokens, num_units, scales_stride)
    # The first function runs in the program's own warps; the lists are warps and registers of the others.
    gl.warp_specialize(
        [
            (multiply, (arguments, 0, HAS_SCALES, SCALE_BLOCK, sizes)),
            (multiply, (arguments, 1, HAS_SCALES, SCALE_BLOCK, sizes)),
            (load_tiles, (x, values, stages, num_tokens, num_units, sizes)),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def new_ring(
    x, values,
    BLOCK: gl.constexpr, HALF: gl.constexpr, BLOCK_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return a ring of STAGES blocks in shared memory, which connects the loading warp and the two groups.

    It has blocks of ``x`` in two halves, blocks of ``values``, and two barriers a stage: ``is_full``
    completes when the stage's data have arrived, ``is_free`` when both groups have read them.
    """
    tokens = gl.allocate_shared_memory(x.dtype, [2 * STAGES, HALF, BLOCK], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, BLOCK], values.layout)
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=2)
    return tokens, weights, is_full, is_free


@gluon.jit
def load_block(
    x, values, stages, m, n, block, loaded,
    BLOCK: gl.constexpr, HALF: gl.constexpr, BLOCK_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load a block of columns of the rows from ``m`` of ``x`` and from ``n`` of ``values``, as soon as its
    stage of the ring is free. ``loaded``: the number of blocks before it."""
    tokens, weights, is_full, is_free = stages
    stage_bytes: gl.constexpr = (2 * HALF + BLOCK_ROWS) * BLOCK * (x.dtype.primitive_bitwidth // 8)
    stage = loaded % STAGES
    full = is_full.index(stage)
    # A stage's turns alternate in parity, and its first turn does not wait.
    mbarrier.wait(is_free.index(stage), (loaded // STAGES + 1) % 2)
    mbarrier.expect(full, stage_bytes)
    tma.async_copy_global_to_shared(x, [m, block * BLOCK], full, tokens.index(2 * stage))
    tma.async_copy_global_to_shared(values, [n, block * BLOCK], full, weights.index(stage))
    tma.async_copy_global_to_shared(x, [m + HALF, block * BLOCK], full, tokens.index(2 * stage + 1))


@gluon.jit
def in_order(number, num_down, across: gl.constexpr, TOGETHER: gl.constexpr):
    """Return where tile ``number`` of ``num_down`` by ``across`` tiles is: its numbers in both directions.
    TOGETHER tiles with the same rows of the matrix come one after the other. With TOGETHER = 2 and 4 by 2
    tiles the order is (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)."""
    first = number // (TOGETHER * across) * TOGETHER
    height = gl.minimum(num_down - first, TOGETHER)
    number = number % (TOGETHER * across)
    return first + number % height, number // height


@gluon.jit
def place_of(unit, num_tokens, sizes: gl.constexpr):
    """Return a unit's first token, its first row of the matrix, and its split."""
    ROWS: gl.constexpr = sizes[0]
    SPLITS: gl.constexpr = sizes[5]
    HALF: gl.constexpr = sizes[6]
    BLOCK_ROWS: gl.constexpr = sizes[7]
    TOGETHER: gl.constexpr = sizes[8]
    across: gl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile = unit // SPLITS
    m, n = in_order(tile, (num_tokens + 2 * HALF - 1) // (2 * HALF), across, TOGETHER)
    return m * (2 * HALF), n * BLOCK_ROWS, unit % SPLITS


@gluon.jit
def blocks_of(part, sizes: gl.constexpr):
    """Return a part's first block of columns, and the number of its blocks."""
    COLUMNS: gl.constexpr = sizes[1]
    BLOCK: gl.constexpr = sizes[2]
    PART_BLOCKS: gl.constexpr = sizes[3]
    blocks: gl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    first = part * PART_BLOCKS
    count = PART_BLOCKS
    if blocks % PART_BLOCKS != 0:
        count = gl.minimum(PART_BLOCKS, blocks - first)
    return first, count


@gluon.jit
def load_tiles(x, values, stages, num_tokens, num_units, sizes: gl.constexpr):
    """Load the blocks of all units of this program."""
    BLOCK: gl.constexpr = sizes[2]
    PARTS: gl.constexpr = sizes[4]
    HALF: gl.constexpr = sizes[6]
    BLOCK_ROWS: gl.constexpr = sizes[7]
    STAGES: gl.constexpr = sizes[9]
    loaded = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        m, n, split = place_of(unit, num_tokens, sizes)
        for part in range(split * PARTS, split * PARTS + PARTS):
            first, count = blocks_of(part, sizes)
            for block in range(first, first + count):
                load_block(x, values, stages, m, n, block, loaded, BLOCK, HALF, BLOCK_ROWS, STAGES)
                loaded += 1


@gluon.jit
def start_product(total, stages, block, adds, WHICH: gl.constexpr, STAGES: gl.constexpr):
    """Wait for block number ``block`` of the ring and start its product on the tensor cores, added to
    ``total`` if it ``adds``."""
    tokens, weights, is_full, _ = stages
    stage = block % STAGES
    mbarrier.wait(is_full.index(stage), block // STAGES % 2)
    columns = weights.index(stage).permute((1, 0))
    return warpgroup_mma(tokens.index(2 * stage + WHICH), columns, total, use_acc=adds, is_async=True)


@gluon.jit
def free_stage(stages, block, STAGES: gl.constexpr):
    """Tell the loading warp that this group has read block number ``block``."""
    mbarrier.arrive(stages[3].index(block % STAGES), count=1)


@gluon.jit
def sum_of(stages, first, count, zeros, WHICH: gl.constexpr, STAGES: gl.constexpr):
    """Return the sum of the products of ``count`` blocks from number ``first`` on, added up in order."""
    total = zeros
    for number in range(count):
        total = start_product(total, stages, first + number, True, WHICH, STAGES)
        total = warpgroup_mma_wait(1, deps=(total,))
        if number > 0:
            free_stage(stages, first + number - 1, STAGES)
    total = warpgroup_mma_wait(0, deps=(total,))
    free_stage(stages, first + count - 1, STAGES)
    return total


@gluon.jit
def scaled_sum_of(
    stages, first, count, zeros, token_scales, row_scales, scales_stride,
    WHICH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sum of the products of ``count`` blocks from number ``first`` on, each scaled.

    Scales are loaded two blocks ahead. ``token_scales``, ``row_scales``: addresses of the first block's
    scales.
    """
    total = zeros
    token_scale, row_scale = gl.load(token_scales), gl.load(row_scales)
    ahead = gl.minimum(1, count - 1)
    next_token_scale = gl.load(token_scales + ahead * scales_stride)
    next_row_scale = gl.load(row_scales + ahead)
    for number in range(count):
        ahead = gl.minimum(number + 2, count - 1)
        later_token_scale, later_row_scale = (
            gl.load(token_scales + ahead * scales_stride),
            gl.load(row_scales + ahead),
        )
        scale = token_scale * row_scale
        product = start_product(zeros, stages, first + number, False, WHICH, STAGES)
        product = warpgroup_mma_wait(0, deps=(product,))
        free_stage(stages, first + number, STAGES)
        total += product * scale[:, None]
        token_scale, row_scale = next_token_scale, next_row_scale
        next_token_scale, next_row_scale = later_token_scale, later_row_scale
    return total


@gluon.jit
def multiply(
    arguments,
    WHICH: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr,
    sizes: gl.constexpr,
):
    """Multiply and store one half of each tile's tokens: the first if WHICH is 0, the second if it is 1."""
    x_scales, scales, out, stages, num_tokens, num_units, scales_stride = arguments
    ROWS: gl.constexpr = sizes[0]
    COLUMNS: gl.constexpr = sizes[1]
    BLOCK: gl.constexpr = sizes[2]
    PARTS: gl.constexpr = sizes[4]
    HALF: gl.constexpr = sizes[6]
    BLOCK_ROWS: gl.constexpr = sizes[7]
    STAGES: gl.constexpr = sizes[9]
    blocks: gl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_ROWS, 256 // stages[0].dtype.primitive_bitwidth]
    )
    zeros = gl.zeros([HALF, BLOCK_ROWS], gl.float32, mma)
    multiplied = 0  # blocks
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        first_m, n, split = place_of(unit, num_tokens, sizes)
        first_m += WHICH * HALF
        m = first_m + gl.arange(0, HALF, gl.SliceLayout(1, mma))
        whole = zeros
        for part in range(PARTS):
            first, count = blocks_of(split * PARTS + part, sizes)
            if HAS_SCALES:
                token_scales = x_scales + first * scales_stride + gl.minimum(m, num_tokens - 1)
                row_scales = scales + n // SCALE_BLOCK * blocks + first
                total = scaled_sum_of(
                    stages, multiplied, count, zeros, token_scales, row_scales, scales_stride, WHICH, STAGES
                )
            else:
                total = sum_of(stages, multiplied, count, zeros, WHICH, STAGES)
            multiplied += count
            whole += total
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        result = gl.convert_layout(whole.to(out.dtype.element_ty), wide)
        m = (first_m + gl.arange(0, HALF, gl.SliceLayout(1, wide)))[:, None]
        rows = (n + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, wide)))[None, :]
        target = out + split.to(gl.int64) * num_tokens * ROWS
        gl.store(target + m.to(gl.int64) * ROWS + rows, result, mask=(m < num_tokens) & (rows < ROWS))
