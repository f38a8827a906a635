"""The RMS norms of hidden states, each with the residual sum before it and the rounding after it.

``core/model/dsa.py`` calls ``add_norm`` before each block (attention or feed-forward), behind the last layer
and in the draft layer. A block's addition to the hidden states comes in parts, [parts, num_tokens, size]: the
partial sums of a product that is split along its inner dimension (split-K), or the results of several
experts. Parts are added up in order. On a GPU all of this is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.kernels.fp8_rows import Activations, Rounding, round_rows
from hisparse_pd.kernels.row_math import linear, sigmoid, silu


@dataclass(frozen=True)
class NormGate:
    """A gate of low rank on a norm's result y: ``y * sigmoid(up(silu(down(y))))``."""

    down: Tensor
    """[rank, size]"""
    up: Tensor
    """[size, rank]; on a GPU in column-major order, because the kernel reads ``up.t()``, [rank, size]."""

    @classmethod
    def of(cls, down: Tensor, up: Tensor) -> NormGate:
        """Return a gate of two matrices in torch's usual layout, [rank, size] and [size, rank]."""
        return cls(down, up.t().contiguous().t() if up.is_cuda else up)

    def apply(self, y: Tensor) -> Tensor:
        """Return ``y`` [num_tokens, size] through the gate, in torch, rounded after each product."""
        factors = sigmoid(linear(silu(linear(y, self.down)), self.up).float())
        return (y * factors).to(y.dtype)


def add_parts(parts: Tensor) -> Tensor:
    """Return the sum [num_tokens, size] of [parts, num_tokens, size], in their dtype and order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def add_norm(
    hidden: Tensor | None,
    added: Sequence[Tensor],
    weight: Tensor,
    eps: float,
    rounding: Rounding | None,
    gate: NormGate | None = None,
) -> tuple[Tensor, Activations]:
    """Return the sum of ``hidden`` and all ``added``, and its RMS norm, with ``rounding`` also rounded.

    ``hidden``: [num_tokens, size] in the model's dtype, which ``weight`` [size] and ``gate`` have too; None
    means zeros. It is not changed. ``added``: parts [parts, num_tokens, size] of up to two blocks, in that
    dtype or float32.
    """
    first = added[0] if hidden is None else hidden
    if first.device.type == "cuda":
        from hisparse_pd.kernels.triton_norms import add_norm_triton

        matrices = None if gate is None else (gate.down, gate.up.t())
        return add_norm_triton(hidden, added, weight, eps, rounding, matrices)
    if added:
        total = add_parts(added[0])
        for parts in added[1:]:
            total = total + add_parts(parts)
        hidden = total if hidden is None else hidden + total
    assert hidden is not None
    normed = torch.nn.functional.rms_norm(hidden, weight.shape, weight, eps)
    if gate is not None:
        normed = gate.apply(normed)
    return hidden, Activations(normed, None if rounding is None else round_rows(normed, rounding))
