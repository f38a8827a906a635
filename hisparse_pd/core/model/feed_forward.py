"""The second half of a decoder layer: a gated MLP, or routed experts beside one that every token has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.core.model.block_linear import gated_mlp, parts_of, rounding_of
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.families import Family
from hisparse_pd.kernels.expert_choice import ExpertChoice, narrow_product
from hisparse_pd.kernels.fp8_rows import Activations
from hisparse_pd.kernels.row_math import silu


class FeedForward:
    """transformers' MLP or MoE block, with our router and experts; a gated MLP is few launches on a GPU."""

    def __init__(self, mlp: Any, family: Family) -> None:
        for part in mlp.modules():
            if hasattr(part, "act_fn"):
                part.act_fn = _Silu()
        self.experts: RoutedExperts | None = getattr(mlp, "experts", None)
        """None in a dense layer."""
        self.router = ExpertRouter(mlp.gate, family) if hasattr(mlp, "gate") else None
        every = mlp if self.router is None else mlp.shared_experts
        self._mlp: Any = None
        """None: it is one of the routed experts, which have its form."""
        if self.router is not None and self.experts is not None and self.experts.take_shared(every):
            self.router.with_shared()
            self.rounding = rounding_of(every.gate_proj)
        else:
            self._mlp = gated_mlp(every)
            self.rounding = rounding_of(self._mlp)
        """Of the input; None where nothing takes it so."""

    def __call__(self, x: Activations) -> list[Tensor]:
        """What is to be added to the hidden states, each [parts, num_tokens, hidden_size]."""
        of_every_token = [] if self._mlp is None else [parts_of(self._mlp, x)]
        if self.router is None or self.experts is None:
            return of_every_token
        weights, ids = self.router(x.dense)
        return [self.experts.parts(x, ids, weights), *of_every_token]

    def forward_of_others(self, hidden: Tensor) -> None:
        """Take part in the layer of other ranks. ``hidden``: [0, hidden_size]."""
        if self.router is not None and self.experts is not None:
            self.experts.forward_of_others(hidden, self.router.top_k)


class ExpertRouter:
    """In the place of transformers' module of the same job, with its weights: the logits of the experts, and
    the choice by them.

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


class _Silu(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)
