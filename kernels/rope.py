"""Rotary position embedding of the first dimensions of each head: in torch, and on a GPU in one launch.

``kernels.latents`` rotates the layers' queries, keys and index vectors with ``rotate``. Models pair elements
in one of two ways: neighbours (*interleaved*), with the first of each pair written to the first half, or
element ``i`` with ``i + rope_dim / 2``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError, check_tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, out: Tensor | None = None) -> Tensor:
    """Rotate the first ``rope_dim`` elements of each head of ``x`` and copy the others.

    ``x``: [num_tokens, num_heads, dim], not changed; ``cos``, ``sin``: float32 [num_tokens, rope_dim / 2],
    with a rope_dim of at most dim; ``out``: of ``x``'s shape and dtype and in other memory, or None for a new
    tensor. All have a last stride of 1 and any other strides. Returns ``out``, computed in float32 and
    rounded once: the first elements of all pairs, their second ones, whatever ``is_interleaved`` says of
    ``x``, and the copied elements.

    On a GPU the launch goes to the current stream; nothing synchronises. Raises KernelArgumentError.
    """
    num_pairs = cos.shape[-1]
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not _fits(x, cos, sin, out):
        _refuse(x, cos, sin, out)
    if x.device.type == "cuda" and (kernel := _kernel()) is not None:
        kernel(x, cos, sin, is_interleaved, out)
        return out
    cos, sin = cos[:, None, :], sin[:, None, :]
    rope_dim = 2 * num_pairs
    rope, rest = x[..., :rope_dim].float(), x[..., rope_dim:]
    first, second = (rope[..., 0::2], rope[..., 1::2]) if is_interleaved else rope.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    torch.cat((*(part.to(x.dtype) for part in rotated), rest), dim=-1, out=out)
    return out


def _fits(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> bool:
    """Return whether all arguments fit, much faster than ``_refuse`` finds out: small batches on a CPU pay
    this 4 times a layer."""
    num_pairs = cos.shape[-1]
    return (
        x.dim() == 3
        and x.dtype in DTYPES
        and cos.shape == sin.shape == (x.shape[0], num_pairs)
        and 0 < 2 * num_pairs <= x.shape[2]
        and out.shape == x.shape
        and x.dtype == out.dtype
        and cos.dtype == sin.dtype == torch.float32
        and x.device == cos.device == sin.device == out.device
        and x.stride(-1) == cos.stride(-1) == sin.stride(-1) == out.stride(-1) == 1
    )


def _refuse(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Raise KernelArgumentError for the first argument that does not fit."""
    check_tensor("x", x, dtypes=DTYPES, shape=(None, None, None), contiguous=False)
    num_tokens, _, dim = x.shape
    num_pairs = cos.shape[-1]
    if not 0 < 2 * num_pairs <= dim:
        raise KernelArgumentError(
            f"cos: expected at most {dim // 2} pairs of a head of {dim}, got {num_pairs}"
        )
    for name, tensor, dtype, shape in (
        ("cos", cos, torch.float32, (num_tokens, num_pairs)),
        ("sin", sin, torch.float32, (num_tokens, num_pairs)),
        ("out", out, x.dtype, tuple(x.shape)),
    ):
        check_tensor(name, tensor, dtypes=(dtype,), shape=shape, device=x.device, contiguous=False)
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin), ("out", out)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise KernelArgumentError(f"{name}: expected a last stride of 1, got {tensor.stride()}")


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor, bool, Tensor], None] | None:
    """Return the kernel that rotates in one launch, if triton is installed."""
    try:
        from hisparse_pd.kernels import triton_rope
    except ImportError:
        return None
    return triton_rope.rotate
