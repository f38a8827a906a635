"""The router of a layer's experts: its logits, and the choice by them (``kernels.expert_choice``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hisparse_pd.model.families import Family
from kernels.expert_choice import ExpertChoice, narrow_product


class ExpertRouter:
    """In the place of transformers' module of the same job, with its weights.

    That one leaves it to ``torch.topk`` who of equals is chosen.
    """

    def __init__(self, module: Any, family: Family) -> None:
        self._weight: Tensor = module.weight
        by_softmax = family.chooses_experts_by_softmax
        self.top_k: int = module.top_k
        self.choice = ExpertChoice(
            self._weight.new_zeros(len(self._weight)) if by_softmax else module.e_score_correction_bias,
            module.top_k,
            module.num_group or 1,  # None: experts in no groups
            module.topk_group or 1,
            by_softmax or module.norm_topk_prob,
            module.routed_scaling_factor,
            family.score_outside_groups,
            by_softmax,
        )

    def with_shared(self) -> None:
        """From now on every token has one more expert, behind all others."""
        self.choice = replace(self.choice, has_shared=True)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and ids, int64, [num_tokens, top_k] of ``hidden`` [num_tokens, hidden_size]; one
        more of each behind ``with_shared``."""
        return self.choice.choose(narrow_product(hidden, self._weight))
