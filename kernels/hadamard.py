"""The Hadamard matrix that rotates indexer queries and keys if keys are rounded to fp8.

A key has one scale, so a large channel costs the others precision. The rotation spreads it over all channels.
Because the rotation is orthogonal, dot products of queries and keys do not change. DeepSeek's reference does
the same before it rounds. ``hisparse_pd.core.model.attention`` makes the matrix for each layer's indexer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError


def takes_dim(dim: int) -> bool:
    """Return whether there is a matrix of this size: a power of two."""
    return dim > 0 and dim.bit_count() == 1


def hadamard_matrix(dim: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return Sylvester's matrix [dim, dim] times dim ** -0.5. It is symmetric and, up to rounding, its own
    inverse.

    All elements have the same magnitude, so rounding them to ``dtype`` multiplies every score by the same
    factor. Raises KernelArgumentError.
    """
    if not takes_dim(dim):
        raise KernelArgumentError(f"dim: expected a power of two, got {dim}")
    matrix = torch.full((1, 1), dim**-0.5, dtype=dtype, device=device)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
