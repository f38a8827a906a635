# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.norms.add_norm`` on a GPU: a program a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block_fp8 import BLOCK, DTYPE, SMALLEST_PEAK
from kernels.fp8 import FP8_MAX
from kernels.fp8_rows import Activations, Rounded, Rounding, row_multiple
from kernels.triton_fp8 import round_blocks, sum_parts
from kernels.triton_launch import begin, launch_options


def add_norm_triton(
    hidden: Tensor | None,
    added: Sequence[Tensor],
    weight: Tensor,
    eps: float,
    rounding: Rounding | None,
    *,
    num_warps: int = 8,
) -> tuple[Tensor, Activations]:
    """See ``kernels.norms.add_norm``."""
    num_tokens, size = added[0].shape[1:] if hidden is None else hidden.shape
    device = weight.device
    normed = torch.empty((num_tokens, size), dtype=weight.dtype, device=device)
    sums = hidden if hidden is not None and not added else torch.empty_like(normed)
    multiple = row_multiple(num_tokens, device)
    num_rows = num_tokens if rounding is None else -(-num_tokens // multiple) * multiple
    blocks = triton.cdiv(size, BLOCK)
    rounded = None
    if rounding is not None:
        values = torch.empty((num_rows, size), dtype=DTYPE, device=device)
        rounded = Rounded(values, torch.empty((blocks, num_rows), dtype=torch.float32, device=device))
    before = sums if hidden is None else hidden
    one, other = (*added, before[None], before[None])[:2]
    if num_rows:
        with torch.cuda.device_of(weight):
            add_norm_kernel[(num_rows,)](
                before,
                one,
                other,
                weight,
                sums,
                normed,
                normed if rounded is None else rounded.values,
                normed if rounded is None else rounded.scales,
                num_tokens,
                num_rows,
                before.stride(0),
                *one.stride()[:2],
                *other.stride()[:2],
                eps,
                SIZE=size,
                HAS_HIDDEN=hidden is not None,
                NUM_ONE=len(one) if added else 0,
                NUM_OTHER=len(other) if len(added) > 1 else 0,
                ROUNDS=rounding is not None,
                UE8M0=rounding is not None and rounding.ue8m0,
                BLOCK=BLOCK,
                BLOCKS=triton.next_power_of_2(blocks),
                LARGEST=FP8_MAX,
                SMALLEST_PEAK=SMALLEST_PEAK,
                num_warps=num_warps,
                **launch_options(device),
            )
    return sums, Activations(normed, rounded)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def add_norm_kernel(
    hidden,
    one,
    other,
    weight,
    sums,
    normed,
    values,
    scales,
    num_tokens,
    num_rows,
    hidden_stride,
    one_part,
    one_stride,
    other_part,
    other_stride,
    eps,
    SIZE: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,
    NUM_ONE: tl.constexpr,
    NUM_OTHER: tl.constexpr,
    ROUNDS: tl.constexpr,
    UE8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row, in blocks; a row behind ``num_tokens`` is zeros in fp8 and nothing else."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)[:, None]
    at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there = at < SIZE
    factor = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    begin(OVERLAPS)
    is_token = is_there & (row < num_tokens)
    dtype: tl.constexpr = normed.dtype.element_ty
    if HAS_HIDDEN:
        x = tl.load(hidden + row * hidden_stride + at, mask=is_token, other=0.0)
    else:
        x = tl.zeros((BLOCKS, BLOCK), dtype=dtype)
    if NUM_ONE > 0:
        total = sum_parts(one + row * one_stride, one_part, at, is_token, NUM_ONE)
        if NUM_OTHER > 0:
            total += sum_parts(other + row * other_stride, other_part, at, is_token, NUM_OTHER)
        x = (x.to(tl.float32) + total).to(dtype)
        tl.store(sums + row * SIZE + at, x, mask=is_token)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide) / SIZE
    result = (wide * tl.rsqrt(mean + eps) * factor).to(dtype)
    tl.store(normed + row * SIZE + at, result, mask=is_token)
    if ROUNDS:
        rounded, scale = round_blocks(result.to(tl.float32), 1, LARGEST, SMALLEST_PEAK, UE8M0)
        tl.store(values + row * SIZE + at, rounded, mask=is_there)
        tl.store(scales + block.to(tl.int64) * num_rows + row, scale, mask=block * BLOCK < SIZE)
