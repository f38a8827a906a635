"""Chooses each token's experts: those with the best scores, and among equal scores the lowest ids.

The router of a layer (``hisparse_pd.core.model.feed_forward``) computes logits by ``narrow_product`` and
passes them to ``ExpertChoice.choose``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.kernels.norms import add_parts
from hisparse_pd.kernels.row_math import linear, sigmoid
from hisparse_pd.kernels.selection import ranked_topk


def narrow_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return parts whose sum is ``x @ matrix.T``, multiplied in float32: [parts, num_tokens, outputs].

    ``x``: [num_tokens, columns]; ``matrix``: [outputs, columns], with few outputs; both have any float dtype.
    On a GPU a part is the product of some of the columns, so that several programs share a row; there may be
    one part, as on a CPU. A row's sum over all parts depends on the row alone.
    """
    if x.device.type == "cuda":
        from hisparse_pd.kernels.triton_routing import narrow_parts

        return narrow_parts(x, matrix)
    return linear(x.float(), matrix.float())[None]


@dataclass(frozen=True)
class ExpertChoice:
    """How experts are chosen: those with the highest score plus ``bias``, which is float32 [num_experts].

    A score is the sigmoid of the expert's logit; with ``is_softmax``, scores are the softmax of all logits.
    Experts form ``num_groups`` groups of neighbours. The ``num_chosen_groups`` groups whose two best experts
    have the largest sums are chosen; in the other groups every sum of score and bias is replaced by
    ``score_outside``. Weights are the scores without bias, divided by their sum if ``normalizes``, times
    ``scale``.
    """

    bias: Tensor
    top_k: int
    """Experts of a token, without the shared one."""
    num_groups: int
    num_chosen_groups: int
    normalizes: bool
    scale: float
    score_outside: float = float("-inf")
    is_softmax: bool = False
    has_shared: bool = False
    """Whether each token also gets the shared expert, as its last one: id ``num_experts``, weight 1."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and ids, int64, each [num_tokens, top_k (+ 1 if ``has_shared``)].

        ``logits``: float32 [parts, num_tokens, num_experts]; the parts are added up in order. On a GPU all is
        done in one launch.
        """
        if logits.device.type == "cuda":
            from hisparse_pd.kernels.triton_routing import choose_triton

            return choose_triton(
                logits,
                self.bias,
                self.top_k,
                num_groups=self.num_groups,
                num_chosen_groups=self.num_chosen_groups,
                normalizes=self.normalizes,
                scale=self.scale,
                score_outside=self.score_outside,
                is_softmax=self.is_softmax,
                has_shared=self.has_shared,
            )
        total = add_parts(logits)
        scores = total.softmax(dim=1) if self.is_softmax else sigmoid(total)
        biased = scores + self.bias
        if self.num_chosen_groups < self.num_groups:
            biased = self._with_best_groups_only(biased)
        ids = ranked_topk(biased, self.top_k)[1]
        weights = scores.gather(1, ids)
        if self.normalizes:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)  # never by 0
        weights = weights * self.scale
        if self.has_shared:
            weights = torch.cat((weights, weights.new_ones((len(weights), 1))), dim=1)
            ids = torch.cat((ids, ids.new_full((len(ids), 1), biased.shape[1])), dim=1)
        return weights, ids

    def _with_best_groups_only(self, biased: Tensor) -> Tensor:
        """Return ``biased`` with ``score_outside`` in the groups that are not chosen."""
        grouped = biased.view(len(biased), self.num_groups, -1)
        groups = ranked_topk(grouped.topk(2, dim=2).values.sum(dim=2), self.num_chosen_groups)[1]
        is_chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=biased.device)
        is_chosen.scatter_(1, groups, True)
        return grouped.masked_fill(~is_chosen[:, :, None], self.score_outside).view_as(biased)
