"""The host side of ``csrc/paged_logits.cu``, the indexer's logits of steps on Hopper.

``kernels.paged_indexer`` calls ``write_logits`` for arguments that this module ``takes``. As many blocks as
the GPU runs at a time share all tiles of all queries equally. Every logit has the bits of
``kernels.triton_indexer``. The first launch imports cupy and compiles the code, so a CUDA graph cannot
capture it.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.cuda_launch import (
    HOPPER,
    hopper_module,
    launch,
    num_multiprocessors,
    translation_unit,
)
from hisparse_pd.kernels.kv_format import FP8_E4M3

MAIN_SOURCE: Final = "paged_logits.cu"
NUM_HEADS: Final = (32, 64)
HEAD_DIM: Final = 128
"""The sizes of queries that the kernel takes: GLM-5's and DeepSeek-V3.2's."""
TILE: Final = 64
"""Positions of a tile. Pages of the pool must be whole tiles."""
TILE_BYTES: Final = TILE * (HEAD_DIM + 4)
NUM_THREADS: Final = 160
BLOCKS_PER_SM: Final = 3
"""Blocks of a multiprocessor, whose registers and shared memory hold no more."""
STAGES: Final = 7
"""Tiles in a block's shared memory."""
ALIGNMENT: Final = 1024
"""Multiple of bytes at which a query must lie in shared memory."""
MIN_TILES: Final = 4
"""Fewest tiles of a block's share, one for each of its warps that score."""

_POINTER, _LONG, _INT = np.uint64, np.int64, np.int32
PARAMS = np.dtype(
    [
        ("q_index", _POINTER),
        ("weights", _POINTER),
        ("keys", _POINTER),
        ("page_table", _POINTER),
        ("req_rows", _POINTER),
        ("query_positions", _POINTER),
        ("num_real", _POINTER),
        ("logits", _POINTER),
        ("logits_stride", _LONG),
        ("first_token", _INT),
        ("stop_token", _INT),
        ("num_rows", _INT),
        ("max_pages", _INT),
        ("max_len", _INT),
        ("top_k", _INT),
        ("score_scale", np.float32),
        ("min_tiles", _INT),
    ],
    align=True,
)
"""LogitsParams of csrc/paged_logits.cu, field by field."""


def takes(q_index: Tensor, index_pool: Tensor, page_size: int, key_format: str) -> bool:
    """Return whether the kernel takes these arguments of ``kernels.paged_indexer.paged_index_topk``: bfloat16
    queries of 32 or 64 heads of 128 numbers, and fp8 keys in pages of whole tiles, on Hopper."""
    num_heads, head_dim = q_index.shape[1:]
    return (
        torch.cuda.get_device_capability(q_index.device) == HOPPER
        and q_index.dtype == torch.bfloat16
        and key_format == FP8_E4M3
        and num_heads in NUM_HEADS
        and head_dim == HEAD_DIM
        and page_size % TILE == 0
        and q_index.data_ptr() % 16 == index_pool.data_ptr() % 16 == 0
    )


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
    parameters = np.zeros((), PARAMS)
    for name, tensor in (
        ("q_index", q_index),
        ("weights", weights),
        ("keys", index_pool),
        ("page_table", page_table),
        ("req_rows", req_rows),
        ("query_positions", query_positions),
        ("num_real", num_real),
        ("logits", logits),
    ):
        parameters[name] = tensor.data_ptr()
    parameters["logits_stride"] = logits.stride(0)
    parameters["first_token"] = first_token
    parameters["stop_token"] = first_token + block_tokens
    parameters["num_rows"], parameters["max_pages"] = page_table.shape
    parameters["max_len"] = max_len
    parameters["top_k"] = top_k
    parameters["score_scale"] = HEAD_DIM**-0.5
    parameters["min_tiles"] = MIN_TILES
    # More blocks than tiles would find nothing to do.
    num_tiles = block_tokens * -(-max_len // TILE)
    num_resident = BLOCKS_PER_SM * max(1, num_multiprocessors(device) - taken_sms)
    num_blocks = min(num_resident, -(-num_tiles // MIN_TILES))
    kernel = _kernel(device, num_heads, page_size)
    launch(kernel, device, num_blocks, NUM_THREADS, parameters, shared_bytes(num_heads))


def shared_bytes(num_heads: int) -> int:
    """Return the bytes of a block's dynamic shared memory: a query in fp8, the ring, and what aligns them."""
    return ALIGNMENT + num_heads * HEAD_DIM + STAGES * TILE_BYTES


def source() -> str:
    """Return the whole translation unit: ``csrc/paged_logits.cu`` with its own headers."""
    return translation_unit(MAIN_SOURCE)


def compile_options(num_heads: int, page_size: int) -> tuple[str, ...]:
    """Return the compiler's options without the architecture."""
    numbers = {
        "NUM_HEADS": num_heads,
        "PAGE_SIZE": page_size,
        "STAGES": STAGES,
        "BLOCKS_PER_SM": BLOCKS_PER_SM,
    }
    return ("-std=c++17", "-lineinfo", *(f"-D{name}={number}" for name, number in numbers.items()))


@functools.cache
def _kernel(device: torch.device, num_heads: int, page_size: int) -> Any:
    with torch.cuda.device(device):
        kernel = hopper_module(source(), compile_options(num_heads, page_size)).get_function("paged_logits")
        kernel.max_dynamic_shared_size_bytes = shared_bytes(num_heads)
    return kernel
