"""Products of activations with a matrix: both in fp8 (``kernels.block_fp8``), or both in the model's dtype.

Activations are rounded to fp8 too, each row in blocks of 128 columns with a scale of their own, as the
reference implementations of DeepSeek-V3 and its successors do. Products of blocks are float32, and are scaled
before they are added up. On a GPU that is ``kernels.triton_linear``, which cuts the columns into parts by the
matrix' shape alone, so that a row has the same bits among any number of rows. Where the columns are one part,
many rows are torch's ``scaled_mm`` or cuBLAS: both fill a GPU without parts there, and add up in that order.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from hisparse_pd.kernels.block_fp8 import BLOCK, dequantize
from hisparse_pd.kernels.cuda_launch import HOPPER
from hisparse_pd.kernels.fp8_rows import (
    ROW_MULTIPLE,
    Activations,
    Rounded,
    Rounding,
    are_few,
    dequantize_rows,
    gated_rows,
    quantize_gated,
    round_rows,
    row_multiple,
)
from hisparse_pd.kernels.norms import add_parts
from hisparse_pd.kernels.row_math import linear

COLUMN_BLOCKS: Final = 4
"""A matrix has a multiple of so many blocks in a row: ``scaled_mm`` wants as many scales."""


def takes_device(device: torch.device) -> bool:
    """Whether ``block_product`` runs there: torch knows these scales on Hopper alone."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) == HOPPER


def takes_matrix(rows: int, columns: int) -> bool:
    """Whether ``block_product`` takes a matrix of this shape on a GPU."""
    return rows % ROW_MULTIPLE == 0 and columns % (COLUMN_BLOCKS * BLOCK) == 0


def block_product(x: Rounded, num_tokens: int, dtype: torch.dtype, values: Tensor, scales: Tensor) -> Tensor:
    """``x @ (values * scales).T`` in parts, [parts, num_tokens, rows], to be added up in their order.

    ``values``: float8_e4m3fn [rows, columns], contiguous; ``scales``: float32, of its blocks. One part is of
    ``dtype``; the sum of several, which are float32, is to be rounded to it. Never waits for the device. A
    result's row is a function of its row of ``x``.
    """
    if num_tokens == 0:
        return scales.new_empty((1, 0, len(values)), dtype=dtype)
    if values.device.type == "cpu":
        matrix = dequantize(values, scales, torch.float32)
        return linear(dequantize_rows(x.values, x.scales), matrix)[None, :num_tokens].to(dtype)
    from hisparse_pd.kernels.triton_linear import linear_parts, num_parts

    if are_few(num_tokens, values.device) or num_parts(values) > 1:
        return linear_parts(x.values, num_tokens, values, x.scales, scales)
    result: Tensor = scaled_mm(
        x.values,
        values.t(),
        x.scales.t(),
        ScalingType.BlockWise1x128,
        scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return result[None, :num_tokens]


def dense_product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix.T`` in parts, [parts, num_tokens, rows], as ``block_product`` has them, of one dtype.

    ``x``: [num_tokens, columns], rows contiguous; ``matrix``: [rows, columns], rows side by side.
    """
    if matrix.dtype == x.dtype == torch.bfloat16 and x.is_cuda and len(x):
        from hisparse_pd.kernels.triton_linear import linear_parts, num_parts

        if are_few(len(x), x.device) or num_parts(matrix) > 1:
            return linear_parts(x, len(x), matrix)
    return linear(x, matrix)[None]


def block_linear(x: Tensor, values: Tensor, scales: Tensor, *, ue8m0: bool = False) -> Tensor:
    """``block_product`` of ``x``, with its parts added up: [num_tokens, rows] of ``x``'s dtype.

    ``x``: [num_tokens, columns], rows contiguous, any dtype on a CPU and bfloat16 on a GPU.
    """
    product = block_product(round_rows(x, Rounding(ue8m0)), len(x), x.dtype, values, scales)
    return add_parts(product).to(x.dtype)


def gated(gate_up: Tensor, dtype: torch.dtype, rounding: Rounding | None) -> Activations:
    """``silu(gate) * up`` for a product, float32 until it is of ``dtype`` or, with ``rounding``, in fp8 and
    nothing else; ``gate_up``: [parts, num_tokens, 2 * columns]."""
    num_tokens = gate_up.shape[1]
    if rounding is None:
        return Activations(gated_rows(gate_up, dtype))
    multiple = row_multiple(num_tokens, gate_up.device)
    rounded = Rounded(*quantize_gated(gate_up, multiple, ue8m0=rounding.ue8m0))
    return Activations(gate_up.new_empty((num_tokens, 0), dtype=dtype), rounded)
