"""Products of activations with a matrix: both in fp8 (``kernels.block_fp8``), or both in the model's dtype.

For fp8, activations are rounded too, each row in blocks of 128 columns with their own scales, as the
reference implementations of DeepSeek-V3 and its successors do. Products of blocks are float32, and are scaled
before they are added up. On a GPU ``kernels.triton_linear`` cuts the columns into parts by the matrix's shape
alone (split-K), so that a row has the same bits among any number of rows. Where that makes one part, many
rows go to torch's ``scaled_mm`` or cuBLAS instead: they fill a GPU without parts, and add up in the kernel's
order, so that the bits stay the same.

The model's layers call ``block_product`` or ``dense_product``, whose parts the next kernel adds up
(``add_norm``, ``finish_latents``, ...), which saves a launch, and its MLPs ``gated``. ``kernels.experts``
calls ``block_linear``.
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
"""The number of a matrix's blocks across must be a multiple of this, which ``scaled_mm`` requires."""


def takes_device(device: torch.device) -> bool:
    """Return whether ``block_product`` runs on ``device``: torch supports these scales on Hopper only."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) == HOPPER


def takes_matrix(rows: int, columns: int) -> bool:
    """Return whether ``block_product`` takes a matrix [rows, columns] on a GPU."""
    return rows % ROW_MULTIPLE == 0 and columns % (COLUMN_BLOCKS * BLOCK) == 0


def block_product(x: Rounded, num_tokens: int, dtype: torch.dtype, values: Tensor, scales: Tensor) -> Tensor:
    """Return ``x @ (values * scales).T`` in parts, [parts, num_tokens, rows], which the caller adds in order.

    ``x``: at least ``num_tokens`` rounded rows; ``values``: float8_e4m3fn [rows, columns], contiguous;
    ``scales``: float32 [blocks down, blocks across]; all on one device. A single part has ``dtype``, which
    must be bfloat16 on a GPU; several parts are float32, and the caller rounds their sum to ``dtype``. This
    never waits for the device. Each row of the result depends only on its row of ``x``.
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
    """Return ``x @ matrix.T`` in parts, [parts, num_tokens, rows], as ``block_product`` does.

    ``x``: [num_tokens, columns], each row contiguous; ``matrix``: [rows, columns], contiguous, of the same
    dtype and on the same device.
    """
    if matrix.dtype == x.dtype == torch.bfloat16 and x.is_cuda and len(x):
        from hisparse_pd.kernels.triton_linear import linear_parts, num_parts

        if are_few(len(x), x.device) or num_parts(matrix) > 1:
            return linear_parts(x, len(x), matrix)
    return linear(x, matrix)[None]


def block_linear(x: Tensor, values: Tensor, scales: Tensor, *, ue8m0: bool = False) -> Tensor:
    """Return the ``block_product`` of ``x`` with its parts added up, [num_tokens, rows] of ``x``'s dtype.

    ``x``: [num_tokens, columns], each row contiguous, any float dtype on a CPU, bfloat16 on a GPU. ``ue8m0``:
    scales of ``x`` are powers of two.
    """
    product = block_product(round_rows(x, Rounding(ue8m0)), len(x), x.dtype, values, scales)
    return add_parts(product).to(x.dtype)


def gated(gate_up: Tensor, dtype: torch.dtype, rounding: Rounding | None) -> Activations:
    """Return ``silu(gate) * up``, the operand of the down projection: in ``dtype``, or with ``rounding`` in
    fp8 only. Either is rounded from float32 once. ``gate_up``: [parts, num_tokens, 2 * columns], gates first.
    """
    num_tokens = gate_up.shape[1]
    if rounding is None:
        return Activations(gated_rows(gate_up, dtype))
    multiple = row_multiple(num_tokens, gate_up.device)
    rounded = quantize_gated(gate_up, multiple, ue8m0=rounding.ue8m0)
    # No dense columns: only the fp8 down projection reads these.
    return Activations(gate_up.new_empty((num_tokens, 0), dtype=dtype), rounded)
