"""The second half of a layer: an expert that every token has, apart and as one of the routed ones."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model.block_linear import BlockLinear
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.families import FAMILIES
from hisparse_pd.core.model.feed_forward import FeedForward
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.block_fp8 import quantize
from hisparse_pd.kernels.fp8_rows import Activations

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 256, 128


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / math.sqrt(shape[-1])


def linear(rows: int, columns: int, *, is_fp8: bool) -> Any:
    if is_fp8:
        layer = BlockLinear(columns, rows)
        layer.weight, layer.weight_scale_inv = quantize(draw(rows, columns))
        return layer
    dense = torch.nn.Linear(columns, rows, bias=False)
    dense.weight = torch.nn.Parameter(draw(rows, columns), requires_grad=False)
    return dense


class Shared(torch.nn.Module):
    def __init__(self, inner: int, *, is_fp8: bool) -> None:
        super().__init__()
        self.gate_proj = linear(inner, HIDDEN, is_fp8=is_fp8)
        self.up_proj = linear(inner, HIDDEN, is_fp8=is_fp8)
        self.down_proj = linear(HIDDEN, inner, is_fp8=is_fp8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


def layer_of(*, has_room: bool, is_fp8: bool, shared_is_fp8: bool) -> FeedForward:
    experts = RoutedExperts(
        NUM_EXPERTS, HIDDEN, INNER, FP8 if is_fp8 else torch.float32, torch.device("cpu"), has_room=has_room
    )
    for matrices in (experts.gate_up, experts.down):
        for expert in range(NUM_EXPERTS):
            for number in range(matrices.values.shape[1]):
                matrix = draw(*matrices.values.shape[2:]).roll(expert + 10 * number, 0)
                if matrices.scales is None:
                    matrices.values[expert, number] = matrix
                else:
                    matrices.values[expert, number], matrices.scales[expert, number] = quantize(matrix)
    mlp = torch.nn.Module()
    gate: Any = SimpleNamespace(
        weight=draw(NUM_EXPERTS, HIDDEN),
        top_k=TOP_K,
        num_group=None,
        topk_group=None,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        e_score_correction_bias=torch.zeros(NUM_EXPERTS),
    )
    mlp.gate = gate
    mlp.experts = experts
    mlp.shared_experts = Shared(INNER, is_fp8=shared_is_fp8)
    return FeedForward(mlp, FAMILIES["axk2"], SideStream(torch.device("cpu")))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_an_expert_that_every_token_has_may_be_one_of_them(is_fp8: bool) -> None:
    x = Activations(draw(5, HIDDEN) * HIDDEN**0.5)
    apart = layer_of(has_room=False, is_fp8=is_fp8, shared_is_fp8=is_fp8)
    expected = apart(x)
    assert len(expected) == 2
    among_them = layer_of(has_room=True, is_fp8=is_fp8, shared_is_fp8=is_fp8)
    assert among_them.rounding == apart.rounding
    (found,) = among_them(x)
    # Apart, an fp8 one's activations are rounded, which a CPU's routed experts do not do.
    tolerance = 0.05 if is_fp8 else 1e-6
    total = sum(parts.sum(dim=0) for parts in expected)
    assert (found.sum(dim=0) - total).norm() <= tolerance * torch.as_tensor(total).norm()


def test_it_stays_apart_where_its_weights_are_not_as_theirs() -> None:
    layer = layer_of(has_room=True, is_fp8=False, shared_is_fp8=True)
    assert len(layer(Activations(draw(5, HIDDEN)))) == 2
