"""The host side of ``csrc/topk.cu``: compiles it at run time and launches it.

Arguments were checked by ``kernels/paged_indexer.py``. cupy is imported, and the code compiled, on the first
launch, so that the first one cannot be captured in a CUDA graph.
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
    translation_unit,
)

MAIN_SOURCE = "topk.cu"
NUM_THREADS = 1024
CLUSTER_SIZES = (2, 4, 8)
"""The last is the most that any GPU with clusters can run together, in csrc/topk.cu MAX_RANKS."""
MIN_SHARED_LEN = 8192
"""Positions up to which one block of a cluster works alone. All of these as in csrc/topk.cu."""
ROUND = 4 * NUM_THREADS
"""Positions that a block looks at in one go."""
MIN_SHARED_CONTEXT = 16384
"""Positions from which on several blocks may share a query."""

_POINTER, _LONG, _INT = np.uint64, np.int64, np.int32
_PARAMS = np.dtype(
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
        ("num_held", _INT),
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
) -> None:
    """Write rows [first_token, first_token + block_tokens) of ``out`` from the first rows of ``logits``.

    ``logits``: float32 [>= block_tokens, >= max_len], of which a query's row is read up to its position;
    rows 16-byte aligned. The others as for ``kernels.paged_indexer.paged_index_topk``. ``cluster_size``:
    blocks that share a query, for tests; chosen by the shapes if None.
    """
    device = logits.device
    if cluster_size is None:
        cluster_size = choose_cluster_size(block_tokens, max_len, _resident_clusters(device))
    parameters = np.zeros((), _PARAMS)
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
    kernel = _kernel()
    num_held = min(most_in_block(max_len, cluster_size), _most_held(device))
    parameters["num_held"] = num_held
    launch(
        kernel, device, block_tokens * cluster_size, NUM_THREADS, parameters, 4 * num_held, cluster_size
    )  # fmt: skip


def choose_cluster_size(num_tokens: int, max_len: int, resident_clusters: Mapping[int, int]) -> int:
    """Blocks that share a query: as many as let all queries begin at once, of a size of
    ``resident_clusters``, which says how many clusters of that size do; 1 where it is empty.

    ``max_len`` bounds the lengths, which only the device knows; where a row is short, one block of its
    cluster does the work and the others leave.
    """
    if max_len < MIN_SHARED_CONTEXT:
        return 1
    return max((size for size, num in resident_clusters.items() if num >= num_tokens), default=1)


def most_in_block(max_len: int, cluster_size: int) -> int:
    """Positions of a block's slice at most, a multiple of ROUND."""
    alone, shared = min(max_len, MIN_SHARED_LEN), -(-max_len // cluster_size)
    return -(-max(alone, shared) // ROUND) * ROUND


def source() -> str:
    """The whole translation unit: ``csrc/topk.cu`` with its own headers."""
    return translation_unit(MAIN_SOURCE)


def compile_options() -> tuple[str, ...]:
    """What the code is compiled with besides the architecture."""
    return ("-std=c++17", "-lineinfo")


@functools.cache
def _resident_clusters(device: torch.device) -> dict[int, int]:
    if torch.cuda.get_device_capability(device) < HOPPER:
        return {}
    shared_bytes = 4 * _most_held(device)
    return {
        size: max_resident_clusters(_kernel(), device, NUM_THREADS, shared_bytes, size)
        for size in CLUSTER_SIZES
    }


@functools.cache
def _most_held(device: torch.device) -> int:
    """Keys that a block's shared memory has room for beside what else is there; the kernel may ask for it."""
    kernel = _kernel()
    num_held = (max_block_shared_bytes(device) - kernel.shared_size_bytes) // 16 * 4
    with torch.cuda.device(device):
        kernel.max_dynamic_shared_size_bytes = 4 * num_held
    return int(num_held)


@functools.cache
def _kernel() -> Any:
    module = cupy_module().RawModule(code=source(), options=compile_options(), backend="nvrtc")
    return module.get_function("topk")
