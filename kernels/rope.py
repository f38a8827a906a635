"""Rotary position embedding of the first dimensions of each head, in torch and, on a GPU, in one launch.

Both models pair elements in one of two ways: neighbours (*interleaved*), whose first members come out in the
first half, or element ``i`` with ``i + rope_dim / 2``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.checks import KernelArgumentError, check_tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, out: Tensor | None = None) -> Tensor:
    """Rotate the first ``rope_dim`` elements of each head of ``x`` and take the others as they are.

    ``x``: [num_tokens, num_heads, dim]; ``cos``, ``sin``: [num_tokens, rope_dim / 2] of its dtype, with a
    rope_dim of at most dim; ``out``: where the result goes, as ``x`` and apart from it, or None for a new
    tensor. All have a last stride of 1, and may have any others. Returns ``out``.

    On a GPU it is enqueued on the current stream and rounded once; nothing synchronises. Raises
    KernelArgumentError.
    """
    check_tensor("x", x, dtypes=DTYPES, shape=(None, None, None), contiguous=False)
    num_tokens, num_heads, dim = x.shape
    half = cos.shape[-1]
    if not 0 < 2 * half <= dim:
        raise KernelArgumentError(f"cos: expected at most {dim // 2} pairs of a head of {dim}, got {half}")
    for name, angle in (("cos", cos), ("sin", sin)):
        check_tensor(
            name, angle, dtypes=(x.dtype,), shape=(num_tokens, half), device=x.device, contiguous=False
        )
    if out is None:
        out = torch.empty((num_tokens, num_heads, dim), dtype=x.dtype, device=x.device)
    check_tensor("out", out, dtypes=(x.dtype,), shape=tuple(x.shape), device=x.device, contiguous=False)
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin), ("out", out)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise KernelArgumentError(f"{name}: expected a last stride of 1, got {tensor.stride()}")
    if x.device.type == "cuda" and (kernel := _kernel()) is not None:
        kernel(x, cos, sin, is_interleaved, out)
        return out
    cos, sin = cos[:, None, :], sin[:, None, :]
    rope, out_rope = x[..., : 2 * half], out[..., : 2 * half]
    first, second = (rope[..., 0::2], rope[..., 1::2]) if is_interleaved else rope.chunk(2, dim=-1)
    torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1, out=out_rope)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor, bool, Tensor], None] | None:
    """All of it in one launch, where triton is installed."""
    try:
        from kernels import triton_rope
    except ImportError:
        return None
    return triton_rope.rotate
