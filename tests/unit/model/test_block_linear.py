"""Linear layers in fp8 on a CPU, which is the reference: rounding, and layers that are joined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model.block_linear import BlockLinear, GatedMlp, JoinedLinears, gated_mlp
from hisparse_pd.kernels.block_fp8 import SMALLEST_PEAK, dequantize, quantize
from hisparse_pd.kernels.fp8_rows import Activations, dequantize_rows, quantize_rows
from hisparse_pd.kernels.row_math import RowLinear, silu

COLUMNS = 200


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_linear(rows: int, columns: int = COLUMNS, *, ue8m0: bool = False) -> BlockLinear:
    linear = BlockLinear(columns, rows, ue8m0=ue8m0)
    linear.weight, linear.weight_scale_inv = quantize(draw(rows, columns) / columns**0.5)
    return linear


def dense(linear: Any) -> Tensor:
    return dequantize(linear.weight, linear.weight_scale_inv, torch.float32)


def test_rows_are_rounded_in_blocks() -> None:
    x = draw(5, COLUMNS) * torch.logspace(-4, 4, 5)[:, None]
    x[2] = 0
    values, scales = quantize_rows(x, 8)
    assert values.shape == (8, COLUMNS)
    assert scales.shape == (2, 8)
    assert torch.all(values[5:].float() == 0)
    found = dequantize_rows(values, scales)[:5]
    # Half a step of 3 bits of mantissa, or of the smallest numbers of a block.
    assert torch.all((found - x).abs() <= x.abs() * 2**-4 + x.abs().amax(dim=1, keepdim=True) * 2**-18)
    assert torch.equal(found[2], x[2])
    alone = quantize_rows(x[1:2])
    assert torch.equal(alone[0][0].float(), values[1].float())
    assert torch.equal(alone[1][:, 0], scales[:, 1])


def test_ue8m0_scales_are_the_next_powers_of_two() -> None:
    """DeepSeek's act_quant makes the same scales: 2 to the ceiling of the binary logarithm of the peak by
    448."""
    x = draw(6, 256) * torch.logspace(-4, 4, 6)[:, None]
    x[2], x[3, :128] = 0, torch.full((128,), 448 * 2.0**-3)
    values, scales = quantize_rows(x, 8, ue8m0=True)
    peaks = x.view(6, 2, 128).abs().amax(dim=2).clamp(min=SMALLEST_PEAK)
    assert torch.equal(scales.t()[:6], torch.exp2((peaks.double() / 448).log2().ceil()).float())
    found = dequantize_rows(values, scales)[:6]
    assert torch.all((found - x).abs() <= x.abs() * 2**-4 + x.abs().amax(dim=1, keepdim=True) * 2**-17)
    assert torch.equal(found[3, :128], x[3, :128])
    assert not torch.equal(quantize_rows(x, 8)[1], scales)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_layer_multiplies_what_was_rounded(ue8m0: bool) -> None:
    linear = make_linear(72, ue8m0=ue8m0)
    x = draw(2, 3, COLUMNS)
    rounded = dequantize_rows(*quantize_rows(x.flatten(0, 1), ue8m0=ue8m0))
    torch.testing.assert_close(linear(x), (rounded @ dense(linear).t()).view(2, 3, 72))
    assert linear(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("rows", "is_joined"), [((256, 128, 72), True), ((72, 256), False)])
def test_layers_of_the_same_input_are_one_where_blocks_allow_it(
    rows: tuple[int, ...], is_joined: bool
) -> None:
    x = draw(4, COLUMNS)
    parts = [make_linear(number, ue8m0=True) for number in rows]
    expected = [part(x) for part in parts]
    joined = JoinedLinears(parts)
    assert (joined.one_matrix is not None) == is_joined
    for found, wanted in zip(joined(Activations(x)), expected, strict=True):
        torch.testing.assert_close(found, wanted[None])
    for part, wanted in zip(parts, expected, strict=True):  # whose tensors are views now
        assert torch.equal(part(x), wanted)


@torch.inference_mode()
def test_layers_that_are_not_in_fp8_stay_apart() -> None:
    parts = [RowLinear(COLUMNS, 128, bias=False), make_linear(128)]
    x = draw(4, COLUMNS)
    for found, part in zip(JoinedLinears(parts)(Activations(x)), parts, strict=True):
        assert torch.equal(found[0], part(x))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_gated_mlp_rounds_once_a_product(ue8m0: bool) -> None:
    mlp = SimpleNamespace(
        gate_proj=make_linear(128, ue8m0=ue8m0),
        up_proj=make_linear(128, ue8m0=ue8m0),
        down_proj=make_linear(COLUMNS, 128, ue8m0=ue8m0),
    )
    x = draw(2, 3, COLUMNS)
    inner = silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    expected = mlp.down_proj(inner)
    ours = gated_mlp(mlp)
    assert isinstance(ours, GatedMlp)
    torch.testing.assert_close(ours(x), expected)
    in_bfloat16 = ours(x.bfloat16())
    assert in_bfloat16.dtype == torch.bfloat16
    assert (in_bfloat16 - expected).norm() <= 0.05 * expected.norm()


def test_a_gated_mlp_that_is_not_in_fp8_stays() -> None:
    linear = torch.nn.Linear(COLUMNS, 128, bias=False)
    mlp = SimpleNamespace(gate_proj=linear, up_proj=linear, down_proj=make_linear(COLUMNS, 128))
    assert gated_mlp(mlp) is mlp
