"""Products with matrices in fp8 and in bfloat16: against float64, row by row, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from hisparse_pd.core.model.block_linear import BlockLinear, GatedMlp, JoinedLinears, gated_mlp
from hisparse_pd.kernels.block_fp8 import BLOCK, dequantize, quantize
from hisparse_pd.kernels.block_linear import block_linear, block_product, dense_product, gated
from hisparse_pd.kernels.fp8_rows import (
    Activations,
    Rounding,
    dequantize_rows,
    quantize_gated,
    quantize_rows,
)
from hisparse_pd.kernels.norms import add_parts
from tests.gpu.support import DEVICE, needs_gpu, no_waiting

pytestmark = needs_gpu

SHAPES = [(576, 7168), (1536, 7168), (128, 7168), (7168, 2048), (1024, 16384)]
"""Rows and columns of DeepSeek-V3.2's matrices: with incomplete blocks, few rows and many columns."""


def draw(num_tokens: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(num_tokens + rows)
    x = torch.randn((num_tokens, columns), device=DEVICE, generator=generator)
    x *= torch.logspace(-3, 3, num_tokens, device=DEVICE)[:, None]  # rows that would not share a scale
    matrix = torch.randn((rows, columns), device=DEVICE, generator=generator) / columns**0.5
    return x.bfloat16(), *quantize(matrix)


@pytest.mark.parametrize("columns", [7168, 136, 1])
@pytest.mark.parametrize(("num_rows", "multiple"), [(1, 16), (5, 1), (700, 16)])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_are_rounded_as_on_the_cpu(num_rows: int, multiple: int, columns: int, ue8m0: bool) -> None:
    x = draw(num_rows, 16, columns)[0]
    x[0] = 0
    values, scales = quantize_rows(x, multiple, ue8m0=ue8m0)
    expected_values, expected_scales = quantize_rows(x.cpu(), multiple, ue8m0=ue8m0)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(values.cpu().view(torch.uint8), expected_values.view(torch.uint8))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_gated_rows_are_rounded_once(ue8m0: bool) -> None:
    x = draw(300, 16, 2 * 1096)[0]
    gate, up = x.float().chunk(2, dim=1)
    expected = silu(gate) * up
    values, scales = quantize_gated(x[None], 8, ue8m0=ue8m0)
    assert bool((scales.log2() % 1 == 0).all()) == ue8m0
    found = dequantize_rows(values, scales)
    assert torch.all(found[300:] == 0)
    found = found[:300]
    padded = torch.nn.functional.pad(expected, (0, -1096 % BLOCK)).unflatten(1, (-1, BLOCK))
    peaks = padded.abs().amax(dim=2).repeat_interleave(BLOCK, 1)[:, :1096]
    # The bound is half a step of 3 bits of mantissa, or of the smallest numbers.
    assert torch.all((found - expected).abs() <= expected.abs() * 2**-4 * 1.001 + peaks * 2**-17)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 32, 129, 4096])
def test_is_the_product_of_what_was_rounded(num_tokens: int, shape: tuple[int, int]) -> None:
    x, values, scales = draw(num_tokens, *shape)
    with no_waiting():
        found = block_linear(x, values, scales)
    rounded = dequantize_rows(*(part.cpu() for part in quantize_rows(x.cpu()))).double().to(DEVICE)
    matrix = dequantize(values, scales, torch.float32).double()
    expected = rounded @ matrix.t()
    # The bound is the result's own rounding, and 13 bits of the summands: fp8 tensor cores keep no more.
    bound = expected.abs() * 2**-8 + 2**-13 * (rounded.abs() @ matrix.abs().t())
    assert found.dtype == torch.bfloat16
    assert found.shape == expected.shape
    assert torch.all((found.double() - expected).abs() <= bound)
    # Rounding the activations costs 2.6% of a row's norm with normal numbers.
    exact = x.double() @ matrix.t()
    assert torch.all((found.double() - exact).norm(dim=1) <= 0.05 * exact.norm(dim=1))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_gated_product_is_that_of_what_was_rounded(parts: int) -> None:
    _, values, scales = draw(1, 7168, 2048)
    gate_up = torch.stack([draw(5, 16, 4096)[0].roll(part) for part in range(parts)])
    gate_up = gate_up.float() if parts > 1 else gate_up
    rounded = dequantize_rows(*quantize_gated(add_parts(gate_up).bfloat16()[None])).double()
    expected = rounded @ dequantize(values, scales, torch.float32).double().t()
    inner = gated(gate_up, torch.bfloat16, Rounding())
    assert inner.rounded is not None
    found = block_product(inner.rounded, inner.num_tokens, torch.bfloat16, values, scales)
    assert (found.sum(dim=0) - expected).norm() <= 2**-8 * expected.norm()


def test_layers_that_are_joined_compute_what_each_does_alone() -> None:
    hidden = draw(33, 16, 7168)[0]
    parts = []
    for rows in (1536, 128, 576):
        with torch.device("meta"):
            part = BlockLinear(7168, rows)
        part.weight, part.weight_scale_inv = draw(1, rows, 7168)[1:]
        parts.append(part)
    alone = [part(hidden) for part in parts]
    joined = JoinedLinears(parts)
    assert joined.one_matrix is not None
    for found, expected in zip(joined(Activations(hidden)), alone, strict=True):
        assert torch.equal(add_parts(found).to(expected.dtype), expected)


def test_no_rows() -> None:
    x, values, scales = draw(1, 256, 384)
    assert block_linear(x[:0], values, scales).shape == (0, 256)
    assert dense_product(x[:0], x).shape == (1, 0, 1)
    for rounding in (None, Rounding()):
        assert gated(x[None, :0], torch.bfloat16, rounding).num_tokens == 0


@pytest.mark.parametrize("shape", [(672, 2048), (5120, 768), (2048, 384), (2048, 512), (130, 72)])
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64, 200])
def test_a_product_in_bfloat16(num_tokens: int, shape: tuple[int, int]) -> None:
    """A.X-K2-Light's shapes with rows of ``x`` that are parts of longer rows, and one without whole
    blocks."""
    rows, columns = shape
    x, matrix = draw(num_tokens, 1, 2 * columns)[0][:, :columns], draw(rows, 1, columns)[0]
    with no_waiting():
        found = dense_product(x, matrix)
    expected = x.double() @ matrix.double().t()
    away = (found.double().sum(dim=0) - expected).norm(dim=1)
    assert torch.all(away <= 2**-8 * expected.norm(dim=1))
    assert found.dtype == (torch.bfloat16 if len(found) == 1 else torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 33, 300])
def test_a_gated_mlp_in_bfloat16(num_tokens: int) -> None:
    mlp: Any = torch.nn.Module()
    for name, shape in (("gate_proj", (512, 2048)), ("up_proj", (512, 2048)), ("down_proj", (2048, 512))):
        linear = torch.nn.Linear(shape[1], shape[0], bias=False, device=DEVICE, dtype=torch.bfloat16)
        linear.requires_grad_(False)
        mlp.add_module(name, linear)
    x = draw(num_tokens, 1, 2048)[0]
    inner = (silu(mlp.gate_proj(x).double()) * mlp.up_proj(x).double()).bfloat16()
    expected = inner.double() @ mlp.down_proj.weight.double().t()
    ours = gated_mlp(mlp)
    assert isinstance(ours, GatedMlp)
    found = ours.parts(Activations(x)).double().sum(dim=0)
    assert torch.all((found - expected).norm(dim=1) <= 2**-7 * expected.norm(dim=1))


@pytest.mark.parametrize("num_tokens", [3, 200])
def test_a_graph_holds_it(num_tokens: int) -> None:
    x, values, scales = draw(num_tokens, 1536, 7168)
    block_linear(x, values, scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = block_linear(x, values, scales)
    for _ in range(3):
        x.copy_(x.roll(1, 0) * 2)
        graph.replay()
        assert torch.equal(found, block_linear(x, values, scales))
