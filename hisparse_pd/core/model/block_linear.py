"""The model's linear layers, in few launches, in its dtype or in the checkpoint's fp8 with scales of blocks.

The loader puts ``BlockLinear`` in the place of fp8 layers; attention and feed-forward join layers and compute
products with ``parts_of``. A product comes in parts, [parts, num_tokens, columns], which the next kernel adds
up (``kernels.block_linear``). Layers of the same input are one product (``JoinedLinears``, ``GatedMlp``):
their input is rounded once, and a matrix of few rows costs next to nothing beside a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK, scales_shape
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.block_linear import block_product, dense_product, gated
from hisparse_pd.kernels.fp8_rows import Activations, Rounding, round_rows
from hisparse_pd.kernels.norms import add_parts


class BlockLinear(torch.nn.Module):
    """An fp8 replacement of ``torch.nn.Linear`` without a bias. Its tensors have the checkpoint's names."""

    weight: Tensor
    """float8_e4m3fn [out_features, in_features]"""
    weight_scale_inv: Tensor
    """float32 [blocks down, blocks across]"""

    def __init__(self, in_features: int, out_features: int, *, ue8m0: bool = False) -> None:
        """The loader fills the tensors. ``ue8m0``: see ``kernels.fp8_rows``."""
        super().__init__()
        self.ue8m0 = ue8m0
        shape = (out_features, in_features)
        self.register_buffer("weight", torch.empty(shape, dtype=FP8))
        self.register_buffer("weight_scale_inv", torch.empty(scales_shape(*shape), dtype=torch.float32))

    @property
    def rounding(self) -> Rounding:
        """The rounding of the input."""
        return Rounding(self.ue8m0)

    def parts(self, x: Activations) -> Tensor:
        """Return the product in parts, [parts, num_tokens, out_features] (``kernels.block_linear``)."""
        rounded = x.rounded or round_rows(x.dense, self.rounding)
        return block_product(rounded, x.num_tokens, x.dense.dtype, self.weight, self.weight_scale_inv)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., in_features]."""
        return product_of(self, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def product_of(layer: Any, x: Tensor) -> Tensor:
    """Return the product of ``x`` [num_tokens, in_features]: [num_tokens, out_features], in the same
    dtype."""
    return add_parts(parts_of(layer, Activations(x))).to(x.dtype)


def parts_of(layer: Any, x: Activations) -> Tensor:
    """Return the result of a linear layer or gated MLP, in fp8 or not: [parts, num_tokens, out_features]."""
    if isinstance(layer, torch.nn.Linear) and layer.bias is None:
        return dense_product(x.dense, layer.weight)
    result: Tensor = layer.parts(x) if isinstance(layer, BlockLinear | GatedMlp) else layer(x.dense)[None]
    return result


def rounding_of(*layers: Any) -> Rounding | None:
    """Return how the common input of these layers is rounded; None where none of them is in fp8."""
    roundings = (layer.rounding for layer in layers if isinstance(layer, BlockLinear | GatedMlp))
    return next((rounding for rounding in roundings if rounding is not None), None)


class JoinedLinears:
    """Layers of the same input, in fp8 or not; they are one product if they ``can_join``."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self._parts = list(parts)
        self._rows: list[int] = [len(part.weight) for part in parts]  # type: ignore[arg-type]
        self.one_matrix = _join(parts) if can_join(parts) else None

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of the input; None where no layer is in fp8."""
        return rounding_of(*self._parts)

    def __call__(self, x: Activations) -> tuple[Tensor, ...]:
        """Return the results, each [parts, num_tokens, out_features]; they may be sections of one tensor."""
        if self.one_matrix is None:
            return tuple(parts_of(part, x) for part in self._parts)
        return torch.split(parts_of(self.one_matrix, x), self._rows, dim=-1)

    def first(self, x: Activations) -> Tensor:
        """Return the result of the first layer alone."""
        return parts_of(self._parts[0], x)


class GatedMlp(torch.nn.Module):
    """The MLP ``down(silu(gate(x)) * up(x))`` in two products; gate and up must be layers that
    ``can_join``."""

    def __init__(self, mlp: Any) -> None:
        """``mlp``: transformers' module that this one replaces."""
        super().__init__()
        self.gate_up = _join((mlp.gate_proj, mlp.up_proj))
        self.down_proj: Any = mlp.down_proj

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of the input; None where the layers are not in fp8."""
        return rounding_of(self.gate_up)

    def parts(self, x: Activations) -> Tensor:
        """Return the result in parts, [parts, num_tokens, hidden_size] (``kernels.block_linear``)."""
        gate_up = parts_of(self.gate_up, x)
        return parts_of(self.down_proj, gated(gate_up, x.dense.dtype, rounding_of(self.down_proj)))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., hidden_size]."""
        return product_of(self, x.reshape(-1, x.shape[-1])).view(x.shape)


def can_join(parts: Sequence[Any]) -> bool:
    """Whether layers can be one product: all in fp8, each beginning at a block; or all on a GPU in the
    model's dtype.

    On a CPU, layers in the model's dtype stay apart, because a product's bits may depend on the number of the
    matrix' rows.
    """
    if all(isinstance(part, BlockLinear) for part in parts):
        return not any(len(part.weight) % BLOCK for part in parts[:-1])
    return all(type(part) is torch.nn.Linear and part.bias is None and part.weight.is_cuda for part in parts)


def gated_mlp(mlp: Any) -> Any:
    """Return a GatedMlp instead of ``mlp`` if its first layers ``can_join``, else ``mlp`` itself."""
    is_linear = isinstance(mlp.down_proj, BlockLinear | torch.nn.Linear)
    return GatedMlp(mlp) if can_join((mlp.gate_proj, mlp.up_proj)) and is_linear else mlp


def _join(parts: Sequence[Any]) -> Any:
    """Return one layer with the rows of all ``parts``, whose tensors become views of its own."""
    num_rows, first = sum(len(part.weight) for part in parts), parts[0]
    with torch.device("meta"):
        if isinstance(first, BlockLinear):
            joined: Any = BlockLinear(first.weight.shape[1], num_rows, ue8m0=first.ue8m0)
        else:
            joined = torch.nn.Linear(first.weight.shape[1], num_rows, bias=False)
    for name in first.state_dict():
        tensors = [getattr(part, name).detach() for part in parts]
        together = torch.cat(tensors)
        _put(joined, name, together)
        starts = [0, *torch.tensor([len(tensor) for tensor in tensors]).cumsum(0).tolist()]
        for part, (start, end) in zip(parts, pairwise(starts), strict=True):
            _put(part, name, together[start:end])
    return joined


def _put(layer: Any, name: str, tensor: Tensor) -> None:
    is_parameter = isinstance(getattr(layer, name), torch.nn.Parameter)
    setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
