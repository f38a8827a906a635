"""Muon for the matrices inside the layers, AdamW for embeddings, LM head, norms, routers and the indexer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for matrices [out, in] and stacks of them [n, out, in].

    Parameters of one shape are updated together: a launch costs more than the arithmetic at these sizes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append((parameter, parameter.grad))
            for shape, pairs in by_shape.items():
                parameters, grads = [parameter for parameter, _ in pairs], [grad for _, grad in pairs]
                momenta = [self._momentum(parameter) for parameter in parameters]
                torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
                nesterov = torch._foreach_lerp(grads, momenta, MOMENTUM)
                updates = orthogonal(torch.stack(nesterov))
                gain = max(1.0, shape[-2] / shape[-1]) ** 0.5
                torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-group["lr"] * gain)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest semi-orthogonal matrix of each of ``matrices`` [..., out, in], by Newton-Schulz."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if is_tall else x).to(matrices.dtype)
    return result
