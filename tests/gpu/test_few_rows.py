"""Products of up to 64 tokens in CUDA C++: the bits of the kernels for more tokens, and in bfloat16 of the
Triton kernel, whatever the tiles; the product in float64; operands that are parts of others; and the same
bits in every launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels import few_rows
from hisparse_pd.kernels.block_fp8 import dequantize, quantize
from hisparse_pd.kernels.block_linear import block_product, dense_product
from hisparse_pd.kernels.cuda_launch import HOPPER
from hisparse_pd.kernels.fp8_rows import dequantize_rows, quantize_rows
from hisparse_pd.kernels.norms import add_parts
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = [
    *needs_gpu,
    pytest.mark.I5,
    pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.get_device_capability() != HOPPER, reason="the kernel needs Hopper"
    ),
]

FP8_SHAPES = [
    (2240, 7168), (32768, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (36864, 7168), (576, 7168),
    (128, 7168), (208, 1024), (16, 512),
]  # fmt: skip
"""Rows and columns: of DeepSeek-V3.2's matrices, of which one has several tiles a multiprocessor, and small
ones with tiles that end in the middle of a team's rows and clusters whose last block has no rows."""
BFLOAT16_SHAPES = [(2048, 4096), (5120, 768), (7168, 2048), (672, 2048), (144, 72)]
"""The last one has no whole blocks of columns."""
SHAPES = [*((shape, True) for shape in FP8_SHAPES), *((shape, False) for shape in BFLOAT16_SHAPES)]
COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64)
MORE = 160
"""Rows that other kernels multiply, as they do the first 65."""

Product = Callable[[Tensor], Tensor]


def operands(shape: tuple[int, int], is_fp8: bool) -> tuple[Tensor, Product, Tensor]:
    """Return MORE rows in bfloat16, which are parts of longer rows, a function that multiplies some of them
    and returns parts, and the product of the first 64 in float64."""
    rows, columns = shape
    generator = torch.Generator(DEVICE).manual_seed(rows + columns)
    matrix = torch.randn(shape, device=DEVICE, generator=generator) / columns**0.5
    wide = torch.randn((MORE, 2 * columns), device=DEVICE, generator=generator)
    wide *= torch.logspace(-3, 3, MORE, device=DEVICE)[:, None]
    x = wide.bfloat16()[:, :columns]
    if not is_fp8:
        dense = matrix.bfloat16()
        return x, lambda x: dense_product(x, dense), x[:64].double() @ dense.double().t()
    values, scales = quantize(matrix)

    def product(x: Tensor) -> Tensor:
        rounded = quantize_rows(x, 1 if len(x) <= 64 else 16)
        return block_product(rounded, len(x), torch.bfloat16, values, scales)

    first = dequantize_rows(*quantize_rows(x[:64])).double()
    return x, product, first @ dequantize(values, scales, torch.float32).double().t()


@pytest.mark.parametrize(("shape", "is_fp8"), SHAPES)
def test_has_the_bits_of_other_kernels(
    shape: tuple[int, int], is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, product, expected = operands(shape, is_fp8)
    others = [product(x[:65]), product(x)]
    different = []
    for count, first in itertools.product(COUNTS, (0, 5)):
        part = x[first : first + count]
        torch.empty_like(product(part)).fill_(torch.nan)  # what the allocator hands out next is NaN
        found = product(part)
        for other in others[first > 0 :]:  # the first of them has no row behind these
            rows = other[:, first : first + count]
            if len(found) == len(rows):
                is_equal = torch.equal(found, rows)
            else:
                is_equal = torch.equal(add_parts(found).bfloat16(), rows[0])
            if not is_equal:
                different.append((count, first, other.shape[1]))
        if not is_fp8:
            with monkeypatch.context() as patch:
                patch.setattr(few_rows, "takes", lambda x, values: False)
                if not torch.equal(found, product(part)):
                    different.append((count, first, 0))
    assert not different, different
    off = (add_parts(product(x[:64])).double() - expected).norm(dim=1)
    assert torch.all(off <= 2**-8 * expected.norm(dim=1))


@pytest.mark.parametrize(
    ("shape", "is_fp8"), [((2240, 7168), True), ((576, 7168), True), ((672, 2048), False)]
)
@pytest.mark.parametrize("num_sms", [4, 40, 131, 264])
def test_tiles_do_not_change_bits(
    shape: tuple[int, int], is_fp8: bool, num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few multiprocessors have several tiles each, and more than there are have few rows."""
    x, product, _ = operands(shape, is_fp8)
    expected = [product(x[:count]) for count in COUNTS]
    monkeypatch.setattr(few_rows, "num_multiprocessors", lambda _: num_sms)
    for count, parts in zip(COUNTS, expected, strict=True):
        assert torch.equal(product(x[:count]), parts), count


@pytest.mark.parametrize(
    ("shape", "is_fp8"), [((2240, 7168), True), ((32768, 1536), True), ((5120, 768), False)]
)
@pytest.mark.parametrize("count", [1, 17, 64])
def test_every_launch_has_the_same_bits(shape: tuple[int, int], is_fp8: bool, count: int) -> None:
    """Launches follow each other closely, so that each begins while the one in front runs."""
    x, product, _ = operands(shape, is_fp8)
    expected = product(x[:count])
    num_different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        num_different += (product(x[:count]) != expected).sum()
    assert int(num_different) == 0


def test_rounded_rows_may_be_parts_of_others() -> None:
    """Rows of fp8 with other distances, and scales of more rows than are multiplied."""
    values, scales = quantize(torch.randn((576, 1024), device=DEVICE))
    rounded = quantize_rows(torch.randn((64, 1024), device=DEVICE).bfloat16())
    expected = block_product(rounded, 64, torch.bfloat16, values, scales)
    wide = torch.zeros((64, 1024 + 16), dtype=rounded.values.dtype, device=DEVICE)
    wide[:, :1024] = rounded.values
    for count in (1, 13, 64):
        apart = rounded._replace(values=wide[:, :1024])
        assert torch.equal(block_product(apart, count, torch.bfloat16, values, scales), expected[:, :count])


def test_takes_what_is_aligned() -> None:
    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    matrix = some(64, 256)
    assert few_rows.takes(some(3, 256), matrix)
    assert few_rows.takes(some(3, 512)[:, 256:], matrix)
    assert not few_rows.takes(some(3, 257)[:, :256], matrix)
    assert not few_rows.takes(some(3, 512)[:, 1:257], matrix)
    assert not few_rows.takes(some(1, 256).expand(3, -1), matrix)
    assert not few_rows.takes(some(3, 256), some(72, 256))
    assert not few_rows.takes(some(3, 256, dtype=torch.float32), some(64, 256, dtype=torch.float32))
