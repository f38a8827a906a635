"""The stored tensors of a matrix in four bits, and what becomes of them in the model's memory.

The loader plans with ``Int4Source`` how to fill ``kernels.int4.Int4Matrices``, or a matrix in the model's
dtype where a linear layer other than routed experts is in four bits. Each int32 of a checkpoint has eight
numbers:

- compressed-tensors: ``weight_packed`` [rows, columns / 8], columns in order; ``weight_scale`` [rows,
  groups]; ``weight_zero_point`` [rows / 8, groups], rows in order.
- awq: ``qweight`` [columns, rows / 8], rows in AWQ_ORDER; ``scales`` [groups, rows]; ``qzeros`` [groups,
  rows / 8], in the same order.
- gptq: ``qweight`` [columns / 8, rows], columns in order; ``scales`` [groups, rows]; ``qzeros`` [groups,
  rows / 8], rows in order, less 1 in its first format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.int4_config import AWQ, COMPRESSED_TENSORS, SUFFIXES, Int4Config
from hisparse_pd.core.model.weight_reader import Placement, StoredTensor
from hisparse_pd.kernels.int4 import SCALE_DTYPES, Int4Matrices, dequantize, pack

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The rows, from the first of eight on, whose numbers an int32 of awq has from the lowest bits on."""
IN_ORDER: Final = tuple(range(8))

Find = Callable[[str, tuple[int, ...]], StoredTensor]
"""A function that returns the stored tensor of a name, which must have that shape."""


@dataclass(frozen=True)
class Int4Source:
    """The stored tensors of one matrix, [rows, columns]."""

    config: Int4Config
    values: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None

    @classmethod
    def find(cls, config: Int4Config, module: str, rows: int, columns: int, find: Find) -> Int4Source:
        """Look up the tensors of ``module``. Raises CheckpointError if one is in another dtype, or the matrix
        cannot be in groups; ``find`` raises it for one that is missing or of another shape."""
        if columns % config.group_size or rows % 8:
            raise CheckpointError(
                f"{module} is [{rows}, {columns}]; weights in four bits need rows that are a multiple of 8 "
                f"and columns that are one of group_size {config.group_size}; quantize it with another "
                "group_size"
            )
        groups = columns // config.group_size
        of_values, of_scales, of_zeros = SUFFIXES[config.method]
        if config.method == COMPRESSED_TENSORS:
            shapes = (rows, columns // 8), (rows, groups), (rows // 8, groups)
        else:
            packed = (columns, rows // 8) if config.method == AWQ else (columns // 8, rows)
            shapes = packed, (groups, rows), (groups, rows // 8)
        values = _of_dtype(find(f"{module}.{of_values}", shapes[0]), torch.int32)
        scales = _of_dtype(find(f"{module}.{of_scales}", shapes[1]), *SCALE_DTYPES)
        zeros = None
        if config.has_zeros:
            zeros = _of_dtype(find(f"{module}.{of_zeros}", shapes[2]), torch.int32)
        return cls(config, values, scales, zeros)

    def placements(self, matrices: Int4Matrices, place: int, number: int) -> list[Placement]:
        """Return what fills matrix ``number`` of the expert at ``place``. Raises CheckpointError if the
        scales have another dtype."""
        _of_dtype(self.scales, matrices.form.scale_dtype)
        config = self.config
        planned = [
            Placement(self.values, matrices.values[place, number], convert=partial(_packed, config)),
            Placement(self.scales, matrices.scales[place, number], convert=partial(_scales, config)),
        ]
        if self.zeros is not None and matrices.zeros is not None:
            zeros = matrices.zeros[place, number]
            planned.append(Placement(self.zeros, zeros, convert=partial(_zeros, config)))
        return planned

    def dense_placement(self, target: Tensor) -> Placement:
        """Return what fills ``target`` [rows, columns] with the weights in its dtype."""
        beside = (self.scales,) if self.zeros is None else (self.scales, self.zeros)
        return Placement(
            self.values, target, convert=partial(_dense, self.config, target.dtype), beside=beside
        )


def _of_dtype(stored: StoredTensor, *dtypes: torch.dtype) -> StoredTensor:
    if stored.dtype not in dtypes:
        expected = ", ".join(str(dtype) for dtype in dtypes)
        raise CheckpointError(f"{stored.path}: {stored.name} is in {stored.dtype}; expected {expected}")
    return stored


def _packed(config: Int4Config, words: Tensor) -> Tensor:
    return pack(numbers(config, words), config.group_size)


def _dense(
    config: Int4Config, dtype: torch.dtype, words: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    of_groups = None if zeros is None else _zeros(config, zeros)
    return dequantize(numbers(config, words).contiguous(), _scales(config, scales), of_groups, dtype)


def numbers(config: Int4Config, words: Tensor) -> Tensor:
    """Return a matrix of stored numbers, uint8 [rows, columns]."""
    if config.method == COMPRESSED_TENSORS:
        return _unpacked(words, IN_ORDER)
    return _unpacked(words, AWQ_ORDER).t() if config.method == AWQ else _unpacked(words.t(), IN_ORDER)


def _scales(config: Int4Config, scales: Tensor) -> Tensor:
    return scales.t() if config.method == COMPRESSED_TENSORS else scales


def _zeros(config: Int4Config, words: Tensor) -> Tensor:
    """Return zeros, uint8 [groups, rows]."""
    if config.method == COMPRESSED_TENSORS:
        return _unpacked(words.t(), IN_ORDER)
    found = _unpacked(words, AWQ_ORDER if config.method == AWQ else IN_ORDER)
    return (found + config.zero_offset) & 15


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the numbers of ``words``, int32 [m, n], as uint8 [m, 8 * n]: of each eight the one with the
    lowest bits goes to the place ``order[0]``, and so on."""
    packed = words.contiguous()[..., None].view(torch.uint8)
    found = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(2)
    places = sorted(range(8), key=order.__getitem__)
    return found[..., places].flatten(1)
