"""Sums, norms and roundings in one launch, against the same in torch, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.fp8_rows import Rounding, quantize_rows
from hisparse_pd.kernels.norms import NormGate, add_norm, add_parts
from tests.gpu.support import DEVICE, needs_gpu, no_waiting

pytestmark = needs_gpu

ROWS = [1, 3, 16, 17, 63, 200]


def draw(*shape: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, device=DEVICE, generator=generator)


@pytest.mark.parametrize("rounding", [None, Rounding(), Rounding(ue8m0=True)])
@pytest.mark.parametrize("size", [7168, 136])
@pytest.mark.parametrize("num_rows", ROWS)
def test_adds_norms_and_rounds(num_rows: int, size: int, rounding: Rounding | None) -> None:
    hidden, weight = draw(num_rows, size).bfloat16(), draw(size).bfloat16()
    of_product, of_experts = draw(4, num_rows, size), draw(num_rows, 3, size).bfloat16().transpose(0, 1)
    for before, added in ((hidden, []), (hidden, [of_product]), (hidden, [of_product, of_experts]),
                          (None, [of_experts])):  # fmt: skip
        with no_waiting():
            sums, normed = add_norm(before, added, weight, 1e-6, rounding)
        expected = torch.zeros_like(hidden, dtype=torch.float64) if before is None else before.double()
        for parts in added:  # the sum of a product's parts is rounded as a product in one part is
            total = add_parts(parts).bfloat16() if parts is of_product else parts.double().sum(dim=0)
            expected = expected + total.double()
        torch.testing.assert_close(sums.double(), expected, rtol=2**-8, atol=2**-20)
        wide = torch.nn.functional.rms_norm(sums.double(), (size,), weight.double(), 1e-6)
        torch.testing.assert_close(normed.dense.double(), wide, rtol=2**-8, atol=2**-20)
        if rounding is not None:
            assert normed.rounded is not None
            values, scales = quantize_rows(normed.dense.cpu(), 1, ue8m0=rounding.ue8m0)
            assert torch.equal(normed.rounded.scales[:, :num_rows].cpu(), scales)
            found = normed.rounded.values.cpu()
            assert torch.equal(found[:num_rows].view(torch.uint8), values.view(torch.uint8))
            assert not found[num_rows:].float().any()


@pytest.mark.parametrize(("size", "rank"), [(2048, 16), (7168, 16), (136, 5)])
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_norm_that_opens_a_gate_for_itself(num_rows: int, size: int, rank: int) -> None:
    hidden, weight, added = draw(num_rows, size).bfloat16(), draw(size).bfloat16(), draw(3, num_rows, size)
    down, up = (draw(rank, size) / size**0.5).bfloat16(), draw(size, rank).bfloat16()
    gate = NormGate.of(down, up)
    sums, normed = add_norm(hidden, [added], weight, 1e-6, Rounding(), gate)
    expected_sums, ungated = add_norm(hidden, [added], weight, 1e-6, None)
    assert torch.equal(sums, expected_sums)
    wide = ungated.dense.double()
    inner = torch.nn.functional.silu((wide @ down.double().t()).bfloat16().double())
    opening = (inner.bfloat16().double() @ up.double().t()).bfloat16().double().sigmoid()
    # A value between two bfloat16 numbers may move the opening by as much as the gate's largest element.
    torch.testing.assert_close(normed.dense.double(), wide * opening, rtol=2**-5, atol=2**-12)
    assert normed.rounded is not None
    values, scales = quantize_rows(normed.dense.cpu())
    assert torch.equal(normed.rounded.scales[:, :num_rows].cpu(), scales)
    assert torch.equal(normed.rounded.values[:num_rows].cpu().view(torch.uint8), values.view(torch.uint8))


def test_no_rows() -> None:
    weight = draw(256).bfloat16()
    sums, normed = add_norm(draw(0, 256).bfloat16(), [draw(2, 0, 256)], weight, 1e-6, Rounding())
    assert sums.shape == normed.dense.shape == (0, 256)
