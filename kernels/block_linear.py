"""Products of activations with a matrix in fp8 (``kernels.block_fp8``), both as eight bits.

Activations are rounded to fp8 too, each row in blocks of 128 columns with a scale of their own, as the
reference implementations of DeepSeek-V3 and its successors do. Products of blocks are float32, and are scaled
before they are added up. On a GPU that is torch's ``scaled_mm``, behind one launch of ours that rounds.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from kernels.block_fp8 import BLOCK, dequantize
from kernels.cuda_launch import HOPPER
from kernels.fp8_rows import dequantize_rows, quantize_gated, quantize_rows
from kernels.row_math import linear

ROW_MULTIPLE: Final = 16
"""Of activations and of matrices: what ``scaled_mm`` takes. Activations are padded to it."""
COLUMN_BLOCKS: Final = 4
"""A matrix has a multiple of so many blocks in a row: ``scaled_mm`` wants as many scales."""


def takes_device(device: torch.device) -> bool:
    """Whether ``block_linear`` runs there: torch knows these scales on Hopper alone."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) == HOPPER


def takes_matrix(rows: int, columns: int) -> bool:
    """Whether ``block_linear`` takes a matrix of this shape on a GPU."""
    return rows % ROW_MULTIPLE == 0 and columns % (COLUMN_BLOCKS * BLOCK) == 0


def block_linear(x: Tensor, values: Tensor, scales: Tensor, *, ue8m0: bool = False) -> Tensor:
    """``x @ (values * scales).T``, with ``x`` rounded in blocks. Never waits for the device.

    ``x``: [num_tokens, columns], rows contiguous, any dtype on a CPU and bfloat16 on a GPU. ``values``:
    float8_e4m3fn [rows, columns], contiguous; ``scales``: float32, of its blocks. ``ue8m0``: the scales of
    ``x`` are powers of two (``kernels.fp8_rows``). Returns [num_tokens, rows] of ``x``'s dtype. A result's
    row is a function of its row of ``x``, but for the order of float32 sums, which the number of rows may
    choose.
    """
    return _product(quantize_rows(x, ROW_MULTIPLE, ue8m0=ue8m0), len(x), x.dtype, values, scales)


def gated_block_linear(gate_up: Tensor, values: Tensor, scales: Tensor, *, ue8m0: bool = False) -> Tensor:
    """``block_linear`` of ``silu(gate) * up``, which is float32 until it is rounded.

    ``gate_up``: [num_tokens, 2 * columns], rows contiguous.
    """
    rounded = quantize_gated(gate_up, ROW_MULTIPLE, ue8m0=ue8m0)
    return _product(rounded, len(gate_up), gate_up.dtype, values, scales)


def _product(
    rounded: tuple[Tensor, Tensor], num_tokens: int, dtype: torch.dtype, values: Tensor, scales: Tensor
) -> Tensor:
    x, scales_of_rows = rounded
    if num_tokens == 0:
        return x.new_empty((0, len(values)), dtype=dtype)
    if x.device.type == "cpu":
        matrix = dequantize(values, scales, torch.float32)
        return linear(dequantize_rows(x, scales_of_rows), matrix)[:num_tokens].to(dtype)
    result: Tensor = scaled_mm(
        x,
        values.t(),
        scales_of_rows.t(),
        ScalingType.BlockWise1x128,
        scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return result[:num_tokens]
