"""Among equal scores the lowest positions are chosen, on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from hisparse_pd.kernels.selection import ranked_topk
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize(("num_rows", "n", "top_k"), [(1, 6, 2), (300, 256, 8), (64, 16, 3), (5, 129280, 20)])
def test_equals_are_taken_in_order(num_rows: int, n: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randint(0, 4, (num_rows, n), generator=generator).float()
    values[0] = 0.5
    expected = values.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(ranked_topk(values.to(DEVICE), top_k)[1].cpu(), expected)
