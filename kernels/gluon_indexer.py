# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""The indexer's logits of prompts on Hopper: several queries of a request share its unpacked keys.

``kernels.paged_indexer.unpacked_index_topk`` calls ``write_logits`` for sizes that it ``takes``.

A program has eight queries and one split of the positions that they see. One warp loads tiles of keys, as far
ahead as shared memory allows. Two groups of four warps multiply each tile, each with all heads of half of the
queries, and add up over the heads: while one group adds up, the other can use the tensor cores. Products and
sums are those of ``kernels.triton_indexer``, in the same order, so that every logit has the same bits.
"""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hisparse_pd.kernels.cuda_launch import HOPPER, num_multiprocessors
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.triton_launch import begin, launch_options

NUM_HEADS: Final = 64
HEAD_DIM: Final = 128
"""The only sizes of queries that the kernel takes, which are DeepSeek-V3.2's."""
GROUP_QUERIES: Final = 4
"""Queries of a group of warps, half of a program's. With 64 heads each they are 256 columns, the most that
one instruction multiplies with."""
TILE: Final = 64
"""Positions of a tile, at least the rows of one instruction."""
STAGES: Final = 8
"""Tiles in shared memory."""
GROUP_REGISTERS: Final = 240
LOADER_REGISTERS: Final = 24
"""Registers of a thread of the multiplying warps, and of the loading warp, which needs few."""


def takes(num_heads: int, head_dim: int, device: torch.device) -> bool:
    """Return whether the kernel takes queries of these sizes on a GPU: 64 heads of 128 numbers on Hopper."""
    is_hopper = torch.cuda.get_device_capability(device) == HOPPER
    return is_hopper and (num_heads, head_dim) == (NUM_HEADS, HEAD_DIM)


def write_logits(
    q_index: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor,
    first_keys: Tensor,
    req_rows: Tensor,
    query_positions: Tensor,
    num_real: Tensor,
    logits: Tensor,
    *,
    first_token: int,
    block_tokens: int,
    top_k: int,
    max_len: int,
) -> None:
    """Score queries [first_token, first_token + block_tokens) into the first rows of ``logits``.

    ``q_index``: bfloat16 [num_tokens, 64, 128]; ``weights``: float32 [num_tokens, 64], each head's weight.
    ``keys``: fp8 [n, 128] and ``scales``: float32 [n + UnpackedKeys.PADDING], as ``IndexKeyFormat.unpack``
    writes them; a tile may read behind the last key, but scores nothing there.
    ``first_keys``: int32 [num_rows], where the key of each row's position 0 is.
    ``req_rows``, ``query_positions``: int64 [num_tokens], each query's row and the last position it sees.
    ``num_real``: int32 [1]; queries from this index on are padding.
    ``logits``: float32 [>= block_tokens, >= max_len]. Nothing is written for positions from ``max_len`` on,
    nor for queries that see at most ``top_k``.
    """
    device = q_index.device
    num_groups = -(-block_tokens // (2 * GROUP_QUERIES))
    num_splits = max(1, num_multiprocessors(device) // num_groups)  # so that programs fill the GPU
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    with torch.cuda.device(device):
        prompt_logits_kernel[(num_splits, num_groups)](
            q_index,
            weights,
            TensorDescriptor(keys, list(keys.shape), [HEAD_DIM, 1], [TILE, HEAD_DIM], layout),
            scales,
            first_keys,
            req_rows,
            query_positions,
            num_real,
            logits,
            first_token,
            first_token + block_tokens,
            first_keys.shape[0],
            max_len,
            top_k,
            logits.stride(0),
            HEAD_DIM**-0.5,
            NUM_HEADS=NUM_HEADS,
            HEAD_DIM=HEAD_DIM,
            FP8_MAX=FP8_MAX,
            GROUP_QUERIES=GROUP_QUERIES,
            TILE=TILE,
            STAGES=STAGES,
            GROUP_REGISTERS=GROUP_REGISTERS,
            LOADER_REGISTERS=LOADER_REGISTERS,
            num_warps=4,
            **launch_options(device),
        )


@gluon.jit(do_not_specialize=["first_token", "stop_token", "num_rows", "max_len", "top_k"])
def prompt_logits_kernel(
    q_index,
    weights,
    keys,
    scales,
    first_keys,
    req_rows,
    query_positions,
    num_real,
    logits,
    first_token,
    stop_token,
    num_rows,
    max_len,
    top_k,
    logits_stride,
    score_scale,
    NUM_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    FP8_MAX: gl.constexpr,
    GROUP_QUERIES: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Score eight queries over one split of their positions.

    A ring of STAGES tiles of keys in shared memory connects the loading warp and the two groups. ``is_full``
    of a stage completes when its keys have arrived, ``is_free`` when both groups have read them. ``seen``:
    what the functions below need to know which keys the queries see.
    """
    tiles = gl.allocate_shared_memory(keys.dtype, [STAGES, TILE, HEAD_DIM], keys.layout)
    queries = gl.allocate_shared_memory(keys.dtype, [2, GROUP_QUERIES * NUM_HEADS, HEAD_DIM], keys.layout)
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=2)
    begin(OVERLAPS)  # lets the next kernel start, and waits for those before: what they wrote is read below
    stop_token = gl.minimum(stop_token, gl.load(num_real))
    first = first_token + gl.program_id(1) * (2 * GROUP_QUERIES)
    stages = (tiles, is_full, is_free)
    # The functions of the warps take some of these by number, because they take tuples and no keywords:
    # seen[0] is first_keys, seen[3] and seen[4] are first and stop_token.
    seen = (first_keys, req_rows, query_positions, first, stop_token, num_rows, max_len, top_k)
    results = (logits, first_token, logits_stride)
    sizes: gl.constexpr = (NUM_HEADS, HEAD_DIM, GROUP_QUERIES, TILE, STAGES, FP8_MAX)
    arguments = (q_index, weights, scales, queries, stages, seen, results, score_scale)
    gl.warp_specialize(
        [
            (score_queries, (arguments, 0, sizes)),
            (score_queries, (arguments, 1, sizes)),
            (load_tiles, (keys, stages, seen, sizes)),
        ],
        [4, 1],  # warps of the second and third function; the first has num_warps
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def query_of(seen, number):
    """Return the row of a program's query, and how many positions it sees; 0 if it is not scored, because
    it is padding, or because it sees no more than ``top_k`` and all are selected in any case."""
    _, req_rows, query_positions, first, stop_token, num_rows, max_len, top_k = seen
    token = gl.maximum(gl.minimum(first + number, stop_token - 1), 0)
    row = gl.load(req_rows + token)
    length = gl.minimum(gl.load(query_positions + token) + 1, max_len).to(gl.int32)
    is_scored = (first + number < stop_token) & (row >= 0) & (row < num_rows) & (length > top_k)
    return row.to(gl.int32), gl.where(is_scored, length, 0)


@gluon.jit
def num_runs_of(seen, GROUP_QUERIES: gl.constexpr):
    """Return the number of runs in which the program's queries are scored: one for all if they are of one
    row, otherwise one for each. A run goes through the keys of its row once."""
    first_row, last_row = 2147483647, -1
    for number in gl.static_range(2 * GROUP_QUERIES):
        row, length = query_of(seen, number)
        first_row = gl.minimum(first_row, gl.where(length > 0, row, 2147483647))
        last_row = gl.maximum(last_row, gl.where(length > 0, row, -1))
    return gl.where(first_row >= last_row, 1, 2 * GROUP_QUERIES)


@gluon.jit
def keys_of_run(seen, run, num_runs, GROUP_QUERIES: gl.constexpr, TILE: gl.constexpr):
    """Return the first key of a run's row, and its tiles in this program's split: the first and the end."""
    longest, its_row = 0, 0
    for number in gl.static_range(2 * GROUP_QUERIES):
        row, length = query_of(seen, number)
        length = gl.where((num_runs == 1) | (number == run), length, 0)
        its_row = gl.where(length > 0, row, its_row)
        longest = gl.maximum(longest, length)
    num_tiles = (longest + TILE - 1) // TILE
    split_tiles = (num_tiles + gl.num_programs(0) - 1) // gl.num_programs(0)
    first_tile = gl.program_id(0) * split_tiles
    first_key = gl.load(seen[0] + its_row)
    return first_key, first_tile, gl.minimum(first_tile + split_tiles, num_tiles)


@gluon.jit
def load_tiles(keys, stages, seen, sizes: gl.constexpr):
    """Load the tiles of keys of all runs, each as soon as a stage of the ring is free."""
    tiles, is_full, is_free = stages
    HEAD_DIM: gl.constexpr = sizes[1]
    GROUP_QUERIES: gl.constexpr = sizes[2]
    TILE: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    num_runs = num_runs_of(seen, GROUP_QUERIES)
    at = 0  # tiles so far, of all runs
    for run in range(num_runs):
        first_key, first_tile, stop_tile = keys_of_run(seen, run, num_runs, GROUP_QUERIES, TILE)
        for tile in range(first_tile, stop_tile):
            stage = at % STAGES
            full = is_full.index(stage)
            mbarrier.wait(is_free.index(stage), (at // STAGES + 1) % 2)
            mbarrier.expect(full, TILE * HEAD_DIM)
            tma.async_copy_global_to_shared(keys, [first_key + tile * TILE, 0], full, tiles.index(stage))
            at += 1


@gluon.jit
def score_queries(arguments, WHICH: gl.constexpr, sizes: gl.constexpr):
    """Score half of a program's queries: the first if ``WHICH`` is 0, the last if it is 1."""
    q_index, weights, scales, queries, stages, seen, results, score_scale = arguments
    tiles, is_full, is_free = stages
    logits, first_token, logits_stride = results
    first, stop_token = seen[3], seen[4]
    NUM_HEADS: gl.constexpr = sizes[0]
    HEAD_DIM: gl.constexpr = sizes[1]
    GROUP_QUERIES: gl.constexpr = sizes[2]
    TILE: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    FP8_MAX: gl.constexpr = sizes[5]
    COLUMNS: gl.constexpr = GROUP_QUERIES * NUM_HEADS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])

    # Each head's query in fp8, as ``kernels.triton_indexer`` has it. The scale is rounded up to a power of
    # two by its bits, with 1 for zero and infinity, so that its reciprocal is exact.
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(1, wide))
    tokens = first + WHICH * GROUP_QUERIES + columns // NUM_HEADS
    head_rows = gl.maximum(gl.minimum(tokens, stop_token - 1), 0) * NUM_HEADS + columns % NUM_HEADS
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    q = gl.load(q_index + head_rows.to(gl.int64)[:, None] * HEAD_DIM + dims[None, :])
    q = q.to(gl.float32)
    bits = gl.div_rn(gl.max(gl.abs(q), axis=1), FP8_MAX).to(gl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    bits = gl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
    reciprocals = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    mine = queries.index(WHICH)
    mine.store((q * reciprocals[:, None]).to(gl.float8e4nv))
    fence_async_shared()
    head_weights = gl.load(weights + head_rows)
    head_weights *= bits.to(gl.float32, bitcast=True) * score_scale
    head_weights = gl.convert_layout(head_weights, gl.SliceLayout(0, mma))

    zeros = gl.zeros([TILE, COLUMNS], gl.float32, mma)
    nothing = gl.sum(gl.reshape(zeros, [TILE, GROUP_QUERIES, NUM_HEADS]), axis=2)  # has the layout of scores
    in_tile = gl.arange(0, TILE, gl.SliceLayout(1, nothing.type.layout))
    numbers = gl.arange(0, GROUP_QUERIES, gl.SliceLayout(0, nothing.type.layout)) + WHICH * GROUP_QUERIES
    logits += (first + numbers - first_token).to(gl.int64) * logits_stride
    num_runs = num_runs_of(seen, GROUP_QUERIES)
    at = 0
    for run in range(num_runs):
        first_key, first_tile, stop_tile = keys_of_run(seen, run, num_runs, GROUP_QUERIES, TILE)
        lengths = numbers * 0
        for number in gl.static_range(WHICH * GROUP_QUERIES, (WHICH + 1) * GROUP_QUERIES):
            _, length = query_of(seen, number)
            length = gl.where((num_runs == 1) | (number == run), length, 0)
            lengths = gl.where(numbers == number, length, lengths)
        for tile in range(first_tile, stop_tile):
            stage = at % STAGES
            positions = tile * TILE + in_tile
            scale = gl.load(scales + first_key + positions)
            mbarrier.wait(is_full.index(stage), at // STAGES % 2)
            heads = mine.permute((1, 0))
            products = warpgroup_mma(tiles.index(stage), heads, zeros, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, deps=(products,))
            mbarrier.arrive(is_free.index(stage), count=1)
            products = gl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * head_weights[None, :]
            score = gl.sum(gl.reshape(products, [TILE, GROUP_QUERIES, NUM_HEADS]), axis=2) * scale[:, None]
            is_seen = positions[:, None] < lengths[None, :]
            gl.store(logits[None, :] + positions[:, None], score, mask=is_seen)
            at += 1
