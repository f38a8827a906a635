"""The second half of a decoder layer: a gated MLP, or routed experts beside one that every token has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hisparse_pd.model.block_linear import gated_mlp, parts_of, rounding_of
from hisparse_pd.model.expert_router import ExpertRouter
from hisparse_pd.model.experts import RoutedExperts
from hisparse_pd.model.families import Family
from kernels.fp8_rows import Activations, Rounding
from kernels.row_math import silu


class FeedForward:
    """transformers' MLP or MoE block, with our router, our experts where the loader put them, and gated MLPs
    in few launches on a GPU."""

    def __init__(self, mlp: Any, family: Family, *, is_silu: bool) -> None:
        for part in mlp.modules():
            if is_silu and hasattr(part, "act_fn"):
                part.act_fn = _Silu()
        self.experts: Any = getattr(mlp, "experts", None)
        """The routed ones; None in a dense layer."""
        self.router = ExpertRouter(mlp.gate, family) if hasattr(mlp, "gate") else None
        every = mlp if self.router is None else mlp.shared_experts
        self._mlp: Any = None
        """None: it is one of the routed experts, which have its form."""
        if self.router is not None and isinstance(self.experts, RoutedExperts):
            self._rounding = rounding_of(every.gate_proj)
            if self.experts.take_shared(every):
                self.router.with_shared()
                return
        self._mlp = gated_mlp(every) if is_silu else every
        self._rounding = rounding_of(self._mlp)

    @property
    def rounding(self) -> Rounding | None:
        """Of the input; None where nothing takes it so."""
        return self._rounding

    def __call__(self, x: Activations) -> list[Tensor]:
        """What is to be added to the hidden states, each [parts, num_tokens, hidden_size]."""
        of_every_token = [] if self._mlp is None else [parts_of(self._mlp, x)]
        if self.router is None:
            return of_every_token
        weights, ids = self.router(x.dense)
        if isinstance(self.experts, RoutedExperts):
            return [self.experts.parts(x, ids, weights), *of_every_token]
        routed: Tensor = self.experts(x.dense, ids, weights)
        return [routed[None], *of_every_token]

    def forward_of_others(self, hidden: Tensor) -> None:
        """Take part in the layer of other ranks. ``hidden``: [0, hidden_size]."""
        if self.router is not None and isinstance(self.experts, RoutedExperts):
            self.experts.forward_of_others(hidden, self.router.top_k)


class _Silu(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)
