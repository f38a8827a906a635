# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""Products of many rows with the matrices of their experts, both in fp8, on Hopper GPUs.

``kernels.triton_experts`` calls this module where experts have many rows. For fewer rows, and on other GPUs,
it has a kernel of its own, which gives the same bits. A layer is one ``gather_rows`` and two
``multiply_rows``, one for each product. A tile of the result is 128 rows of one expert (tokens routed to it)
by 128 rows of its matrices.

A program takes one tile after the other, as in ``kernels.gluon_linear``: one warp (``load_blocks``) loads
blocks of 128 columns into a ring of STAGES places in shared memory, and two groups of four warps
(``multiply_tiles``) multiply half of the tile's rows each. This works because a tile's rows are adjacent:
``gather_rows`` has put the tokens into the order of experts. A tile that ends behind its expert's last row
reads rows of the next expert, and does not store their results.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hisparse_pd.kernels import gluon_linear
from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.cuda_launch import num_multiprocessors
from hisparse_pd.kernels.expert_routing import MANY_TILE_ROWS, ExpertMatrices, Routing
from hisparse_pd.kernels.fp8_rows import Rounded
from hisparse_pd.kernels.gluon_linear import (
    BLOCK_ROWS,
    GROUP_REGISTERS,
    HALF,
    LOADER_REGISTERS,
    STAGES,
    TOGETHER,
    in_order,
    load_block,
    new_ring,
    scaled_sum_of,
)
from hisparse_pd.kernels.triton_launch import begin, launch_options

GATHERED_BYTES: Final = 4096
"""Most bytes of a row that a program of ``gather_rows`` copies at a time."""


def takes_groups(x: Tensor, matrices: ExpertMatrices, routing: Routing) -> bool:
    """Return whether groups of warps can multiply these operands (``multiply_rows``): fp8 on Hopper, in whole
    blocks, with tiles of MANY_TILE_ROWS."""
    if not routing.is_rounded or routing.tile_rows != MANY_TILE_ROWS:
        return False
    rows, columns = matrices.values.shape[2:]
    are_whole = rows % BLOCK_ROWS == 0 and columns % BLOCK == 0
    return are_whole and gluon_linear.takes_groups(x, matrices.values[0, 0])  # on Hopper, and aligned


def gather_rows(tokens: Rounded, routing: Routing, first_expert: int, num_experts: int) -> Rounded:
    """Return the token of each row of ``routing``, in the order of experts. Rows of other experts than the
    ``num_experts`` from ``first_expert`` on are undefined."""
    values, scales = tokens.values, tokens.scales
    num_rows, size = len(routing.order), values.shape[1]
    gathered = values.new_empty((num_rows, size))
    gathered_scales = scales.new_empty((len(scales), num_rows))
    if num_rows:
        gather_kernel[(num_rows,)](
            values,
            scales,
            routing.order,
            routing.starts,
            gathered,
            gathered_scales,
            first_expert,
            num_experts,
            len(values),
            num_rows,
            routing.top_k,
            SIZE=size,
            BLOCK_SIZE=min(GATHERED_BYTES, triton.next_power_of_2(size)),
            BLOCKS=len(scales),
            PADDED_BLOCKS=triton.next_power_of_2(len(scales)),
            **launch_options(values.device),
        )
    return Rounded(gathered, gathered_scales)


@triton.jit(do_not_specialize=["first_expert", "num_experts", "num_tokens", "num_rows", "top_k"])
def gather_kernel(
    values,
    scales,
    order,
    starts,
    gathered,
    gathered_scales,
    first_expert,
    num_experts,
    num_tokens,
    num_rows,
    top_k,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Copy one row and its scales, which are [BLOCKS, rows]."""
    begin(OVERLAPS)
    place = tl.program_id(0)
    first = tl.load(starts + first_expert)
    if (place < first) | (place >= tl.load(starts + first_expert + num_experts)):
        return
    token = (tl.load(order + place) // top_k).to(tl.int64)
    for start in tl.static_range(0, SIZE, BLOCK_SIZE):
        at = start + tl.arange(0, BLOCK_SIZE)
        row = tl.load(values + token * SIZE + at, mask=at < SIZE)
        tl.store(gathered + place.to(tl.int64) * SIZE + at, row, mask=at < SIZE)
    block = tl.arange(0, PADDED_BLOCKS).to(tl.int64)
    scale = tl.load(scales + block * num_tokens + token, mask=block < BLOCKS)
    tl.store(gathered_scales + block * num_rows + place, scale, mask=block < BLOCKS)


def multiply_rows(
    routed: Rounded,
    matrices: ExpertMatrices,
    out: Tensor,
    routing: Routing,
    first_expert: int,
    *,
    is_first: bool,
) -> None:
    """Write the products of all rows with the matrices of their experts to ``out``.

    ``routed``: the activations of the rows of ``routing``, in the order of experts. ``is_first``: whether
    it is the first of a layer's two products. ``out``: [num_rows, num_matrices * rows], after the first
    product in the order of experts; after the second in the rows' original order, and weighed.
    """
    x = routed.values
    num_experts, num_matrices, rows, columns = matrices.values.shape
    matrix_rows = num_experts * num_matrices * rows
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    expert_rows_kernel[(num_multiprocessors(x.device),)](
        TensorDescriptor(x, [len(x), columns], [columns, 1], [HALF, BLOCK], layout),
        TensorDescriptor(
            matrices.values.view(matrix_rows, columns),
            [matrix_rows, columns],
            [columns, 1],
            [BLOCK_ROWS, BLOCK],
            layout,
        ),
        routed.scales,
        matrices.scales,
        out,
        routing.order,
        routing.starts,
        routing.tile_starts,
        routing.tile_experts,
        routing.weights,
        len(x),
        first_expert,
        num_experts,
        ROWS=num_matrices * rows,
        BLOCKS=columns // BLOCK,
        IS_FIRST=is_first,
        BLOCK=BLOCK,
        HALF=HALF,
        BLOCK_ROWS=BLOCK_ROWS,
        TOGETHER=TOGETHER,
        STAGES=STAGES,
        GROUP_REGISTERS=GROUP_REGISTERS,
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
        **launch_options(x.device),
    )


@gluon.jit(do_not_specialize=["num_rows", "first_expert", "num_experts"])
def expert_rows_kernel(
    x,
    values,
    x_scales,
    scales,
    out,
    order,
    starts,
    tile_starts,
    tile_experts,
    weights,
    num_rows,
    first_expert,
    num_experts,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    IS_FIRST: gl.constexpr,
    BLOCK: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Compute tiles of the result, as ``kernels.gluon_linear`` does.

    ROWS: rows of all of an expert's matrices; BLOCKS: blocks of their columns. ``plan``: what the functions
    below need to find a tile. ``sizes`` are taken by number, because these functions take no keywords.
    """
    stages = new_ring(x, values, BLOCK, HALF, BLOCK_ROWS, STAGES)
    begin(OVERLAPS)
    plan = (starts, tile_starts, tile_experts, first_expert, num_experts)
    sizes: gl.constexpr = (ROWS, BLOCKS, BLOCK, HALF, BLOCK_ROWS, TOGETHER, STAGES)
    arguments = (x_scales, scales, out, order, weights, stages, plan, num_rows)
    gl.warp_specialize(
        [
            (multiply_tiles, (arguments, 0, IS_FIRST, sizes)),
            (multiply_tiles, (arguments, 1, IS_FIRST, sizes)),
            (load_blocks, (x, values, stages, plan, sizes)),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def num_units_of(plan, sizes: gl.constexpr):
    """Return the number of tiles of the result, the units of work."""
    _, tile_starts, _, first_expert, num_experts = plan
    num_tiles = gl.load(tile_starts + first_expert + num_experts) - gl.load(tile_starts + first_expert)
    return num_tiles * (sizes[0] // sizes[4])  # by ROWS // BLOCK_ROWS tiles of the matrices


@gluon.jit
def place_of(unit, plan, sizes: gl.constexpr):
    """Return a tile's expert, counted from ``first_expert``; the places, in the order of experts, of the
    tile's first row and of the end of its expert's rows; and the tile's first row of the expert's matrices,
    which is a column of the result. Tiles have the order of ``kernels.gluon_linear``."""
    starts, tile_starts, tile_experts, first_expert, num_experts = plan
    ROWS: gl.constexpr = sizes[0]
    HALF: gl.constexpr = sizes[3]
    BLOCK_ROWS: gl.constexpr = sizes[4]
    TOGETHER: gl.constexpr = sizes[5]
    across: gl.constexpr = ROWS // BLOCK_ROWS
    first_tile = gl.load(tile_starts + first_expert)
    num_tiles = gl.load(tile_starts + first_expert + num_experts) - first_tile
    tile, n = in_order(unit, num_tiles, across, TOGETHER)
    tile += first_tile
    expert = gl.load(tile_experts + tile)
    row = gl.load(starts + expert) + (tile - gl.load(tile_starts + expert)) * (2 * HALF)
    return expert - first_expert, row, gl.load(starts + expert + 1), n * BLOCK_ROWS


@gluon.jit
def load_blocks(x, values, stages, plan, sizes: gl.constexpr):
    """Load the blocks of all tiles of this program."""
    ROWS: gl.constexpr = sizes[0]
    BLOCKS: gl.constexpr = sizes[1]
    BLOCK: gl.constexpr = sizes[2]
    HALF: gl.constexpr = sizes[3]
    BLOCK_ROWS: gl.constexpr = sizes[4]
    STAGES: gl.constexpr = sizes[6]
    loaded = 0  # blocks
    for unit in range(gl.program_id(0), num_units_of(plan, sizes), gl.num_programs(0)):
        expert, row, _, n = place_of(unit, plan, sizes)
        n += expert * ROWS
        for block in range(BLOCKS):
            load_block(x, values, stages, row, n, block, loaded, BLOCK, HALF, BLOCK_ROWS, STAGES)
            loaded += 1


@gluon.jit
def multiply_tiles(arguments, WHICH: gl.constexpr, IS_FIRST: gl.constexpr, sizes: gl.constexpr):
    """Multiply and store one half of each tile's rows: the first if WHICH is 0, the second if it is 1."""
    x_scales, scales, out, order, weights, stages, plan, num_rows = arguments
    ROWS: gl.constexpr = sizes[0]
    BLOCKS: gl.constexpr = sizes[1]
    HALF: gl.constexpr = sizes[3]
    BLOCK_ROWS: gl.constexpr = sizes[4]
    STAGES: gl.constexpr = sizes[6]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_ROWS, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    zeros = gl.zeros([HALF, BLOCK_ROWS], gl.float32, mma)
    multiplied = 0  # blocks
    for unit in range(gl.program_id(0), num_units_of(plan, sizes), gl.num_programs(0)):
        expert, first_row, end_row, n = place_of(unit, plan, sizes)
        first_row += WHICH * HALF
        place = first_row + gl.arange(0, HALF, gl.SliceLayout(1, mma))
        token_scales = x_scales + gl.minimum(place, num_rows - 1)
        row_scales = scales + ((expert * ROWS + n) // BLOCK_ROWS).to(gl.int64) * BLOCKS
        total = scaled_sum_of(
            stages, multiplied, BLOCKS, zeros, token_scales, row_scales, num_rows, WHICH, STAGES
        )
        multiplied += BLOCKS
        if not IS_FIRST:
            row = gl.load(order + place, mask=place < end_row, other=0)
            total *= gl.load(weights + row, mask=place < end_row, other=0.0)[:, None]
        result = gl.convert_layout(total.to(out.dtype.element_ty), wide)
        place = first_row + gl.arange(0, HALF, gl.SliceLayout(1, wide))
        is_row = place < end_row
        target = place if IS_FIRST else gl.load(order + place, mask=is_row, other=0)
        columns = n + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, wide))
        gl.store(out + target.to(gl.int64)[:, None] * ROWS + columns[None, :], result, mask=is_row[:, None])
