"""Rotary embedding: against a product of complex numbers, in all layouts, and with the interpreted kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.rope import rotate
from tests.unit.kernels.triton_here import interpreted, needs_triton

SHAPES = [(3, 5, 8, 8), (1, 1, 12, 8), (4, 17, 19, 6), (2, 40, 130, 64), (0, 3, 8, 8), (2, 0, 8, 8)]
"""Tokens, heads, elements of a head, and rotated elements."""


def draw(shape: tuple[int, int, int, int], is_wide: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x``, ``cos`` and ``sin``, which are parts of wider tensors if ``is_wide``."""
    num_tokens, num_heads, dim, rope_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn((num_tokens, num_heads, dim + 7 * is_wide), generator=generator)[..., 7 * is_wide :]
    angles = torch.randn((num_tokens, rope_dim // 2 * (1 + is_wide)), generator=generator)
    half = slice(0, rope_dim // 2)
    return x, angles.cos()[:, half], angles.sin()[:, half]


def by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """Compute in float64, and return float32."""
    half = cos.shape[1]
    rope, rest = x.double().split([2 * half, x.shape[2] - 2 * half], dim=-1)
    pairs = rope.unflatten(-1, (half, 2)) if is_interleaved else rope.unflatten(-1, (2, half)).mT
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((turned.real, turned.imag, rest), dim=-1).float()


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_a_product_of_complex_numbers(shape: tuple[int, int, int, int], is_interleaved: bool) -> None:
    for is_wide in (False, True):
        x, cos, sin = draw(shape, is_wide)
        before = x.clone()
        out = rotate(x, cos, sin, is_interleaved=is_interleaved)
        torch.testing.assert_close(out, by_complex_numbers(x, cos, sin, is_interleaved))
        assert torch.equal(x, before)


def test_writes_its_part_of_a_wider_tensor_and_nothing_else() -> None:
    x, cos, sin = draw((3, 4, 10, 6))
    wide = torch.full((3, 4, 25), 77.0)
    out = rotate(x, cos, sin, is_interleaved=True, out=wide[..., 9:19])
    assert out.data_ptr() == wide[..., 9:].data_ptr()
    torch.testing.assert_close(wide[..., 9:19], by_complex_numbers(x, cos, sin, True))
    wide[..., 9:19] = 77.0
    assert torch.all(wide == 77.0)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_bfloat16_heads_turn_by_float32_angles_and_are_rounded_once(is_interleaved: bool) -> None:
    x, cos, sin = draw((4, 17, 19, 6))
    x = x.bfloat16()
    expected = by_complex_numbers(x, cos, sin, is_interleaved).bfloat16()
    assert torch.equal(rotate(x, cos, sin, is_interleaved=is_interleaved), expected)


def test_refuses_what_does_not_fit() -> None:
    x, cos, sin = draw((3, 4, 10, 6))
    with pytest.raises(KernelArgumentError, match=r"cos: expected at most 5 pairs of a head of 10, got 6"):
        rotate(x, torch.ones(3, 6), torch.ones(3, 6), is_interleaved=True)
    with pytest.raises(KernelArgumentError, match=r"sin: expected shape \[3, 3\], got \[3, 2\]"):
        rotate(x, cos, sin[:, :2], is_interleaved=True)
    with pytest.raises(KernelArgumentError, match=r"cos: expected dtype torch.float32, got torch.bfloat16"):
        rotate(x, cos.bfloat16(), sin, is_interleaved=True)
    with pytest.raises(KernelArgumentError, match=r"out: expected shape \[3, 4, 10\], got \[3, 4, 9\]"):
        rotate(x, cos, sin, is_interleaved=True, out=torch.empty(3, 4, 9))
    with pytest.raises(KernelArgumentError, match=r"x: expected a last stride of 1"):
        rotate(torch.empty(3, 10, 4).mT, cos, sin, is_interleaved=True)


def interpret_cases() -> None:
    from hisparse_pd.kernels import triton_rope

    for shape in SHAPES:
        for is_wide in (False, True):
            for is_interleaved in (True, False):
                x, cos, sin = draw(shape, is_wide)
                in_bf16 = torch.empty(x.shape, dtype=torch.bfloat16)
                triton_rope.rotate(x.bfloat16(), cos, sin, is_interleaved, in_bf16)
                exact = by_complex_numbers(x.bfloat16(), cos, sin, is_interleaved)
                # The interpreter of some releases truncates float32 where a GPU rounds it.
                cut = exact.view(torch.int32).bitwise_right_shift(16).short().view(torch.bfloat16)
                assert torch.equal(in_bf16, exact.bfloat16()) or torch.equal(in_bf16, cut)
                wide = torch.full((*x.shape[:2], x.shape[2] + 9), 77.0)
                triton_rope.rotate(x, cos, sin, is_interleaved, wide[..., 4:-5])
                expected = by_complex_numbers(x, cos, sin, is_interleaved)
                torch.testing.assert_close(wide[..., 4:-5], expected)
                assert torch.all(wide[..., :4] == 77.0)
                assert torch.all(wide[..., -5:] == 77.0)


@needs_triton
def test_interpreted_kernel() -> None:
    interpreted(interpret_cases)
