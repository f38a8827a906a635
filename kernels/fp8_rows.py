"""Activations in fp8: each row in blocks of 128 columns, with a float32 scale of their own.

So a row's numbers depend on that row alone. Scales are [blocks across, rows], as products read them: a
block's scales of all rows side by side. With ``ue8m0`` they are rounded up to powers of two, which is what a
checkpoint whose ``scale_fmt`` is that was trained with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.block_fp8 import BLOCK, DTYPE, SMALLEST_PEAK
from kernels.fp8 import FP8_MAX, next_power_of_two
from kernels.row_math import silu


def quantize_rows(x: Tensor, row_multiple: int = 1, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """``x`` in fp8: the largest of a block becomes 448, or with ``ue8m0`` more than 224. One launch on a GPU.

    ``x``: [rows, columns], floating, rows contiguous, on any device; their number is rounded up to
    ``row_multiple`` with zeros. Returns float8_e4m3fn [rows, columns] and float32 [blocks across, rows].
    """
    num_rows = -(-len(x) // row_multiple) * row_multiple
    if x.device.type == "cuda":
        from kernels.triton_fp8 import quantize_rows_triton

        return quantize_rows_triton(x, num_rows, ue8m0=ue8m0)
    blocks = -(-x.shape[1] // BLOCK)
    padded = x.new_zeros((num_rows, blocks * BLOCK), dtype=torch.float32)
    padded[: len(x), : x.shape[1]] = x
    peaks = padded.view(num_rows, blocks, BLOCK).abs().amax(dim=2)
    scales = peaks.clamp(min=SMALLEST_PEAK) / FP8_MAX
    if ue8m0:
        scales = next_power_of_two(scales)
    values = (padded.view(num_rows, blocks, BLOCK) / scales[:, :, None]).view_as(padded)[:, : x.shape[1]]
    return values.to(DTYPE), scales.t().contiguous()


def quantize_gated(gate_up: Tensor, row_multiple: int = 1, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` of ``silu(gate) * up``, which is float32 until then. One launch on a GPU.

    ``gate_up``: [rows, 2 * columns], rows contiguous.
    """
    if gate_up.device.type == "cuda":
        from kernels.triton_fp8 import quantize_gated_triton

        num_rows = -(-len(gate_up) // row_multiple) * row_multiple
        return quantize_gated_triton(gate_up, num_rows, ue8m0=ue8m0)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantize_rows(silu(gate) * up, row_multiple, ue8m0=ue8m0)


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """What they were made of, as far as they hold it, in float32."""
    spread = scales.t().repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * spread
