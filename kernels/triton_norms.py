# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.norms.add_norm`` on a GPU, in one launch: sums, norm, gate and the rounding to fp8.

Without a gate there is a program for each row. A gate multiplies the norm y by
``sigmoid(up(silu(down(y))))``; then each program takes several rows, for which it keeps the gate's matrices
in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK, SMALLEST_PEAK
from hisparse_pd.kernels.cuda_launch import num_multiprocessors
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.fp8_rows import Activations, Rounded, Rounding, padded, row_multiple
from hisparse_pd.kernels.triton_fp8 import part_strides, round_blocks, sum_parts
from hisparse_pd.kernels.triton_launch import begin, launch_options

GATE_NUMBERS = 1 << 15
"""Numbers of a gate's matrix that a program multiplies at a time, as many as its registers hold."""

REGISTERS = 1 << 16
"""Registers of a multiprocessor."""


def add_norm_triton(
    hidden: Tensor | None,
    added: Sequence[Tensor],
    weight: Tensor,
    eps: float,
    rounding: Rounding | None,
    gate: tuple[Tensor, Tensor] | None = None,
    *,
    num_warps: int = 8,
) -> tuple[Tensor, Activations]:
    """Do ``kernels.norms.add_norm``, which calls this on a GPU.

    ``hidden``: [num_tokens, size], None for zeros. ``added``: at most two additions to it, each in parts
    [parts, num_tokens, size]. ``gate``: its matrices down and up, each [rank, size], contiguous. Returns the
    sums, which are ``hidden`` itself if nothing is added, and their norm behind the gate.
    """
    num_tokens, size = added[0].shape[1:] if hidden is None else hidden.shape
    device = weight.device

    # The results.
    normed = torch.empty((num_tokens, size), dtype=weight.dtype, device=device)
    sums = hidden if hidden is not None and not added else torch.empty_like(normed)
    num_rows = num_tokens if rounding is None else padded(num_tokens, row_multiple(num_tokens, device))
    rounded = None if rounding is None else Rounded.empty(num_rows, size, device)

    # A kernel takes no None: other tensors stand for absent ones, and constants say what is absent.
    before = sums if hidden is None else hidden
    first, second = (*added, before[None], before[None])[:2]
    down, up = (weight, weight) if gate is None else gate
    rank = 0 if gate is None else len(down)
    padded_size = triton.next_power_of_2(triton.cdiv(size, BLOCK)) * BLOCK
    num_programs = num_rows if gate is None else min(num_rows, _num_programs(device))
    if num_rows:
        with torch.cuda.device_of(weight):
            add_norm_kernel[(num_programs,)](
                hidden=before,
                first=first,
                second=second,
                weight=weight,
                down=down,
                up=up,
                sums=sums,
                normed=normed,
                values=normed if rounded is None else rounded.values,
                scales=normed if rounded is None else rounded.scales,
                num_tokens=num_tokens,
                num_rows=num_rows,
                hidden_stride=before.stride(0),
                **part_strides("first", first),
                **part_strides("second", second),
                eps=eps,
                SIZE=size,
                PADDED=padded_size,
                RANK=rank,
                # Rows of a gate's matrices that a program holds at a time: all RANK of them, if they fit.
                RANK_STEP=max(1, min(triton.next_power_of_2(max(1, rank)), GATE_NUMBERS // padded_size)),
                HAS_HIDDEN=hidden is not None,
                FIRST_PARTS=len(first) if added else 0,
                SECOND_PARTS=len(second) if len(added) > 1 else 0,
                ROUNDS=rounding is not None,
                UE8M0=rounding is not None and rounding.ue8m0,
                BLOCK=BLOCK,
                LARGEST=FP8_MAX,
                SMALLEST_PEAK=SMALLEST_PEAK,
                num_warps=num_warps,
                # Without a gate two programs, of 32 threads a warp, are to fit a multiprocessor. One with a
                # gate may take all registers.
                maxnreg=None if rank else REGISTERS // (2 * 32 * num_warps),
                **launch_options(device),  # among them OVERLAPS
            )
    return sums, Activations(normed, rounded)


@functools.cache
def _num_programs(device: torch.device) -> int:
    """Return the most programs of a launch with a gate: one a multiprocessor, because each keeps matrices in
    its registers. Triton's interpreter gets two, so that tests see several."""
    return num_multiprocessors(device) if device.type == "cuda" else 2


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def add_norm_kernel(
    hidden,
    first,
    second,
    weight,
    down,
    up,
    sums,
    normed,
    values,
    scales,
    num_tokens,
    num_rows,
    hidden_stride,
    first_part_stride,
    first_row_stride,
    second_part_stride,
    second_row_stride,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,
    FIRST_PARTS: tl.constexpr,
    SECOND_PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    UE8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add and norm some rows, one after the other. Rows from ``num_tokens`` on are padding of the fp8
    result alone, and become zeros there.

    ``first``, ``second``: the additions to ``hidden``, each in parts; with 0 parts there is none. OVERLAPS:
    whether the kernel may start before the preceding one has ended. A gate that fits into registers is then
    read meanwhile.
    """
    at = tl.arange(0, PADDED)
    is_there = at < SIZE
    factor = tl.load(weight + at, mask=is_there, other=0.0)
    rank = tl.arange(0, RANK_STEP)[:, None]
    if RANK > 0 and RANK <= RANK_STEP:
        kept_down, kept_up = gate_rows(down, up, rank, at, is_there, RANK, SIZE)
    begin(OVERLAPS)
    dtype: tl.constexpr = normed.dtype.element_ty
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        is_token = is_there & (row < num_tokens)
        if HAS_HIDDEN:
            x = tl.load(hidden + row * hidden_stride + at, mask=is_token, other=0.0)
        else:
            x = tl.zeros((PADDED,), dtype=dtype)
        if FIRST_PARTS > 0:
            start = first + row * first_row_stride
            total = block_sum(start, first_part_stride, at, is_token, FIRST_PARTS, dtype)
            if SECOND_PARTS > 0:
                start = second + row * second_row_stride
                total += block_sum(start, second_part_stride, at, is_token, SECOND_PARTS, dtype)
            x = (x.to(tl.float32) + total).to(dtype)
            tl.store(sums + row * SIZE + at, x, mask=is_token)
        wide = x.to(tl.float32)
        mean_square = tl.sum(wide * wide) / SIZE
        result = (wide * tl.rsqrt(mean_square + eps) * factor.to(tl.float32)).to(dtype)
        if RANK > 0:
            y = result.to(tl.float32)
            if RANK <= RANK_STEP:
                logits = gate_logits(y, kept_down, kept_up, dtype)
            else:
                logits = tl.zeros((PADDED,), dtype=tl.float32)
                for first_rank in range(0, RANK, RANK_STEP):
                    some_down, some_up = gate_rows(down, up, first_rank + rank, at, is_there, RANK, SIZE)
                    logits += gate_logits(y, some_down, some_up, dtype)
            result = (y * tl.sigmoid(logits.to(dtype).to(tl.float32))).to(dtype)
        tl.store(normed + row * SIZE + at, result, mask=is_token)
        if ROUNDS:
            blocks = tl.reshape(result.to(tl.float32), (PADDED // BLOCK, BLOCK))
            rounded, scale = round_blocks(blocks, 1, LARGEST, SMALLEST_PEAK, UE8M0)
            tl.store(values + row * SIZE + at, tl.reshape(rounded, (PADDED,)), mask=is_there)
            block = tl.arange(0, PADDED // BLOCK)[:, None]
            tl.store(scales + block.to(tl.int64) * num_rows + row, scale, mask=block * BLOCK < SIZE)


@triton.jit
def block_sum(start, part_stride, at, mask, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Return the sum of an addition's parts. Parts in float32 are those of one product: their sum is rounded
    to ``dtype``, as an undivided product is."""
    total = sum_parts(start, part_stride, at, mask, PARTS)
    if start.dtype.element_ty == tl.float32:
        total = total.to(dtype).to(tl.float32)
    return total


@triton.jit
def gate_rows(down, up, rank, at, is_there, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Load the rows ``rank``, [rows, 1], of a gate's two matrices, each as [rows, columns]."""
    place = rank * SIZE + at[None, :]
    mask = (rank < RANK) & is_there[None, :]
    return tl.load(down + place, mask=mask, other=0.0), tl.load(up + place, mask=mask, other=0.0)


@triton.jit
def gate_logits(y, down, up, dtype: tl.constexpr):
    """Return what some rows of the gate's matrices add to the argument of its sigmoid, [columns]."""
    inner = tl.sum(down.to(tl.float32) * y[None, :], axis=1).to(dtype).to(tl.float32)
    inner = (inner / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
    return tl.sum(up.to(tl.float32) * inner[:, None], axis=0)
