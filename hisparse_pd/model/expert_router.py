"""The router of a layer's experts: its logits, and the choice by them (``kernels.expert_choice``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.expert_choice import ExpertChoice, narrow_product


class ExpertRouter:
    """In the place of transformers' module of the same job, with its weights.

    That one leaves it to ``torch.topk`` who of equals is chosen.
    """

    def __init__(self, module: Any, score_outside_groups: float = float("-inf")) -> None:
        """``score_outside_groups``: what an expert's score counts where its group was not chosen."""
        self._weight: Tensor = module.weight
        self.top_k: int = module.top_k
        self.choice = ExpertChoice(
            module.e_score_correction_bias,
            module.top_k,
            module.num_group or 1,  # None: experts in no groups
            module.topk_group or 1,
            module.norm_topk_prob,
            module.routed_scaling_factor,
            score_outside_groups,
        )

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and ids, int64, [num_tokens, top_k] of ``hidden`` [num_tokens, hidden_size]."""
        return self.choice.choose(narrow_product(hidden, self._weight))
