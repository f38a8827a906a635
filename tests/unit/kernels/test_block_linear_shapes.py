"""The shapes of matrices that stay in fp8 on a GPU; tests/gpu has the tests of their products."""

from __future__ import annotations

import pytest

from hisparse_pd.kernels.block_linear import takes_matrix


@pytest.mark.parametrize(
    ("rows", "columns", "takes"),
    [
        (7168, 18432, True),  # of DeepSeek-V3.2
        (1536, 7168, True),
        (24576, 1536, True),
        (576, 7168, True),
        (1024, 512, True),
        (1024, 128, False),  # one scale in a row of blocks, but the library reads four
        (1024, 640, False),
        (1000, 512, False),
    ],
)
def test_matrices_have_whole_groups_of_four_blocks_a_row(rows: int, columns: int, takes: bool) -> None:
    assert takes_matrix(rows, columns) is takes
