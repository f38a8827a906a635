"""The host side of ``csrc/int4_experts.cu``, the grouped products of int4 experts on Hopper.

``kernels.triton_int4`` calls ``multiply`` for operands that this module ``takes``. One block for each
multiprocessor takes tiles of tokens and 256 rows of their expert's matrix, one after the other; where there
is too little work for so few blocks, a block takes 64 rows. A row's bits depend on neither. The first launch
of each size of a tile imports cupy and compiles the code, so a CUDA graph cannot capture it.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.cuda_launch import (
    HOPPER,
    hopper_module,
    launch,
    max_block_shared_bytes,
    num_multiprocessors,
    translation_unit,
)
from hisparse_pd.kernels.expert_routing import INT4_TILE_ROWS, Routing, most_tiles
from hisparse_pd.kernels.int4 import UNIT_ROWS, Int4Form, Int4Matrices

MAIN_SOURCE: Final = "int4_experts.cu"
STAGE_COLUMNS: Final = 128
"""Columns of a stage, which a block copies at a time. Rows of tokens are padded to a multiple of these."""
SLICE_BYTES: Final = 128
"""Bytes of a row that are adjacent."""
FP8_ONE: Final = 512.0
"""The number whose packed weight, taken for a byte of fp8, is 1."""
TEAM_THREADS: Final = 128
TEAMS: Final = {16: 4, 32: 4, 64: 4, 128: 2}
"""Teams of a block by the rows of a tile. Each multiplies UNIT_ROWS rows of a matrix. Registers hold the sums
of no more."""
FEW_TEAMS: Final = 1
"""Teams of a block where there is little work."""
FEW_BLOCKS_PER_SM: Final = 2
"""Blocks of a multiprocessor with FEW_TEAMS."""
MOST_STAGES: Final = 12
ALIGNMENT: Final = 1024
RESERVED_BYTES: Final = 1024
"""Shared memory that the GPU takes of each block; of a multiprocessor's, blocks may use the rest."""
STATIC_BYTES: Final = 1024
"""Most shared memory that a block has beside its stages."""
SCALE_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class LaidOut(NamedTuple):
    """Rows of ``Routing`` in the order of experts; those of other ranks' experts are undefined."""

    values: Tensor
    """uint8 [slices, num_rows, SLICE_BYTES]: numbers in bfloat16 or fp8, swizzled."""
    sums: Tensor | None
    """With fp8, float32 [groups, num_rows]: the sums of a group's numbers divided by FP8_ONE."""
    factors: Tensor
    """float32 [num_rows]: of the row's results; with fp8 the scale of its numbers is part of it."""
    targets: Tensor
    """int32 [num_rows]: the row of the result that a row's result becomes."""


_POINTER, _INT = np.uint64, np.int32
PARAMS = np.dtype(
    [
        ("tokens", _POINTER),
        ("token_sums", _POINTER),
        ("factors", _POINTER),
        ("targets", _POINTER),
        ("values", _POINTER),
        ("scales", _POINTER),
        ("zeros", _POINTER),
        ("out", _POINTER),
        ("starts", _POINTER),
        ("tile_starts", _POINTER),
        ("tile_experts", _POINTER),
        ("first_expert", _INT),
        ("num_experts", _INT),
        ("num_matrices", _INT),
        ("rows", _INT),
        ("columns", _INT),
        ("num_rows", _INT),
    ],
    align=True,
)
"""Int4Params of csrc/int4_experts.cu, field by field."""


def takes(x: Tensor, matrices: Int4Matrices) -> bool:
    """Return whether ``multiply`` takes these operands on Hopper: activations in bfloat16, before they are
    laid out, and matrices of a multiple of 4 rows."""
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device) == HOPPER
        and matrices.rows % 4 == 0
    )


def multiply(
    tokens: LaidOut, matrices: Int4Matrices, out: Tensor, routing: Routing, first_expert: int
) -> None:
    """Write the products of rows with the matrices of their experts to ``out``, bfloat16 [num_rows,
    num_matrices * rows], at an address that is a multiple of 4."""
    device, form = out.device, matrices.form
    num_experts, num_matrices = matrices.values.shape[:2]
    num_tiles = most_tiles(len(routing.order), num_experts, routing.tile_rows)
    if not num_tiles:
        return
    parameters = np.zeros((), PARAMS)
    for name, tensor in (
        ("tokens", tokens.values),
        ("token_sums", tokens.sums),
        ("factors", tokens.factors),
        ("targets", tokens.targets),
        ("values", matrices.values),
        ("scales", matrices.scales),
        ("zeros", matrices.zeros),
        ("out", out),
        ("starts", routing.starts),
        ("tile_starts", routing.tile_starts),
        ("tile_experts", routing.tile_experts),
    ):
        parameters[name] = 0 if tensor is None else tensor.data_ptr()
    parameters["first_expert"] = first_expert
    parameters["num_experts"] = num_experts
    parameters["num_matrices"] = num_matrices
    parameters["rows"], parameters["columns"] = matrices.rows, matrices.columns
    parameters["num_rows"] = len(routing.order)
    sms, num_teams = num_multiprocessors(device), TEAMS[routing.tile_rows]
    num_pieces = num_tiles * num_matrices * -(-matrices.rows // (num_teams * UNIT_ROWS))
    if routing.tile_rows == INT4_TILE_ROWS[0] and num_pieces < sms // 2:
        num_teams = FEW_TEAMS
        num_pieces = num_tiles * num_matrices * -(-matrices.rows // UNIT_ROWS)
    num_blocks = min(num_pieces, sms * _blocks_per_sm(num_teams))
    is_rounded = tokens.sums is not None
    vector = 16 if matrices.rows % 16 == 0 else 4
    kernel = _kernel(device, routing.tile_rows, num_teams, form, is_rounded, vector)
    shared = shared_bytes(routing.tile_rows, num_teams, form, is_rounded, max_block_shared_bytes(device))
    launch(kernel, device, num_blocks, (num_teams + 1) * TEAM_THREADS, parameters, shared)


def _blocks_per_sm(num_teams: int) -> int:
    return FEW_BLOCKS_PER_SM if num_teams == FEW_TEAMS else 1


def stage_bytes(tile_rows: int, num_teams: int, form: Int4Form, is_rounded: bool) -> int:
    """Return the bytes of a stage in shared memory, as the CUDA code has it."""
    token_bytes = STAGE_COLUMNS * (1 if is_rounded else 2)
    data = tile_rows * token_bytes + num_teams * UNIT_ROWS * STAGE_COLUMNS // 2
    rows = num_teams * UNIT_ROWS
    of_group = rows * form.scale_dtype.itemsize + (rows if form.has_zeros else 16)
    of_group += 4 * (tile_rows if is_rounded else 4)
    num_bytes = data + STAGE_COLUMNS // form.group_size * of_group + 8 * tile_rows + 12
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def num_stages(tile_rows: int, num_teams: int, form: Int4Form, is_rounded: bool, most_bytes: int) -> int:
    """Return the stages of a block. ``most_bytes``: of shared memory that a block may use."""
    left = (most_bytes + RESERVED_BYTES) // _blocks_per_sm(num_teams) - RESERVED_BYTES
    left -= ALIGNMENT + STATIC_BYTES
    return min(MOST_STAGES, left // stage_bytes(tile_rows, num_teams, form, is_rounded))


def shared_bytes(tile_rows: int, num_teams: int, form: Int4Form, is_rounded: bool, most_bytes: int) -> int:
    """Return the bytes of a block's dynamic shared memory: the stages, and what aligns them."""
    stages = num_stages(tile_rows, num_teams, form, is_rounded, most_bytes)
    return ALIGNMENT + stages * stage_bytes(tile_rows, num_teams, form, is_rounded)


def source() -> str:
    """Return the whole translation unit: ``csrc/int4_experts.cu`` with its own headers."""
    return translation_unit(MAIN_SOURCE)


def compile_options(
    tile_rows: int, num_teams: int, form: Int4Form, is_rounded: bool, vector: int, most_bytes: int
) -> tuple[str, ...]:
    """Return the compiler's options without the architecture. ``vector``: bytes of scales and zeros that a
    thread copies at a time, 16 or 4."""
    stages = num_stages(tile_rows, num_teams, form, is_rounded, most_bytes)
    numbers = {
        "TILE_ROWS": tile_rows,
        "TEAMS": num_teams,
        "GROUP": form.group_size,
        "SCALE_KIND": SCALE_KINDS[form.scale_dtype],
        "SCALE_BYTES": form.scale_dtype.itemsize,
        "HAS_ZEROS": int(form.has_zeros),
        "IS_ROUNDED": int(is_rounded),
        "VECTOR": vector,
        "STAGES": stages,
        "STAGE_BYTES": stage_bytes(tile_rows, num_teams, form, is_rounded),
        "BLOCKS_PER_SM": _blocks_per_sm(num_teams),
    }
    return ("-std=c++17", "-lineinfo", *(f"-D{name}={number}" for name, number in numbers.items()))


@functools.cache
def _kernel(
    device: torch.device, tile_rows: int, num_teams: int, form: Int4Form, is_rounded: bool, vector: int
) -> Any:
    most_bytes = max_block_shared_bytes(device)
    variant = (tile_rows, num_teams, form, is_rounded)
    with torch.cuda.device(device):
        module = hopper_module(source(), compile_options(*variant, vector, most_bytes))
        kernel = module.get_function("int4_experts")
        kernel.max_dynamic_shared_size_bytes = shared_bytes(*variant, most_bytes)
    return kernel
