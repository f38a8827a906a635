"""The choice of experts: logits, choice and plan, against the same in torch on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hisparse_pd.kernels.expert_choice import ExpertChoice, narrow_product
from hisparse_pd.kernels.expert_routing import Routing
from tests.gpu.support import DEVICE, needs_gpu, no_waiting

pytestmark = needs_gpu

ROWS = [1, 3, 16, 17, 63, 200]
CHOICES = [(256, 8, 8, 4), (32, 1, 1, 1), (160, 6, 1, 1), (14, 3, 2, 1), (16, 3, 4, 4)]
"""Experts, experts of a token, groups and open groups."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 7168), (64, 7168), (5, 130)])
@pytest.mark.parametrize("num_tokens", [*ROWS, 700])
def test_narrow_products_are_those_of_float32(
    num_tokens: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(num_tokens)
    x = torch.randn((num_tokens, shape[1]), device=DEVICE, generator=generator).bfloat16()
    matrix = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
    with no_waiting():
        found = narrow_product(x, matrix).double().sum(dim=0)
    expected = x.double() @ matrix.double().t()
    bound = 2**-20 * (x.double().abs() @ matrix.double().abs().t())
    assert torch.all((found - expected).abs() <= bound)
    wide = narrow_product(x.float(), matrix).double().sum(dim=0)
    assert torch.all((wide - expected).abs() <= bound)


@pytest.mark.parametrize(
    ("normalizes", "outside", "is_softmax"),
    [(True, float("-inf"), False), (False, 0.0, False), (True, 0.0, True)],
)
@pytest.mark.parametrize("sizes", CHOICES)
@pytest.mark.parametrize("num_tokens", [*ROWS, 700])
def test_chooses_as_on_the_cpu(
    num_tokens: int, sizes: tuple[int, ...], normalizes: bool, outside: float, is_softmax: bool
) -> None:
    """The choice is the same for equal scores too: logits are rounded, and some rows have equal logits."""
    num_experts, top_k, num_groups, num_chosen_groups = sizes
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn((3, num_tokens, num_experts), generator=generator).round()
    logits[:, ::3] = 0
    bias = torch.randn(num_experts, generator=generator).round() / 8
    has_shared = num_tokens % 2 == 1
    choice = ExpertChoice(
        bias, top_k, num_groups, num_chosen_groups, normalizes, 2.5, outside, is_softmax, has_shared
    )
    weights, ids = choice.choose(logits)
    on_gpu, logits_on_gpu = replace(choice, bias=bias.to(DEVICE)), logits.to(DEVICE)
    with no_waiting():
        found, found_ids = on_gpu.choose(logits_on_gpu)
    # A sigmoid's last bit may differ, so scores that are equal on one side may differ on the other.
    is_same = (found_ids.cpu() == ids).all(dim=1)
    assert is_same[::3].all()
    assert is_same.float().mean() >= 0.9
    torch.testing.assert_close(found.cpu()[is_same], weights[is_same], rtol=1e-5, atol=0)


def test_ids_are_different_experts_whatever_comes() -> None:
    logits = torch.full((1, 4, 256), torch.nan, device=DEVICE)
    logits[0, 1] = torch.inf
    logits[0, 2] = -torch.inf
    choice = ExpertChoice(torch.zeros(256, device=DEVICE), 8, 8, 4, True, 1.0)
    ids = choice.choose(logits)[1].tolist()
    assert ids == [list(range(8))] * 4


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("sizes", CHOICES)
@pytest.mark.parametrize("num_tokens", [*ROWS, 700])
def test_plans_as_on_the_cpu(num_tokens: int, sizes: tuple[int, ...], is_rounded: bool) -> None:
    num_experts, top_k, *_ = sizes
    generator = torch.Generator().manual_seed(num_tokens)
    popular = torch.rand((num_tokens, num_experts), generator=generator) ** 4
    ids = popular.topk(top_k).indices
    ids[::5] = num_experts  # padding
    weights = torch.rand((num_tokens, top_k), generator=generator)
    expected = Routing.plan(ids, weights, num_experts, is_rounded=is_rounded)
    ids, weights = ids.to(DEVICE), weights.to(DEVICE)
    with no_waiting():
        found = Routing.plan(ids, weights, num_experts, is_rounded=is_rounded)
    for name in ("order", "starts", "tile_starts", "tile_experts", "weights"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    assert (found.top_k, found.tile_rows) == (expected.top_k, expected.tile_rows)
