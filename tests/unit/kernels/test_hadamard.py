"""The matrix that rotates indexer queries and keys."""

from __future__ import annotations

import pytest
import torch

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hadamard import hadamard_matrix, takes_dim


@pytest.mark.parametrize("dim", [1, 2, 32, 128])
def test_the_matrix_is_orthogonal_and_symmetric(dim: int) -> None:
    matrix = hadamard_matrix(dim, torch.float64)
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim, dtype=torch.float64))
    assert torch.equal(matrix, matrix.t())
    assert matrix.abs().unique().tolist() == [pytest.approx(dim**-0.5)]
    signs = [[1 - 2 * ((row & column).bit_count() & 1) for column in range(dim)] for row in range(dim)]
    assert torch.equal(matrix.sign(), torch.tensor(signs, dtype=torch.float64))


def test_in_bfloat16_elements_differ_in_their_signs_alone() -> None:
    assert len(hadamard_matrix(128, torch.bfloat16).abs().unique()) == 1


@pytest.mark.parametrize("dim", [0, 3, 96, -4])
def test_other_sizes_than_powers_of_two_are_refused(dim: int) -> None:
    assert not takes_dim(dim)
    with pytest.raises(KernelArgumentError, match=f"dim: expected a power of two, got {dim}"):
        hadamard_matrix(dim, torch.float32)
