"""The expert router: transformers' choice, and of equal scores the lowest experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AXK2Config, DeepseekV32Config, MistralLarge4TextConfig
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextTopkRouter

from hisparse_pd.core.model.families import FAMILIES
from hisparse_pd.core.model.feed_forward import ExpertRouter

TYPES: dict[str, tuple[Any, Any]] = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32TopkRouter),
    "axk2": (AXK2Config, AXK2TopkRouter),
    "mistral_large4": (MistralLarge4TextConfig, MistralLarge4TextTopkRouter),
}


def pair(
    num_experts: int,
    top_k: int,
    num_groups: int | None,
    num_chosen_groups: int | None,
    family: str = "deepseek_v32",
) -> tuple[Any, ExpertRouter]:
    config_type, module_type = TYPES[family]
    config = config_type(
        hidden_size=24, n_routed_experts=num_experts, num_experts_per_tok=top_k, n_group=num_groups,
        topk_group=num_chosen_groups, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    module = module_type(config)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    if hasattr(module, "e_score_correction_bias"):
        # Some of A.X-K2's experts score below the zero of those outside the chosen groups.
        lowest = -1.2 if family == "axk2" else -0.2
        module.e_score_correction_bias.copy_(torch.linspace(lowest, 0.2, num_experts))
    return module, ExpertRouter(module, FAMILIES[family])


@torch.inference_mode()
def test_chooses_and_weighs_as_transformers_does() -> None:
    hidden = torch.randn((50, 24), generator=torch.Generator().manual_seed(2))
    sizes_of: dict[str, list[tuple[int, int, int | None, int | None]]] = {
        "deepseek_v32": [(6, 2, 1, 1), (16, 4, 4, 2), (16, 3, 4, 4)],
        "axk2": [(6, 2, None, None), (16, 2, 4, 2), (16, 3, 4, 4)],
        "mistral_large4": [(6, 2, 1, 1), (16, 2, 4, 2), (16, 3, 4, 4)],
    }
    models = [pair(*sizes, family) for family, several in sizes_of.items() for sizes in several]
    for theirs, ours in models:
        (_, their_weights, their_ids), (weights, ids) = theirs(hidden), ours(hidden)
        nothing = torch.zeros(50, len(theirs.weight))
        found, wanted = nothing.scatter(1, ids, weights), nothing.scatter(1, their_ids, their_weights)
        torch.testing.assert_close(found, wanted)


@pytest.mark.I5
@torch.inference_mode()
def test_of_equal_scores_the_lowest_experts_and_groups() -> None:
    for num_tokens in (1, 3, 40):
        _, router = pair(16, 3, 4, 2)
        router.choice.bias.zero_()
        _, ids = router(torch.zeros(num_tokens, 24))
        assert ids.tolist() == [[0, 1, 2]] * num_tokens
        router.choice.bias[8:] = 1.0  # the last two groups
        _, ids = router(torch.zeros(num_tokens, 24))
        assert ids.tolist() == [[8, 9, 10]] * num_tokens
