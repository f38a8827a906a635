"""The host side of ``csrc/paged_logits.cu``, the indexer's logits of steps on Hopper.

``kernels.paged_indexer`` calls ``write_logits`` for arguments that ``kernels.index_logits`` ``takes``. As
many blocks as the GPU runs at a time share all tiles of all queries equally.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from hisparse_pd.kernels import index_logits
from hisparse_pd.kernels.cuda_launch import launch, num_multiprocessors
from hisparse_pd.kernels.index_logits import HEAD_DIM, TILE, TILE_BYTES

NAME: Final = "paged_logits"
NUM_THREADS: Final = 160
BLOCKS_PER_SM: Final = 3
"""Blocks of a multiprocessor, whose registers and shared memory hold no more."""
STAGES: Final = 8
"""Tiles in a block's shared memory, as many of each of its four warps that score."""
MIN_TILES: Final = 4
"""Fewest tiles of a block's share, one for each of its warps that score."""


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
    taken_sms: int = 0,
) -> None:
    """Score queries [first_token, first_token + block_tokens) into the first rows of ``logits``.

    The arguments are those of ``kernels.triton_indexer.write_logits``, and so is what is written.
    ``taken_sms``: multiprocessors that are left to others. Blocks for them would run after all the others.
    """
    device, num_heads = q_index.device, q_index.shape[1]
    parameters = index_logits.parameters_of(
        q_index, weights, index_pool, page_table, req_rows, query_positions, num_real, logits,
        first_token=first_token, block_tokens=block_tokens, top_k=top_k, max_len=max_len,
    )  # fmt: skip
    parameters["min_tiles"] = MIN_TILES
    # More blocks than tiles would find nothing to do.
    num_tiles = block_tokens * -(-max_len // TILE)
    num_resident = BLOCKS_PER_SM * max(1, num_multiprocessors(device) - taken_sms)
    num_blocks = min(num_resident, -(-num_tiles // MIN_TILES))
    kernel = _kernel(device, num_heads, page_size)
    launch(kernel, device, num_blocks, NUM_THREADS, parameters, shared_bytes(num_heads))


def shared_bytes(num_heads: int) -> int:
    """Return the bytes of a block's dynamic shared memory: a query in fp8, the ring, its barriers of eight
    bytes, and the heads' weights in float32."""
    return num_heads * HEAD_DIM + STAGES * (TILE_BYTES + 2 * 8) + 4 * num_heads


def compile_options(num_heads: int, page_size: int) -> tuple[str, ...]:
    """Return the compiler's options without the architecture."""
    own = {"BLOCKS_PER_SM": BLOCKS_PER_SM, "SHARED_BYTES": shared_bytes(num_heads)}
    return (
        *index_logits.compile_options(num_heads, page_size, STAGES),
        *(f"-D{name}={number}" for name, number in own.items()),
    )


@functools.cache
def _kernel(device: torch.device, num_heads: int, page_size: int) -> Any:
    options = compile_options(num_heads, page_size)
    return index_logits.compiled(NAME, options, device, shared_bytes(num_heads))
