"""The second half of a decoder layer: a gated MLP, or routed experts and a shared expert.

``dsa.py`` makes a ``FeedForward`` for each layer around transformers' modules, once the weights are loaded,
and calls it in every forward after attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.core.model.block_linear import gated_mlp, parts_of, rounding_of
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.families import Family
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.kernels.expert_choice import ExpertChoice, narrow_product
from hisparse_pd.kernels.fp8_rows import Activations, Rounding, are_few
from hisparse_pd.kernels.row_math import silu


class FeedForward:
    """transformers' MLP or MoE block, with our router, experts and gated MLP."""

    def __init__(self, mlp: Any, family: Family, side_stream: SideStream) -> None:
        """``side_stream``: computes a shared expert of few tokens beside the routed ones. All layers of a
        model have the same."""
        self._side_stream = side_stream
        for part in mlp.modules():
            if hasattr(part, "act_fn"):  # a SiLU whose bits depend on no other token (``kernels.row_math``)
                part.act_fn = _Silu()
        self.experts: RoutedExperts | None = getattr(mlp, "experts", None)
        """The routed experts; None in a dense layer."""
        self.router = ExpertRouter(mlp.gate, family) if hasattr(mlp, "gate") else None
        dense_mlp = mlp if self.router is None else mlp.shared_experts
        self._mlp: Any = None
        """The MLP that every token uses: a dense layer's, or the shared expert. None where the routed experts
        have copied the shared one (``take_shared``) and every token chooses it."""
        self.rounding: Rounding | None
        """The fp8 rounding of the input; None where no layer takes it rounded."""
        if self.router is not None and self.experts is not None and self.experts.take_shared(dense_mlp):
            self.router.add_shared_expert()
            # All experts take the input rounded as the shared one does: their matrices have its format.
            self.rounding = rounding_of(dense_mlp.gate_proj)
        else:
            self._mlp = gated_mlp(dense_mlp)
            self.rounding = rounding_of(self._mlp)

    def __call__(self, x: Activations) -> list[Tensor]:
        """Return what to add to the hidden states, each [parts, num_tokens, hidden_size]; the caller adds up
        parts, too."""
        if self.router is None or self.experts is None:
            return [parts_of(self._mlp, x)]
        if self._mlp is None:
            return [self._routed(self.router, self.experts, x)]
        if not are_few(x.num_tokens, x.dense.device):
            return [self._routed(self.router, self.experts, x), parts_of(self._mlp, x)]
        # Kernels of few tokens wait for memory most of their time, or for other ranks.
        with self._side_stream.behind_current():
            shared = parts_of(self._mlp, x)
        routed = self._routed(self.router, self.experts, x)
        self._side_stream.join()
        return [routed, shared]

    @staticmethod
    def _routed(router: ExpertRouter, experts: RoutedExperts, x: Activations) -> Tensor:
        weights, ids = router(x.dense)
        return experts.parts(x, ids, weights)

    def join_forward(self, hidden: Tensor) -> None:
        """Take part in a forward of other ranks, with no token of its own. ``hidden``: [0, hidden_size]."""
        if self.router is not None and self.experts is not None:
            # There are other ranks, so the experts have no shared one among them: ids are top_k.
            self.experts.join_forward(hidden, self.router.top_k)


class ExpertRouter:
    """A replacement of transformers' router, with its weights: computes experts' logits and chooses by them.

    It exists because transformers' router uses ``torch.topk``, which may choose any of several equal experts.
    """

    def __init__(self, module: Any, family: Family) -> None:
        self._weight: Tensor = module.weight
        # Families that choose by softmax have no correction bias, and their weights sum to 1 before scaling.
        by_softmax = family.chooses_experts_by_softmax
        self.top_k: int = module.top_k
        no_bias = self._weight.new_zeros(len(self._weight))
        self.choice = ExpertChoice(
            bias=no_bias if by_softmax else module.e_score_correction_bias,
            top_k=module.top_k,
            num_groups=module.num_group or 1,  # None: experts are not in groups
            num_chosen_groups=module.topk_group or 1,
            normalizes=by_softmax or module.norm_topk_prob,
            scale=module.routed_scaling_factor,
            score_outside=family.score_outside_groups,
            is_softmax=by_softmax,
        )

    def add_shared_expert(self) -> None:
        """Choose the shared expert, whose id follows all others, for every token from now on."""
        self.choice = replace(self.choice, has_shared=True)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and expert ids, int64, both [num_tokens, top_k], for ``hidden``
        [num_tokens, hidden_size]. After ``add_shared_expert`` there is one more of each."""
        return self.choice.choose(narrow_product(hidden, self._weight))


class _Silu(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)
