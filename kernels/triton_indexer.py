"""The indexer's logits on a GPU, in Triton: paged keys in, float32 [tokens, positions] out.

``kernels.paged_indexer`` calls ``write_logits`` for each block of queries, and then selects from the logits.

A program has one query and one split of the positions that it sees, in tiles of at most one page. It
multiplies a tile of keys with all heads' queries on the tensor cores and adds up over the heads at once, so
that no values per head leave the registers. Positions are the product's rows. The number of splits depends on
shapes only, as a CUDA graph requires; the length of a split depends on the query's length.

fp8 keys go to the tensor cores as they are. bfloat16 queries are rounded to fp8, too
(``IndexKeyFormat.round_queries``), and the head's weight is multiplied by the query's scale. Scores are less
exact than on a CPU: Hopper adds up fp8 products with 13 bits after the leading bit of the largest one.

fp8 keys need compute capability 8.9. Importing this module imports triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.cuda_launch import num_multiprocessors
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.kv_format import FP8_E4M3
from hisparse_pd.kernels.triton_kv_format import power_of_two_scales
from hisparse_pd.kernels.triton_launch import begin, launch_options

PROGRAMS_PER_SM = 8
"""Programs that share the work of few queries: more than run at a time, so that unequal lengths even out."""
MIN_TILES = 2
"""Fewest tiles of a split that are worth the program's start."""
MAX_SPLITS = 2048
"""Most splits of a query's positions."""


@dataclass(frozen=True)
class Tuning:
    """How the kernel is compiled; all values give the same logits up to rounding, and any ``queries`` the
    same bits."""

    tile: int
    """Positions of a tile, a power of two from 16 on."""
    num_warps: int
    num_stages: int
    """Stages of the pipeline: one more than the tiles that are in flight to a program."""
    queries: int = 1
    """Queries of a program, a power of two, that share each tile of keys if they are of one request."""


TUNING = {
    "float32": Tuning(tile=32, num_warps=4, num_stages=2),
    "bfloat16": Tuning(tile=64, num_warps=4, num_stages=3),
    "fp8_e4m3": Tuning(tile=64, num_warps=4, num_stages=3),
}
"""Tunings by the format of keys; "float32" if queries or keys are float32."""
PROMPT_TUNING = {
    "float32": Tuning(tile=32, num_warps=4, num_stages=2),
    "bfloat16": Tuning(tile=64, num_warps=4, num_stages=3, queries=4),
    "fp8_e4m3": Tuning(tile=64, num_warps=4, num_stages=3, queries=4),
}
"""Tunings for queries most of which have the same request as their neighbours. They differ from TUNING in
``queries`` alone."""


def write_logits(
    q_index: Tensor,
    weights: Tensor,
    index_pool: Tensor,
    page_table: Tensor,
    req_rows: Tensor,
    query_positions: Tensor,
    num_real: Tensor,
    logits: Tensor,
    *,
    first_token: int,
    block_tokens: int,
    page_size: int,
    top_k: int,
    key_format: str,
    max_len: int,
    is_prompt: bool = False,
) -> None:
    """Score queries [first_token, first_token + block_tokens) into the first rows of ``logits``.

    The arguments are those of ``kernels.paged_indexer.paged_index_topk``, which has checked them. ``logits``:
    float32 [>= block_tokens, >= max_len]. Only positions that a query sees are written, and nothing for
    queries that see at most ``top_k`` (0: score all).
    """
    num_heads, head_dim = q_index.shape[1:]
    device = q_index.device
    is_float32 = q_index.dtype == torch.float32 or key_format == "float32"
    tuning = (PROMPT_TUNING if is_prompt else TUNING)["float32" if is_float32 else key_format]
    keys, scales = _key_views(index_pool, key_format)
    num_groups = triton.cdiv(block_tokens, tuning.queries)
    num_splits = choose_num_splits(num_groups, _num_programs(device))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _logits_kernel[(num_splits, num_groups)](
            q_index, weights, keys, scales, page_table, req_rows, query_positions, num_real, logits,
            first_token, first_token + block_tokens, page_table.shape[0], page_table.shape[1], max_len, top_k,
            logits.stride(0), head_dim**-0.5,
            KEY_STRIDE=keys.stride(0), SCALE_STRIDE=scales.stride(0), PAGE_SIZE=page_size,
            NUM_HEADS=num_heads, BLOCK_HEADS=max(16, triton.next_power_of_2(num_heads)),
            HEAD_DIM=head_dim, BLOCK_DIM=max(32, triton.next_power_of_2(head_dim)),
            QUERIES=tuning.queries, TILE=tuning.tile,
            IS_FLOAT32=is_float32, IS_FP8=key_format == FP8_E4M3, FP8_MAX=FP8_MAX,
            MIN_TILES=MIN_TILES, NUM_STAGES=tuning.num_stages, num_warps=tuning.num_warps,
            **launch_options(device),
        )  # fmt: skip


def choose_num_splits(num_tokens: int, num_programs: int) -> int:
    """Return the number of programs that share a query (or a group of them): at most ``num_programs`` in all,
    since further ones would run last and alone."""
    return max(1, min(MAX_SPLITS, num_programs // num_tokens))


def _key_views(index_pool: Tensor, key_format: str) -> tuple[Tensor, Tensor]:
    """Return views of the pool as elements of keys and as the words of their scales (the keys again if there
    are no scales)."""
    if key_format == FP8_E4M3:
        return index_pool.view(torch.float8_e4m3fn), index_pool.view(torch.float32)
    keys = index_pool.view(torch.float32 if key_format == "float32" else torch.bfloat16)
    return keys, keys


@functools.cache
def _num_programs(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 3
    return PROGRAMS_PER_SM * num_multiprocessors(device)


@triton.jit(do_not_specialize=["first_token", "stop_token", "num_rows", "max_pages", "max_len", "top_k"])
def _logits_kernel(
    q_index, weights, keys, scales, page_table, req_rows, query_positions, num_real, logits,
    first_token, stop_token, num_rows, max_pages, max_len, top_k, logits_stride, score_scale,
    KEY_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, IS_FLOAT32: tl.constexpr, IS_FP8: tl.constexpr,
    FP8_MAX: tl.constexpr, MIN_TILES: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Score QUERIES queries over one split of the positions that they see."""
    begin(OVERLAPS)
    stop_token = tl.minimum(stop_token, tl.load(num_real))
    first_of_program = first_token + tl.program_id(1) * QUERIES
    if first_of_program >= stop_token:
        return
    tokens = first_of_program + tl.arange(0, QUERIES)
    is_token = tokens < stop_token
    rows = tl.load(req_rows + tokens, mask=is_token, other=-1)
    query_lengths = tl.load(query_positions + tokens, mask=is_token, other=-1) + 1
    query_lengths = tl.minimum(query_lengths, max_len).to(tl.int32)
    is_scored = (rows >= 0) & (rows < num_rows) & (query_lengths > top_k)
    query_lengths = tl.where(is_scored, query_lengths, 0)
    # Queries of one request are scored together. Where one request ends and another begins, they are scored
    # one after the other.
    first_row = tl.min(tl.where(is_scored, rows, num_rows))
    last_row = tl.max(tl.where(is_scored, rows, -1))
    num_runs = tl.where(first_row == last_row, 1, QUERIES)
    for run in range(0, num_runs):
        is_in_run = is_scored & ((num_runs == 1) | (tokens == first_of_program + run))
        _score_run(
            q_index, weights, keys, scales, page_table, logits,
            tl.max(tl.where(is_in_run, rows, 0)), tokens, tl.where(is_in_run, query_lengths, 0),
            first_token, max_pages, logits_stride, score_scale,
            KEY_STRIDE, SCALE_STRIDE, PAGE_SIZE, NUM_HEADS, BLOCK_HEADS, HEAD_DIM, BLOCK_DIM, QUERIES, TILE,
            IS_FLOAT32, IS_FP8, FP8_MAX, MIN_TILES, NUM_STAGES,
        )  # fmt: skip


@triton.jit
def _score_run(
    q_index, weights, keys, scales, page_table, logits, row, tokens, query_lengths,
    first_token, max_pages, logits_stride, score_scale,
    KEY_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, IS_FLOAT32: tl.constexpr, IS_FP8: tl.constexpr,
    FP8_MAX: tl.constexpr, MIN_TILES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Score this program's split of the keys of ``row`` for the queries ``tokens``. Each sees the first
    ``query_lengths`` positions; one with 0 is not in this run, and nothing is written for it."""
    length = tl.max(query_lengths)
    num_tiles = tl.cdiv(length, TILE)
    split_tiles = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(0)), MIN_TILES)
    first_tile = tl.program_id(0) * split_tiles
    stop_tile = tl.minimum(first_tile + split_tiles, num_tiles)
    if first_tile < stop_tile:
        pages = page_table + row * max_pages
        columns = tl.arange(0, QUERIES * BLOCK_HEADS)  # one for each head of each query, by query
        dims = tl.arange(0, BLOCK_DIM)
        in_tile = tl.arange(0, TILE)
        heads = columns % BLOCK_HEADS
        column_tokens = tl.min(tokens) + columns // BLOCK_HEADS
        is_column = (heads < NUM_HEADS) & (column_tokens <= tl.max(tl.where(query_lengths > 0, tokens, -1)))
        is_dim = dims < HEAD_DIM
        head_rows = column_tokens.to(tl.int64) * NUM_HEADS + heads
        head_weights = tl.load(weights + head_rows, mask=is_column, other=0.0)
        q_rows = q_index + head_rows * HEAD_DIM
        if not IS_FLOAT32:
            q = tl.load(q_rows[None, :] + dims[:, None], mask=is_column[None, :] & is_dim[:, None], other=0.0)
            if IS_FP8:
                q = q.to(tl.float32)
                q_scales, reciprocals = power_of_two_scales(tl.max(tl.abs(q), axis=0), FP8_MAX)
                q = (q * reciprocals[None, :]).to(tl.float8e4nv)
                head_weights *= q_scales * score_scale

        # The next tile's page is loaded one tile ahead of its keys.
        next_page = tl.load(pages + first_tile * TILE // PAGE_SIZE)
        for tile in tl.range(first_tile, stop_tile, num_stages=NUM_STAGES):
            start = tile * TILE
            positions = start + in_tile
            if PAGE_SIZE % TILE == 0:
                # Positions after the last one lie in the same page, so their keys can be read too.
                first_slot = next_page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE
                next_page = tl.load(pages + tl.minimum(tile + 1, stop_tile - 1) * TILE // PAGE_SIZE)
                key_rows = keys + first_slot * KEY_STRIDE + in_tile * KEY_STRIDE
                scale_rows = scales + first_slot * SCALE_STRIDE + in_tile * SCALE_STRIDE
            else:
                page = tl.load(pages + positions // PAGE_SIZE, mask=positions < length, other=0)
                # Not as one product of slot and stride: Triton (3.6) would then assume that rows of 68 bytes
                # are aligned to 8, and the loads would fault.
                in_page = positions % PAGE_SIZE
                page = page.to(tl.int64)
                key_rows = keys + page * (PAGE_SIZE * KEY_STRIDE) + in_page * KEY_STRIDE
                scale_rows = scales + page * (PAGE_SIZE * SCALE_STRIDE) + in_page * SCALE_STRIDE
            if IS_FLOAT32:
                products = tl.zeros([TILE, QUERIES * BLOCK_HEADS], dtype=tl.float32)
                for first_dim in tl.static_range(0, HEAD_DIM, 16):
                    some = first_dim + tl.arange(0, 16)
                    if HEAD_DIM % 16 == 0:
                        key = tl.load(key_rows[:, None] + some[None, :]).to(tl.float32)
                        q = tl.load(q_rows[None, :] + some[:, None], mask=is_column[None, :], other=0.0)
                    else:
                        is_some = some < HEAD_DIM
                        key = tl.load(key_rows[:, None] + some[None, :], mask=is_some[None, :], other=0.0)
                        key = key.to(tl.float32)
                        both = is_column[None, :] & is_some[:, None]
                        q = tl.load(q_rows[None, :] + some[:, None], mask=both, other=0.0)
                    products = tl.dot(key, q.to(tl.float32), products, input_precision="ieee")
            else:
                if BLOCK_DIM == HEAD_DIM:
                    key = tl.load(key_rows[:, None] + dims[None, :])
                else:
                    key = tl.load(key_rows[:, None] + dims[None, :], mask=is_dim[None, :], other=0.0)
                products = tl.dot(key, q)
            if IS_FLOAT32 or not IS_FP8:  # otherwise the head's weight includes the scale
                products *= score_scale
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if BLOCK_HEADS != NUM_HEADS:
                # Infinite keys give NaN for absent heads.
                products = tl.where(is_column[None, :], products, 0.0)
            products *= head_weights[None, :]
            if QUERIES == 1:
                score = tl.sum(products, axis=1)[:, None]
            else:
                score = tl.sum(tl.reshape(products, [TILE, QUERIES, BLOCK_HEADS]), axis=2)
            if IS_FP8:  # a key's scale is the word of 4 bytes behind its HEAD_DIM bytes
                score *= tl.load(scale_rows + HEAD_DIM // 4)[:, None]
            logits_rows = logits + (tokens - first_token).to(tl.int64) * logits_stride
            is_seen = positions[:, None] < query_lengths[None, :]
            tl.store(logits_rows[None, :] + positions[:, None], score, mask=is_seen)
