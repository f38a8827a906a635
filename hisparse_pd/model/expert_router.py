"""Which experts a token goes to: those of the best scores, of equal ones the lowest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.row_math import linear, sigmoid
from kernels.selection import ranked_topk


class ExpertRouter(torch.nn.Module):
    """In the place of transformers' module of the same job, with the same call and its weights.

    That one leaves it to ``torch.topk`` who of equals is chosen.
    """

    def __init__(self, module: Any, score_outside_groups: float = float("-inf")) -> None:
        """``score_outside_groups``: what an expert's score counts where its group was not chosen."""
        super().__init__()
        self._weight: Tensor = module.weight
        self._bias: Tensor = module.e_score_correction_bias
        self.top_k: int = module.top_k
        self._num_groups: int = module.num_group or 1  # None: experts in no groups
        self._num_chosen_groups: int = module.topk_group or 1
        self._score_outside_groups = score_outside_groups
        self._normalizes: bool = module.norm_topk_prob
        self._scale: float = module.routed_scaling_factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits, float32 [num_tokens, num_experts]; weights, float32, and ids, int64, [num_tokens,
        top_k].
        """
        logits = linear(hidden.reshape(-1, self._weight.shape[1]).float(), self._weight.float())
        scores = sigmoid(logits)
        choice = scores + self._bias
        if self._num_chosen_groups < self._num_groups:
            choice = self._in_best_groups(choice)
        ids = _topk(choice, self.top_k)
        weights = scores.gather(1, ids)
        if self._normalizes:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return logits, weights * self._scale, ids

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """``choice`` in the groups whose two best experts have the largest sums."""
        grouped = choice.view(len(choice), self._num_groups, -1)
        groups = _topk(grouped.topk(2, dim=2).values.sum(dim=2), self._num_chosen_groups)
        is_chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device)
        is_chosen.scatter_(1, groups, True)
        return grouped.masked_fill(~is_chosen[:, :, None], self._score_outside_groups).view_as(choice)


def _topk(values: Tensor, top_k: int) -> Tensor:
    """int64 [num_rows, top_k]: positions of the largest, of equal ones the lowest."""
    if values.device.type == "cuda":
        return values.topk(top_k, dim=1, sorted=False).indices  # which keeps the rule there, in one launch
    return ranked_topk(values, top_k)[1]
