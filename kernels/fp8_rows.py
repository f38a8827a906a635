"""Activations in fp8: each row in blocks of 128 columns, each block with its own float32 scale.

The model's layers round with these functions before a product with an fp8 matrix (``kernels.block_linear``,
``kernels.experts``); where they pass None in place of a ``Rounding``, rows stay in the model's dtype. A row's
numbers depend on that row alone. Scales are [blocks across, rows], as products read them: a block's scales of
all rows are adjacent. With ``ue8m0`` they are rounded up to powers of two, as in the training of checkpoints
with this ``scale_fmt``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK, DTYPE, SMALLEST_PEAK
from hisparse_pd.kernels.fp8 import FP8_MAX, next_power_of_two
from hisparse_pd.kernels.row_math import silu

FEW_ROWS: Final = 64
"""Up to this many rows on a GPU are multiplied by special kernels, with the same bits as many rows."""
ROW_MULTIPLE: Final = 16
"""Multiple to which more rows are padded, because ``scaled_mm`` requires it."""


@dataclass(frozen=True)
class Rounding:
    """How rows are rounded for a product with an fp8 matrix. ``ue8m0``: scales are powers of two."""

    ue8m0: bool = False


class Rounded(NamedTuple):
    """Rows in fp8, which may be padded with rows of zeros."""

    values: Tensor
    """float8_e4m3fn [num_rows, columns]"""
    scales: Tensor
    """float32 [blocks across, num_rows]"""

    @classmethod
    def empty(cls, num_rows: int, columns: int, device: torch.device) -> Rounded:
        """Return memory for rows that a kernel rounds."""
        return cls(
            torch.empty((num_rows, columns), dtype=DTYPE, device=device),
            torch.empty((-(-columns // BLOCK), num_rows), dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class Activations:
    """Input of linear layers, [num_tokens, columns]: in the model's dtype, and rounded for matrices in fp8.

    ``dense`` may have no columns if no layer takes it.
    """

    dense: Tensor
    rounded: Rounded | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.dense)


def are_few(num_rows: int, device: torch.device) -> bool:
    """Return whether so many rows are multiplied by the special kernels for few rows."""
    return device.type == "cuda" and num_rows <= FEW_ROWS


def row_multiple(num_rows: int, device: torch.device) -> int:
    """Return the multiple to which rounded rows are padded."""
    return 1 if are_few(num_rows, device) else ROW_MULTIPLE


def padded(num_rows: int, multiple: int) -> int:
    """Return the number of rows with padding."""
    return -(-num_rows // multiple) * multiple


def round_rows(x: Tensor, rounding: Rounding) -> Rounded:
    """Round ``x`` [num_tokens, columns] for a product, by ``quantize_rows``."""
    return quantize_rows(x, row_multiple(len(x), x.device), ue8m0=rounding.ue8m0)


def quantize_rows(x: Tensor, row_multiple: int = 1, *, ue8m0: bool = False) -> Rounded:
    """Round ``x`` to fp8, in one launch on a GPU. A block's largest magnitude becomes 448, the largest number
    of fp8, or with ``ue8m0`` a number above 224, because its scale is up to twice as large as needed.

    ``x``: [rows, columns] of any float dtype, each row contiguous, on any device. The number of rows is
    rounded up to ``row_multiple`` with rows of zeros.
    """
    num_rows = padded(len(x), row_multiple)
    if x.device.type == "cuda":
        from hisparse_pd.kernels.triton_fp8 import quantize_rows_triton

        rounded = Rounded.empty(num_rows, x.shape[1], x.device)
        quantize_rows_triton(x, *rounded, ue8m0=ue8m0)
        return rounded
    blocks = -(-x.shape[1] // BLOCK)
    whole = x.new_zeros((num_rows, blocks * BLOCK), dtype=torch.float32)
    whole[: len(x), : x.shape[1]] = x
    peaks = whole.view(num_rows, blocks, BLOCK).abs().amax(dim=2)
    scales = peaks.clamp(min=SMALLEST_PEAK) / FP8_MAX
    if ue8m0:
        scales = next_power_of_two(scales)
    values = (whole.view(num_rows, blocks, BLOCK) / scales[:, :, None]).view_as(whole)[:, : x.shape[1]]
    return Rounded(values.to(DTYPE), scales.t().contiguous())


def quantize_gated(gate_up: Tensor, row_multiple: int = 1, *, ue8m0: bool = False) -> Rounded:
    """Return ``quantize_rows`` of ``silu(gate) * up`` in float32, in one launch on a GPU.

    ``gate_up``: [parts, rows, 2 * columns], the gate's columns first; each row is contiguous. Parts are what
    a product leaves to be added up here, in order (``kernels.block_linear``); on a CPU there is one.
    """
    if gate_up.device.type == "cuda":
        from hisparse_pd.kernels.triton_fp8 import quantize_gated_triton

        num_rows = padded(gate_up.shape[1], row_multiple)
        rounded = Rounded.empty(num_rows, gate_up.shape[2] // 2, gate_up.device)
        quantize_gated_triton(gate_up, *rounded, ue8m0=ue8m0)
        return rounded
    gate, up = gate_up[0].float().chunk(2, dim=-1)
    return quantize_rows(silu(gate) * up, row_multiple, ue8m0=ue8m0)


def gated_rows(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``silu(gate) * up`` in float32, rounded to ``dtype``, [rows, columns], in one launch on a GPU.

    ``gate_up``: as in ``quantize_gated``.
    """
    if gate_up.device.type == "cuda":
        from hisparse_pd.kernels.triton_fp8 import gated_rows_triton

        return gated_rows_triton(gate_up, dtype)
    gate, up = gate_up[0].float().chunk(2, dim=-1)
    return (silu(gate) * up).to(dtype)


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """Return ``values``, fp8 [rows, columns], times ``scales``, [blocks across, rows], in float32."""
    spread = scales.t().repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * spread
