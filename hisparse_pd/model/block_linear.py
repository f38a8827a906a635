"""Linear layers whose weights stay in the checkpoint's fp8: its values and the scales of their blocks.

Layers of the same input are one product (``JoinedLinears``, ``GatedMlp``): their input is rounded once, and a
matrix of few rows costs next to nothing beside a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.block_fp8 import BLOCK, scales_shape
from kernels.block_fp8 import DTYPE as FP8
from kernels.block_linear import block_linear, gated_block_linear


class BlockLinear(torch.nn.Module):
    """In the place of ``torch.nn.Linear`` without a bias. Its tensors have the checkpoint's names."""

    weight: Tensor
    """float8_e4m3fn [out_features, in_features]"""
    weight_scale_inv: Tensor
    """float32 [blocks down, blocks across]"""

    def __init__(self, in_features: int, out_features: int, *, ue8m0: bool = False) -> None:
        """The tensors are for the loader to fill in. ``ue8m0``: see ``kernels.fp8_rows``."""
        super().__init__()
        self.ue8m0 = ue8m0
        shape = (out_features, in_features)
        self.register_buffer("weight", torch.empty(shape, dtype=FP8))
        self.register_buffer("weight_scale_inv", torch.empty(scales_shape(*shape), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., in_features]. See ``kernels.block_linear``."""
        rows = x.reshape(-1, x.shape[-1])
        result = block_linear(rows, self.weight, self.weight_scale_inv, ue8m0=self.ue8m0)
        return result.view(*x.shape[:-1], -1)


class JoinedLinears:
    """Layers of the same input, in fp8 or not: one product where all are, and their blocks do not overlap."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self._parts = list(parts)
        self._rows: list[int] = [len(part.weight) for part in parts]  # type: ignore[arg-type]
        self._joined = _join(parts) if can_join(parts) else None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """The results of ``x`` [num_tokens, in_features], parts of one tensor maybe."""
        if self._joined is None:
            return tuple(part(x) for part in self._parts)
        return torch.split(self._joined(x), self._rows, dim=-1)

    def first(self, x: Tensor) -> Tensor:
        """The result of the first layer alone."""
        result: Tensor = self._parts[0](x)
        return result


class GatedMlp(torch.nn.Module):
    """``down(silu(gate(x)) * up(x))`` in two products, of layers that ``can_join``."""

    def __init__(self, mlp: Any) -> None:
        """``mlp``: transformers' module of the same job."""
        super().__init__()
        self.gate_up = _join((mlp.gate_proj, mlp.up_proj))
        self.down_proj: BlockLinear = mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., hidden_size]"""
        gate_up = self.gate_up(x.reshape(-1, x.shape[-1]))
        down = self.down_proj
        result = gated_block_linear(gate_up, down.weight, down.weight_scale_inv, ue8m0=down.ue8m0)
        return result.view(x.shape)


def can_join(parts: Sequence[torch.nn.Module]) -> bool:
    """All are in fp8, and each begins where a block does."""
    rows = [len(part.weight) for part in parts if isinstance(part, BlockLinear)]
    return len(rows) == len(parts) and not any(number % BLOCK for number in rows[:-1])


def gated_mlp(mlp: Any) -> Any:
    """``mlp``, or a GatedMlp in its place if its layers are in fp8."""
    layers = (mlp.gate_proj, mlp.up_proj)
    return GatedMlp(mlp) if can_join(layers) and isinstance(mlp.down_proj, BlockLinear) else mlp


def _join(parts: Sequence[Any]) -> BlockLinear:
    """One layer of all rows; the parts' tensors become views of its own."""
    with torch.device("meta"):
        num_rows = sum(len(part.weight) for part in parts)
        joined = BlockLinear(parts[0].weight.shape[1], num_rows, ue8m0=parts[0].ue8m0)
    for name in ("weight", "weight_scale_inv"):
        tensors = [getattr(part, name) for part in parts]
        together = torch.cat(tensors)
        setattr(joined, name, together)
        starts = [0, *torch.tensor([len(tensor) for tensor in tensors]).cumsum(0).tolist()]
        for part, (first, end) in zip(parts, pairwise(starts), strict=True):
            setattr(part, name, together[first:end])
    return joined
