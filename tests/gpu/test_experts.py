"""Routed experts on a GPU: against the reference on the CPU, and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
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
from hisparse_pd.kernels.expert_routing import ExpertMatrices, Routing, rounds
from hisparse_pd.kernels.experts import run_experts
from hisparse_pd.kernels.fp8_rows import Activations
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu

HOME = torch.device(DEVICE, 0)
SHAPES = [(8, 2, 160, 136), (64, 8, 1024, 512), (7, 3, 128, 2048)]
"""Experts, experts of a token, hidden size and size inside an expert."""


def draw_matrices(shape: tuple[int, int, int, int], *, is_fp8: bool) -> ExpertMatrices:
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / shape[-1] ** 0.5
    if not is_fp8:
        return ExpertMatrices(dense, None)
    values, scales = zip(*(quantize(matrix) for matrix in dense.flatten(0, 1)), strict=True)
    return ExpertMatrices(*(torch.stack(parts).unflatten(0, shape[:2]) for parts in (values, scales)))


def draw_tokens(num_tokens: int, num_experts: int, top_k: int, hidden_size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn((num_tokens, hidden_size), generator=generator)
    popular = torch.rand((num_tokens, num_experts), generator=generator) ** 4
    return hidden, popular.topk(top_k).indices, torch.rand((num_tokens, top_k), generator=generator)


def on_gpu(
    gate_up: ExpertMatrices, down: ExpertMatrices, dtype: torch.dtype, *, has_room: bool = False
) -> RoutedExperts:
    num_experts, _, inner_size, hidden_size = gate_up.values.shape
    of_weights = dtype if gate_up.scales is None else FP8
    experts = RoutedExperts(num_experts, hidden_size, inner_size, of_weights, HOME, has_room=has_room)
    for target, source in ((experts.gate_up, gate_up), (experts.down, down)):
        target.values[:num_experts].copy_(source.values)
        if target.scales is not None and source.scales is not None:
            target.scales[:num_experts].copy_(source.scales)
    return experts


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 700])
def test_is_as_on_the_cpu(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, is_fp8: bool
) -> None:
    num_experts, top_k, hidden_size, inner_size = shape
    gate_up = draw_matrices((num_experts, 2, inner_size, hidden_size), is_fp8=is_fp8)
    down = draw_matrices((num_experts, 1, hidden_size, inner_size), is_fp8=is_fp8)
    hidden, expert_ids, weights = draw_tokens(num_tokens, num_experts, top_k, hidden_size)
    hidden = hidden.to(dtype)
    experts = on_gpu(gate_up, down, dtype)

    found = experts(hidden.to(HOME), expert_ids.to(HOME), weights.to(HOME))

    matrices = [ExpertMatrices(m.values if is_fp8 else m.values.to(dtype), m.scales) for m in (gate_up, down)]
    exact_gate_up, exact_down = matrices
    exact = Routing.plan(expert_ids, weights, num_experts)
    expected = run_experts(hidden.float(), exact, exact_gate_up, exact_down, 0).sum(dim=1)
    is_rounded = rounds(hidden.to(HOME), exact_gate_up)
    assert is_rounded == (is_fp8 and dtype == torch.bfloat16)
    routing = Routing.plan(expert_ids, weights, num_experts, is_rounded=is_rounded)
    rounded = run_experts(hidden, routing, exact_gate_up, exact_down, 0).sum(dim=1).float()
    # The error may be that of the same dtype on the CPU or twice that: sums have another order, but are
    # rounded at the same places.
    tolerance = 1e-4 + 2 * float((rounded - expected).abs().max())
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=tolerance)
    # Both are rounded to fp8 at the same places, so only numbers between two fp8 values differ.
    assert (found.cpu().float() - rounded).norm() <= 0.015 * rounded.norm()


@pytest.mark.I5
@pytest.mark.parametrize("ue8m0", [False, True])
def test_many_rows_have_the_bits_of_few(ue8m0: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens are multiplied by another kernel on Hopper, or in larger tiles; experts of another rank's
    are left out."""
    from hisparse_pd.kernels import triton_experts

    num_experts, top_k, hidden_size, inner_size = 8, 2, 1024, 384
    gate_up, down = (
        replace(draw_matrices(shape, is_fp8=True), ue8m0=ue8m0)
        for shape in ((num_experts, 2, inner_size, hidden_size), (num_experts, 1, hidden_size, inner_size))
    )
    experts = on_gpu(gate_up, down, torch.bfloat16)
    hidden, expert_ids, weights = (
        part.to(HOME) for part in draw_tokens(3001, num_experts, top_k, hidden_size)
    )
    hidden = hidden.to(torch.bfloat16)

    def results_of(tokens: slice, experts_here: slice) -> Tensor:
        ids, of_ids = expert_ids[tokens], weights[tokens]
        routing = Routing.plan(ids, of_ids, num_experts, is_rounded=True)
        gate_up_here, down_here = (
            replace(each, values=each.values[experts_here], scales=each.scales[experts_here], ue8m0=ue8m0)
            for each in (experts.gate_up, experts.down)
            if isinstance(each, ExpertMatrices) and each.scales is not None
        )
        return triton_experts.run_experts_triton(
            hidden[tokens], routing, gate_up_here, down_here, experts_here.start
        )

    for experts_here in (slice(0, num_experts), slice(3, 6)):
        many = results_of(slice(0, 3001), experts_here)
        with monkeypatch.context() as patches:
            patches.setattr(triton_experts, "takes_groups", lambda *_: False)
            assert torch.equal(many, results_of(slice(0, 3001), experts_here))
        for some in (slice(0, 1), slice(17, 90), slice(2900, 3001)):
            assert torch.equal(many[some], results_of(some, experts_here))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_does_the_same_in_graphs(is_fp8: bool) -> None:
    """Two graphs over the same experts are replayed in turns with other tokens, as decode steps are.

    Capturing the second graph returns unused memory to the driver, none of which may belong to the first one.
    """
    num_experts, top_k, hidden_size, inner_size = 16, 4, 512, 256
    gate_up = draw_matrices((num_experts, 2, inner_size, hidden_size), is_fp8=is_fp8)
    down = draw_matrices((num_experts, 1, hidden_size, inner_size), is_fp8=is_fp8)
    dtype = torch.bfloat16
    experts = on_gpu(gate_up, down, dtype)
    graphs = {}
    for num_tokens in (48, 3):
        inputs = [part.to(HOME) for part in draw_tokens(num_tokens, num_experts, top_k, hidden_size)]
        inputs[0] = inputs[0].to(dtype)
        experts(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = experts(*inputs)
        graphs[num_tokens] = graph, inputs, result
    for turn in range(6):
        for num_tokens, (graph, inputs, result) in graphs.items():
            other = draw_tokens(num_tokens, num_experts, top_k, hidden_size)
            for target, source in zip(inputs, other, strict=True):
                target.copy_(source.roll(turn, 0))
            graph.replay()
            expected = experts(*inputs)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_an_expert_that_every_token_has_is_one_of_them(num_tokens: int, is_fp8: bool) -> None:
    """The same layer gives the same results with the shared expert among the routed ones and without."""
    x = draw_input(num_tokens)
    results = []
    for has_room in (False, True):
        parts = layer_with_shared(is_fp8=is_fp8, has_room=has_room)(x)
        assert len(parts) == (1 if has_room else 2)
        results.append(torch.cat([part.double() for part in parts]).sum(dim=0))
    assert (results[1] - results[0]).norm() <= 0.01 * results[0].norm()


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_shared_expert_beside_the_routed_ones_does_the_same_in_graphs(num_tokens: int) -> None:
    layer, x = layer_with_shared(is_fp8=True, has_room=False), draw_input(num_tokens)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x)
    for turn in range(20):
        x.dense.copy_(x.dense.roll(1, 0) * (-1) ** turn)
        graph.replay()
        for part, expected in zip(found, layer(x), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=0)


LAYER_SIZE = 512


def draw_input(num_tokens: int) -> Activations:
    return Activations(draw_tokens(num_tokens, 16, 4, LAYER_SIZE)[0].to(HOME, torch.bfloat16))


def layer_with_shared(*, is_fp8: bool, has_room: bool) -> FeedForward:
    num_experts, top_k, inner_size = 16, 4, 512
    gate_up = draw_matrices((num_experts, 2, inner_size, LAYER_SIZE), is_fp8=is_fp8)
    down = draw_matrices((num_experts, 1, LAYER_SIZE, inner_size), is_fp8=is_fp8)
    of_gate = torch.randn((num_experts, LAYER_SIZE), generator=torch.Generator().manual_seed(1)).to(HOME)
    mlp: Any = torch.nn.Module()
    mlp.gate = SimpleNamespace(
        weight=of_gate / LAYER_SIZE**0.5, top_k=top_k, num_group=None, topk_group=None,
        norm_topk_prob=True, routed_scaling_factor=2.5,
        e_score_correction_bias=torch.zeros(num_experts, device=HOME),
    )  # fmt: skip
    mlp.experts = on_gpu(gate_up, down, torch.bfloat16, has_room=has_room)
    mlp.shared_experts = shared_mlp(LAYER_SIZE, inner_size, is_fp8=is_fp8)
    return FeedForward(mlp, FAMILIES["axk2"], SideStream(HOME))


def shared_mlp(hidden_size: int, inner_size: int, *, is_fp8: bool) -> torch.nn.Module:
    mlp = torch.nn.Module()
    generator = torch.Generator().manual_seed(5)
    for name, rows, columns in (
        ("gate_proj", inner_size, hidden_size),
        ("up_proj", inner_size, hidden_size),
        ("down_proj", hidden_size, inner_size),
    ):
        weight = torch.randn((rows, columns), generator=generator).to(HOME) / columns**0.5
        if is_fp8:
            layer: torch.nn.Module = BlockLinear(columns, rows)
            layer.weight, layer.weight_scale_inv = quantize(weight)
        else:
            layer = torch.nn.Linear(columns, rows, bias=False, device=HOME, dtype=torch.bfloat16)
            layer.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        mlp.add_module(name, layer)
    return mlp
