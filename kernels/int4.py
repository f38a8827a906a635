"""Weights in four bits with a scale for each group of a row, in the one layout that kernels read.

A weight is ``(q - zero) * scale``, where ``q`` is 0 to 15. Scale and zero are those of a row and of a group
of 32, 64 or 128 adjacent columns; in matrices without zeros every zero is MIDDLE. The definition computes in
float32, which is exact, and rounds the weight once to the model's dtype.

``pack`` brings a matrix into units of 64 rows and 64 columns (32 with groups of 32); missing rows are zeros.
A unit is int32 [128, columns / 16]. A row of it belongs to one of 128 threads, which loads it at once, 16
bytes, and each number of it has eight weights of one step of 16 columns. For the thread ``32 * warp + 4 * i +
j`` and step ``s`` these are of the matrix' rows ``16 * warp + i`` and ``+ 8`` and of the columns ``16 * s + 2
* j``, ``+ 1``, ``+ 8`` and ``+ 9``: the thread's part of the left operand of Hopper's tensor cores (wgmma,
m64k16). From the lowest bits on they are, as (row, column), (0, 0), (8, 0), (0, 8), (8, 8), (0, 1), (8, 1),
(0, 9), (8, 9). The first and the fifth are thus 16 bits apart, and one operation makes two neighbours of
them.

The loader fills ``Int4Matrices``; ``kernels.experts`` multiplies by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.block_fp8 import SMALLEST_PEAK
from hisparse_pd.kernels.fp8 import FP8_MAX

GROUP_SIZES: Final = (32, 64, 128)
MIDDLE: Final = 8
"""The zero of matrices that have no zeros of their own."""
UNIT_ROWS: Final = 64
UNIT_THREADS: Final = 128
STEP: Final = 16
"""Columns of one step of the tensor cores."""
SCALE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Int4Form:
    """The form that all int4 matrices of a layer have, apart from their sizes."""

    group_size: int
    """One of GROUP_SIZES."""
    has_zeros: bool
    scale_dtype: torch.dtype = torch.bfloat16
    """One of SCALE_DTYPES."""
    rounds_tokens: bool = False
    """Whether activations are rounded to fp8, with one scale for each token (``round_tokens``)."""


@dataclass(frozen=True)
class Int4Matrices:
    """One or more int4 matrices of the same shape for each of several consecutive experts.

    ``values``: int32 [num_experts, num_matrices, units down, units across, 128, unit's columns / 16].
    ``scales``: ``form.scale_dtype`` [num_experts, num_matrices, groups, rows]; ``zeros``: uint8 of that
    shape, or None. ``rows``, ``columns``: sizes of a matrix.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    rows: int
    columns: int
    form: Int4Form

    @classmethod
    def empty(
        cls,
        num_experts: int,
        num_matrices: int,
        rows: int,
        columns: int,
        form: Int4Form,
        device: torch.device,
    ) -> Int4Matrices:
        """Return memory for the matrices. ``columns``: a multiple of ``form.group_size``."""
        num = (num_experts, num_matrices)
        values = torch.empty((*num, *packed_shape(rows, columns, form)), dtype=torch.int32, device=device)
        grouped = (*num, columns // form.group_size, rows)
        scales = torch.empty(grouped, dtype=form.scale_dtype, device=device)
        zeros = torch.empty(grouped, dtype=torch.uint8, device=device) if form.has_zeros else None
        return cls(values, scales, zeros, rows, columns, form)

    @property
    def takes_rounded(self) -> bool:
        """Whether activations are rounded to fp8 where the device does so (``expert_routing.rounds``)."""
        return self.form.rounds_tokens

    @property
    def num_outputs(self) -> int:
        """The rows of all of an expert's matrices."""
        return self.values.shape[1] * self.rows

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the matrices of one expert in ``dtype``, [num_matrices, rows, columns]."""
        zeros = [None] * self.values.shape[1] if self.zeros is None else self.zeros[expert]
        parts = zip(self.values[expert], self.scales[expert], zeros, strict=True)
        return torch.stack(
            [dequantize(unpack(values)[: self.rows], scales, of, dtype) for values, scales, of in parts]
        )


def unit_columns(group_size: int) -> int:
    """Return the columns of a unit."""
    return min(64, group_size)


def packed_shape(rows: int, columns: int, form: Int4Form) -> tuple[int, int, int, int]:
    """Return the shape of one matrix's values."""
    across = unit_columns(form.group_size)
    return -(-rows // UNIT_ROWS), columns // across, UNIT_THREADS, across // STEP


def pack(values: Tensor, group_size: int) -> Tensor:
    """Return a matrix of numbers from 0 to 15, uint8 [rows, columns], in the layout of kernels."""
    rows, columns = values.shape
    down, across, _, steps = packed_shape(rows, columns, Int4Form(group_size, has_zeros=False))
    whole = pad(values, (0, 0, 0, down * UNIT_ROWS - rows))
    parts = whole.view(down, 4, 2, 8, across, steps, 2, 4, 2)
    in_order = parts.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(down, across, UNIT_THREADS, steps, 4, 2)
    return (in_order[..., 0] | in_order[..., 1] << 4).view(torch.int32)[..., 0]


def unpack(values: Tensor) -> Tensor:
    """Undo ``pack``: return uint8 [rows with padding, columns]."""
    down, across, _, steps = values.shape
    packed = values[..., None].view(torch.uint8)
    parts = torch.stack((packed & 15, packed >> 4), dim=-1).view(down, across, 4, 8, 4, steps, 2, 2, 2)
    in_order = parts.permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    return in_order.reshape(down * UNIT_ROWS, across * steps * STEP)


def dequantize(values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weights in ``dtype``: ``(values - zeros) * scales`` in float32, rounded once.

    ``values``: [rows, columns]; ``scales`` and ``zeros``: [groups, rows]; without zeros they are MIDDLE.
    """
    rows, columns = values.shape
    groups = values.view(rows, len(scales), columns // len(scales)).float()
    centered = groups - (MIDDLE if zeros is None else zeros.t()[:, :, None].float())
    return (centered * scales.t()[:, :, None].float()).view(rows, columns).to(dtype)


def quantize(matrix: Tensor, form: Int4Form) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the nearest numbers for ``matrix`` [rows, columns]: values uint8 [rows, columns], scales and
    zeros [groups, rows] (None without zeros). A group's largest magnitude, or with zeros its range, decides.
    """
    rows, columns = matrix.shape
    groups = matrix.float().view(rows, -1, form.group_size)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    steps = (high - low) / 15 if form.has_zeros else torch.maximum(high / 7, -low / 8)
    scales = steps.clamp(min=SMALLEST_PEAK if form.scale_dtype != torch.float16 else 2**-20)
    scales = scales.to(form.scale_dtype).float()
    zeros = (-low / scales).round().clamp(0, 15) if form.has_zeros else torch.full_like(scales, MIDDLE)
    values = ((groups / scales[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    of_groups = zeros.t().to(torch.uint8).contiguous() if form.has_zeros else None
    return (
        values.view(rows, columns).to(torch.uint8),
        scales.t().to(form.scale_dtype).contiguous(),
        of_groups,
    )


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of ``x`` [rows, columns] rounded to fp8, but in the dtype of ``x``, and the rows'
    scales, float32 [rows]. A row's largest magnitude becomes 448; its numbers depend on that row alone."""
    scales = x.float().abs().amax(dim=1).clamp(min=SMALLEST_PEAK) / FP8_MAX
    return (x.float() / scales[:, None]).to(FP8).to(x.dtype), scales
