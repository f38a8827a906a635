"""The Hadamard matrix by which indexer queries and keys are rotated where keys are rounded to fp8.

A key has one scale, so a channel that is larger than the others takes their precision. The product spreads it
over all channels, and as it is orthogonal, dot products of queries and keys stay what they are. DeepSeek's
reference does the same before it rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError


def takes_dim(dim: int) -> bool:
    """Whether there is a matrix of this size: of powers of two there is."""
    return dim > 0 and dim.bit_count() == 1


def hadamard_matrix(dim: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Sylvester's matrix [dim, dim], which is symmetric, times dim ** -0.5; its own inverse, up to rounding.

    All elements are equal but for their signs, so rounding them to ``dtype`` multiplies every score by the
    same factor. Raises KernelArgumentError.
    """
    if not takes_dim(dim):
        raise KernelArgumentError(f"dim: expected a power of two, got {dim}")
    matrix = torch.full((1, 1), dim**-0.5, dtype=dtype, device=device)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
