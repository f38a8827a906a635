"""The host side of ``csrc/prompt_logits.cu``, the indexer's logits of prompts on Hopper.

``kernels.paged_indexer`` calls ``write_logits`` for arguments that ``kernels.index_logits`` ``takes``. A
block has eight queries of 64 heads, or sixteen of 32, which share each tile of keys if they are of one
request.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from hisparse_pd.kernels import index_logits
from hisparse_pd.kernels.cuda_launch import launch, num_multiprocessors
from hisparse_pd.kernels.index_logits import HEAD_DIM, TILE, TILE_BYTES

NAME: Final = "prompt_logits"
NUM_THREADS: Final = 384
COLUMNS: Final = 512
"""Heads of a block's queries, a quarter of which one instruction multiplies with."""
STAGES: Final = 16
"""Tiles in a block's shared memory."""
SHARED_BYTES: Final = index_logits.ALIGNMENT + COLUMNS * HEAD_DIM + STAGES * TILE_BYTES
"""Bytes of a block's dynamic shared memory: its queries in fp8, the ring, and what aligns them."""
MAX_SPLITS: Final = 8
"""Most blocks that share the positions of a group of queries, if there are enough groups for the GPU."""
START_TILES: Final = 4
"""Tiles that a block scores in the time in which it starts."""


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
    max_len: int,
) -> None:
    """Score queries [first_token, first_token + block_tokens) into the first rows of ``logits``.

    The arguments are those of ``kernels.triton_indexer.write_logits``, and so is what is written.
    """
    device, num_heads = q_index.device, q_index.shape[1]
    parameters = index_logits.parameters_of(
        q_index, weights, index_pool, page_table, req_rows, query_positions, num_real, logits,
        first_token=first_token, block_tokens=block_tokens, top_k=top_k, max_len=max_len,
    )  # fmt: skip
    num_groups = -(-block_tokens // (COLUMNS // num_heads))
    num_splits = choose_num_splits(num_groups, -(-max_len // TILE), num_multiprocessors(device))
    kernel = _kernel(device, num_heads, page_size)
    launch(kernel, device, num_splits, NUM_THREADS, parameters, SHARED_BYTES, num_blocks_y=num_groups)


@functools.lru_cache(256)
def choose_num_splits(num_groups: int, num_tiles: int, num_sms: int) -> int:
    """Return how many blocks share the positions of a group of queries, of which the longest has
    ``num_tiles``, so that the last of all blocks is soonest done. A multiprocessor has one block at a
    time."""

    def duration(num_splits: int) -> int:
        return -(-num_groups * num_splits // num_sms) * (-(-num_tiles // num_splits) + START_TILES)

    return min(range(1, max(MAX_SPLITS, num_sms // num_groups) + 1), key=duration)


def compile_options(num_heads: int, page_size: int) -> tuple[str, ...]:
    """Return the compiler's options without the architecture."""
    return index_logits.compile_options(num_heads, page_size, STAGES)


@functools.cache
def _kernel(device: torch.device, num_heads: int, page_size: int) -> Any:
    return index_logits.compiled(NAME, compile_options(num_heads, page_size), device, SHARED_BYTES)
