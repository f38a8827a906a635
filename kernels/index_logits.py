"""The common host side of ``csrc/paged_logits.cu`` and ``csrc/prompt_logits.cu``: which arguments these
kernels take, their struct of parameters, and how they are compiled (``csrc/index_logits.cuh``).

Every logit has the bits of ``kernels.triton_indexer``. The first launch of a kernel imports cupy and compiles
its code, so a CUDA graph cannot capture it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.cuda_launch import HOPPER, hopper_module, translation_unit
from hisparse_pd.kernels.kv_format import FP8_E4M3

NUM_HEADS: Final = (32, 64)
HEAD_DIM: Final = 128
"""The sizes of queries that the kernels take: GLM-5's and DeepSeek-V3.2's."""
TILE: Final = 64
"""Positions of a tile. Pages of the pool must be whole tiles."""
TILE_BYTES: Final = TILE * (HEAD_DIM + 4)
ALIGNMENT: Final = 1024
"""Multiple of bytes at which queries must lie in shared memory."""

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
"""LogitsParams of csrc/index_logits.cuh, field by field."""


def takes(q_index: Tensor, index_pool: Tensor, page_size: int, key_format: str) -> bool:
    """Return whether the kernels take these arguments of ``kernels.paged_indexer.paged_index_topk``: bfloat16
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


def parameters_of(
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
    top_k: int,
    max_len: int,
) -> npt.NDArray[Any]:
    """Return the struct for a launch with these arguments of ``kernels.triton_indexer.write_logits``."""
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
    return parameters


def compile_options(num_heads: int, page_size: int, stages: int) -> tuple[str, ...]:
    """Return the compiler's options without the architecture, and without those of one kernel alone."""
    numbers = {"NUM_HEADS": num_heads, "PAGE_SIZE": page_size, "STAGES": stages}
    return ("-std=c++17", "-lineinfo", *(f"-D{name}={number}" for name, number in numbers.items()))


def compiled(name: str, options: tuple[str, ...], device: torch.device, shared_bytes: int) -> Any:
    """Return the kernel ``name`` of ``csrc/name.cu``, whose blocks may have so much dynamic shared memory."""
    with torch.cuda.device(device):
        kernel = hopper_module(translation_unit(f"{name}.cu"), options).get_function(name)
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel
