"""Rotary embedding in one launch: against the reference on the CPU, over sizes, dtypes and layouts."""

from __future__ import annotations

import pytest
import torch

from hisparse_pd.kernels.rope import rotate
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu

SHAPES = [
    (1, 1, 64, 64),
    (64, 128, 64, 64),
    (64, 64, 128, 64),
    (5, 3, 19, 6),
    (4096, 1, 64, 64),
    (0, 3, 8, 8),
]
"""Tokens, heads, elements of a head, and rotated elements."""


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_as_on_the_cpu(shape: tuple[int, int, int, int], dtype: torch.dtype, is_interleaved: bool) -> None:
    num_tokens, num_heads, dim, rope_dim = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((num_tokens, num_heads, dim + 128), generator=generator).to(DEVICE, dtype)[..., 128:]
    angles = torch.randn((num_tokens, rope_dim), generator=generator)
    cos, sin = (part.to(DEVICE)[:, : rope_dim // 2] for part in (angles.cos(), angles.sin()))
    wide = torch.full((num_tokens, num_heads, 512 + dim), 77.0, dtype=dtype, device=DEVICE)

    out = rotate(x, cos, sin, is_interleaved=is_interleaved, out=wide[..., 512:])

    expected = rotate(x.cpu().float(), cos.cpu(), sin.cpu(), is_interleaved=is_interleaved)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(out[..., rope_dim:], x[..., rope_dim:])
    assert torch.all(wide[..., :512] == 77.0)


def test_replays_in_a_graph() -> None:
    x = torch.randn((8, 16, 128), device=DEVICE)
    angles = torch.randn((8, 32), device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    rotate(x, cos, sin, is_interleaved=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rotate(x, cos, sin, is_interleaved=True)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, rotate(x, cos, sin, is_interleaved=True))
