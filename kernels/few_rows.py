"""The host side of ``csrc/few_rows.cu``, products of up to 64 tokens with a matrix on Hopper.

``kernels.triton_linear`` calls ``multiply`` for operands that this module ``takes``. Both are in fp8 with
scales, or both in bfloat16. A block has one tile, which is rows of the matrix and one part of its columns,
and their number is such that each multiprocessor has as many bytes; a matrix that is too large for that has
several tiles a multiprocessor. A token's bits depend on neither. The first launch for fp8 and for bfloat16
imports cupy and compiles the code for every number of tokens, so a CUDA graph cannot capture it.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.cuda_launch import (
    HOPPER,
    hopper_module,
    launch,
    max_block_shared_bytes,
    num_multiprocessors,
    tensor_map,
    translation_unit,
)

MAIN_SOURCE: Final = "few_rows.cu"
NUM_TOKENS: Final = (16, 32, 64)
"""Tokens of the kernels; the first that holds all is used."""
BLOCK_BYTES: Final = 128
"""Bytes of a row of either operand in a stage: a block of columns."""
TEAM_THREADS: Final = 128
TEAM_ROWS: Final = 64
"""Rows of the matrix that each team multiplies."""
MOST_TEAMS: Final = 4
COPYING_THREADS: Final = 64
"""Threads of a block beside its teams."""
ROW_MULTIPLE: Final = 16
"""Rows of a tile are a multiple of this, so that 16 of a warp share a scale."""
MOST_STAGES: Final = 12
ROW_SCALES: Final = 4
"""Scales of a stage's rows for which there is room."""
RESULT_BYTES: Final = TEAM_ROWS * 4 + 16
"""Bytes of a token's results of a team in shared memory."""
FIRST_WINDOW_BYTES: Final = 48 << 10
WINDOW_BYTES: Final = 64 << 10
"""Weights that are on their way to a block at a time, before the first has arrived and later, rounded up to
whole stages. With more, tokens come later."""
CLUSTER: Final = 2
"""Blocks that copy tokens for each other."""
ALIGNMENT: Final = 1024
STATIC_BYTES: Final = 1024
"""Most shared memory that a block has beside its stages."""

_POINTER, _INT = np.uint64, np.int32
PARAMS = np.dtype(
    [
        ("values", np.uint64, 16),
        ("x", np.uint64, 16),
        ("x_scales", _POINTER),
        ("scales", _POINTER),
        ("out", _POINTER),
        ("x_scales_stride", _INT),
        ("num_tokens", _INT),
        ("rows", _INT),
        ("num_blocks", _INT),
        ("part_blocks", _INT),
        ("num_parts", _INT),
        ("tile_rows", _INT),
        ("num_stages", _INT),
        ("tiles_across", np.uint32),
        ("first_window", np.int16),
        ("window", np.int16),
    ],
    align=True,
)
"""FewRowsParams of csrc/few_rows.cu, field by field."""


def takes(x: Tensor, values: Tensor) -> bool:
    """Return whether ``multiply`` takes these operands: on Hopper, rows of both aligned to 16 bytes, and a
    matrix of a multiple of 16 rows."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != HOPPER:
        return False
    row_bytes = x.stride(0) * x.itemsize, values.stride(0) * values.itemsize
    return (
        x.dtype == values.dtype
        and x.dtype in (FP8, torch.bfloat16)
        and len(values) % ROW_MULTIPLE == 0
        and x.stride(0) >= x.shape[1]
        and not any(number % 16 for number in (*row_bytes, x.data_ptr(), values.data_ptr()))
    )


def multiply(
    x: Tensor,
    values: Tensor,
    x_scales: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    part_blocks: int,
) -> None:
    """Write ``x @ values.T`` to ``out``, [parts, num_tokens, rows], float32, or bfloat16 if there is one
    part.

    ``x``: [>= num_tokens, columns], of which at most 64 tokens are multiplied; ``values``: [rows, columns],
    contiguous. Both are fp8 with scales, float32 [blocks, >= num_tokens] and [blocks of rows, blocks], or
    both are bfloat16. ``part_blocks``: blocks of BLOCK_BYTES in a part.
    """
    device, (num_parts, num_tokens, rows), columns = x.device, out.shape, x.shape[1]
    of_kernel = next(most for most in NUM_TOKENS if most >= num_tokens)
    sms = (num_multiprocessors(device) - taken_sms()) // CLUSTER * CLUSTER
    size = tile_rows(rows, num_parts, sms)
    tiles = num_tiles(rows, num_parts, size)
    is_one = tiles <= sms
    stages = num_stages(size, of_kernel, is_one, max_block_shared_bytes(device))
    parameters = np.zeros((), PARAMS)
    block = BLOCK_BYTES // x.itemsize
    parameters["values"] = tensor_map(values, rows, (size, block))
    parameters["x"] = tensor_map(x, num_tokens, (of_kernel // CLUSTER, block))
    if x_scales is not None and scales is not None:
        parameters["x_scales"], parameters["x_scales_stride"] = x_scales.data_ptr(), x_scales.stride(0)
        parameters["scales"] = scales.data_ptr()
    parameters["out"] = out.data_ptr()
    parameters["num_tokens"], parameters["rows"] = num_tokens, rows
    parameters["num_blocks"] = -(-columns // block)
    parameters["part_blocks"], parameters["num_parts"] = part_blocks, num_parts
    parameters["tile_rows"], parameters["num_stages"] = size, stages
    parameters["tiles_across"] = tiles // num_parts
    parameters["first_window"] = first = window(size, stages, FIRST_WINDOW_BYTES)
    parameters["window"] = max(first, window(size, stages, WINDOW_BYTES))
    launch(
        _kernel(device, of_kernel, scales is not None),
        device,
        min(tiles, sms),
        -(-size // TEAM_ROWS) * TEAM_THREADS + COPYING_THREADS,
        parameters,
        shared_bytes(size, of_kernel, stages, is_one),
        CLUSTER,
    )


def window(size: int, stages: int, num_bytes: int) -> int:
    """Return how many stages of weights a block has on their way."""
    return min(stages, max(2, -(-num_bytes // (size * BLOCK_BYTES))))


def taken_sms() -> int:
    """Return how many multiprocessors torch keeps free of matrix products (``decode_node.micro_batches``).
    Blocks for those on which copies run would run after all the others."""
    get_carveout = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)
    return get_carveout() or 0


def tile_rows(rows: int, num_parts: int, num_sms: int) -> int:
    """Return the rows of a tile: as few as there can be with one tile for each multiprocessor, or with two,
    three, ... where those are more than a block's teams multiply."""
    for each in itertools.count(1):
        across = max(CLUSTER, each * num_sms // num_parts // CLUSTER * CLUSTER)
        size = _rounded(-(-rows // across), ROW_MULTIPLE)
        if size <= MOST_TEAMS * TEAM_ROWS:
            return size
    raise AssertionError("tiles become small")


def num_tiles(rows: int, num_parts: int, size: int) -> int:
    """Return the number of tiles of ``size`` rows. Of each part all clusters are whole."""
    return _rounded(-(-rows // size), CLUSTER) * num_parts


def stage_bytes(size: int, num_tokens: int) -> int:
    """Return the bytes of a stage with ``size`` rows of the matrix, as the CUDA code has it."""
    data = (size + num_tokens) * BLOCK_BYTES
    return _rounded(data + 4 * (num_tokens + ROW_SCALES), ALIGNMENT)


def num_stages(size: int, num_tokens: int, is_one: bool, most_bytes: int) -> int:
    """Return the stages of a block. ``is_one``: it has only one tile; ``most_bytes``: of shared memory that a
    block may use."""
    left = most_bytes - STATIC_BYTES
    numbers = range(min(MOST_STAGES, left // stage_bytes(size, num_tokens)), 0, -1)
    return next(number for number in numbers if shared_bytes(size, num_tokens, number, is_one) <= left)


def shared_bytes(size: int, num_tokens: int, stages: int, is_one: bool) -> int:
    """Return the bytes of a block's dynamic shared memory: what aligns the stages, the stages, and what the
    last team reads behind them. Results are there, too, or in place of the stages if the tile ``is_one``."""
    ring = stages * stage_bytes(size, num_tokens)
    behind = max(0, _rounded(size, TEAM_ROWS) * BLOCK_BYTES - stage_bytes(size, num_tokens))
    results = -(-size // TEAM_ROWS) * num_tokens * RESULT_BYTES
    if is_one:
        return ALIGNMENT + max(ring + behind, results)
    return ALIGNMENT + ring + max(behind, results)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def source() -> str:
    """Return the whole translation unit: ``csrc/few_rows.cu`` with its own headers."""
    return translation_unit(MAIN_SOURCE)


def compile_options(is_fp8: bool) -> tuple[str, ...]:
    """Return the compiler's options without the architecture."""
    return ("-std=c++17", "-lineinfo", f"-DIS_FP8={int(is_fp8)}", f"-DMOST_STAGES={MOST_STAGES}")


@functools.cache
def _kernel(device: torch.device, num_tokens: int, is_fp8: bool) -> Any:
    with torch.cuda.device(device):
        kernel = _module(device, is_fp8).get_function(f"few_rows_{num_tokens}")
        kernel.max_dynamic_shared_size_bytes = max_block_shared_bytes(device) - STATIC_BYTES
    return kernel


@functools.cache
def _module(device: torch.device, is_fp8: bool) -> Any:
    return hopper_module(source(), compile_options(is_fp8))
