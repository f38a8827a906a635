"""The host side of ``csrc/topk.cu``, the choice of the best positions: compiles it and launches it.

``kernels/paged_indexer.py`` calls ``select`` with the indexer's logits and has checked the arguments. A block
has one query, or, where there are more multiprocessors than queries, the blocks of a cluster share one. The
kernel compares logits by keys, integers of 4 bytes that order alike, and keeps as many keys as fit into
shared memory, so that logits are read once. The first launch imports cupy and compiles the code, so a CUDA
graph cannot capture it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.cuda_launch import (
    HOPPER,
    cupy_module,
    launch,
    max_block_shared_bytes,
    max_resident_clusters,
    num_multiprocessors,
    translation_unit,
)

MAIN_SOURCE = "topk.cu"
NUM_THREADS = 1024
"""Threads of a block that has a multiprocessor for itself."""
NUM_THREADS_OF_MANY = 512
"""Threads of a block where there are more queries than multiprocessors: two blocks share one, so that one
computes while the other waits. Only rows that fit into half of its shared memory are taken this way, because
longer ones would be read again."""
CLUSTER_SIZES = (2, 4, 8)
"""Sizes of clusters; the last is the largest that every GPU with clusters can run, MAX_RANKS in
csrc/topk.cu."""
MIN_SHARED_LEN = 8192
"""Up to this many positions, one block of a cluster works alone. This is the same in csrc/topk.cu."""
ROUND = 4 * NUM_THREADS
"""Positions that a block of NUM_THREADS reads at a time."""
RESERVED_BYTES = 1024
"""Bytes of a multiprocessor's shared memory that CUDA takes for each block."""
MIN_SHARED_CONTEXT = 16384
"""From this context length on, several blocks may share a query."""

_POINTER, _LONG, _INT = np.uint64, np.int64, np.int32
PARAMS = np.dtype(
    [
        ("logits", _POINTER),
        ("req_rows", _POINTER),
        ("query_positions", _POINTER),
        ("num_real", _POINTER),
        ("out", _POINTER),
        ("logits_stride", _LONG),
        ("first_token", _INT),
        ("num_rows", _INT),
        ("max_len", _INT),
        ("top_k", _INT),
        ("cluster_size", _INT),
        ("num_kept", _INT),
    ],
    align=True,
)
"""TopkParams of csrc/topk.cu, field by field."""


def select(
    logits: Tensor,
    req_rows: Tensor,
    query_positions: Tensor,
    num_real: Tensor,
    out: Tensor,
    *,
    first_token: int,
    block_tokens: int,
    num_rows: int,
    max_len: int,
    cluster_size: int | None = None,
    num_threads: int | None = None,
) -> None:
    """Write rows [first_token, first_token + block_tokens) of ``out`` from the first rows of ``logits``.

    ``logits``: float32 [>= block_tokens, >= max_len]; each query's row is read up to its position, and rows
    are 16-byte aligned. The other tensors are those of ``kernels.paged_indexer.paged_index_topk``.
    ``cluster_size``: blocks that share a query, and ``num_threads``: threads of a block, for tests; chosen by
    the shapes if None.
    """
    device = logits.device
    if cluster_size is None:
        cluster_size = choose_cluster_size(block_tokens, max_len, _resident_clusters(device))
    if num_threads is None:
        has_many_queries = cluster_size == 1 and block_tokens > num_multiprocessors(device)
        fits_half = has_many_queries and most_in_block(max_len, 1) <= _most_kept(device, NUM_THREADS_OF_MANY)
        num_threads = NUM_THREADS_OF_MANY if fits_half else NUM_THREADS
    kernel = _kernel(num_threads)
    # Keys that the block keeps in shared memory; the logits of further positions are read again.
    num_kept = min(most_in_block(max_len, cluster_size), _most_kept(device, num_threads))
    parameters = np.zeros((), PARAMS)
    parameters["logits"] = logits.data_ptr()
    parameters["req_rows"] = req_rows.data_ptr()
    parameters["query_positions"] = query_positions.data_ptr()
    parameters["num_real"] = num_real.data_ptr()
    parameters["out"] = out.data_ptr()
    parameters["logits_stride"] = logits.stride(0)
    parameters["first_token"] = first_token
    parameters["num_rows"] = num_rows
    parameters["max_len"] = max_len
    parameters["top_k"] = out.shape[1]
    parameters["cluster_size"] = cluster_size
    parameters["num_kept"] = num_kept
    shared_bytes = 4 * num_kept
    launch(kernel, device, block_tokens * cluster_size, num_threads, parameters, shared_bytes, cluster_size)


def choose_cluster_size(num_tokens: int, max_len: int, resident_clusters: Mapping[int, int]) -> int:
    """Return the number of blocks that share a query: the largest size with which all queries can begin at
    once.

    ``resident_clusters``: how many clusters of each size run at a time; if it is empty, the result is 1.
    ``max_len``: a bound on the rows' lengths, which only the device knows. Where a row is short, one block of
    its cluster does the work and the others end.
    """
    if max_len < MIN_SHARED_CONTEXT:
        return 1
    return max((size for size, num in resident_clusters.items() if num >= num_tokens), default=1)


def most_in_block(max_len: int, cluster_size: int) -> int:
    """Return the most positions that one block handles, a multiple of ROUND: all of a row of up to
    MIN_SHARED_LEN, which it handles alone, or its share of a longer one.
    """
    alone, shared = min(max_len, MIN_SHARED_LEN), -(-max_len // cluster_size)
    return -(-max(alone, shared) // ROUND) * ROUND


def source() -> str:
    """Return the whole translation unit: ``csrc/topk.cu`` with its own headers."""
    return translation_unit(MAIN_SOURCE)


def compile_options(num_threads: int = NUM_THREADS) -> tuple[str, ...]:
    """Return the compiler's options without the architecture."""
    return ("-std=c++17", "-lineinfo", f"-DBLOCK_THREADS={num_threads}")


@functools.cache
def _resident_clusters(device: torch.device) -> dict[int, int]:
    if torch.cuda.get_device_capability(device) < HOPPER:
        return {}
    shared_bytes = 4 * _most_kept(device, NUM_THREADS)
    return {
        size: max_resident_clusters(_kernel(NUM_THREADS), device, NUM_THREADS, shared_bytes, size)
        for size in CLUSTER_SIZES
    }


@functools.cache
def _most_kept(device: torch.device, num_threads: int) -> int:
    """Return how many keys fit into a block's free shared memory, and allow the kernel to use it."""
    kernel, num_blocks = _kernel(num_threads), NUM_THREADS // num_threads
    # Blocks that share a multiprocessor share its memory, of which each block also takes a reserve.
    most_bytes = (max_block_shared_bytes(device) + RESERVED_BYTES) // num_blocks - RESERVED_BYTES
    num_kept = (most_bytes - kernel.shared_size_bytes) // 16 * 4  # keys of 4 bytes, in vectors of 16 bytes
    with torch.cuda.device(device):
        kernel.max_dynamic_shared_size_bytes = 4 * num_kept
    return int(num_kept)


@functools.cache
def _kernel(num_threads: int) -> Any:
    module = cupy_module().RawModule(code=source(), options=compile_options(num_threads), backend="nvrtc")
    return module.get_function("topk")
