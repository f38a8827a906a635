"""Weights in fp8 with a float32 scale for each block, as in the checkpoints of DeepSeek-V3.2 and GLM-5.

A matrix ``name`` of such a checkpoint is float8_e4m3fn [rows, columns]. Beside it ``name_scale_inv`` holds
the factors of its elements, one number for each block of 128 x 128. Blocks at the lower and the right edge
may be smaller. Activations that are multiplied with such a matrix are rounded by ``fp8_rows.py``, in blocks
of one row and 128 columns.

Products on CPUs and ``weight_reader.py`` call ``dequantize``; ``tools.checkpoints.quantize_fp8`` calls
``quantize``. The kernels that round activations take BLOCK and SMALLEST_PEAK from here.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hisparse_pd.kernels.fp8 import FP8_MAX

BLOCK: Final = 128
DTYPE: Final = torch.float8_e4m3fn
SMALLEST_PEAK: Final = 1e-12
"""Lower bound of a block's largest magnitude, so that a block of zeros has a finite scale above 0."""


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the numbers of a matrix's blocks, down and across."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` times their scales, rounded once to ``dtype``.

    ``values``: float8_e4m3fn [..., rows, columns]; ``scales``: [..., blocks down, blocks across]. Raises
    ValueError when the shapes do not match.
    """
    rows, columns = values.shape[-2:]
    expected = (*values.shape[:-2], *scales_shape(rows, columns))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales of {list(values.shape)}: expected {list(expected)}, got {list(scales.shape)}"
        )
    spread = scales.float().repeat_interleave(BLOCK, -2)[..., :rows, :]
    return (values.float() * spread.repeat_interleave(BLOCK, -1)[..., :columns]).to(dtype)


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp8 values of ``matrix`` [rows, columns] and their scales. A block's peak becomes 448."""
    rows, columns = matrix.shape
    down, across = scales_shape(rows, columns)
    padded = matrix.new_zeros((down * BLOCK, across * BLOCK), dtype=torch.float32)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=SMALLEST_PEAK) / FP8_MAX
    values = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return values.to(DTYPE), scales
