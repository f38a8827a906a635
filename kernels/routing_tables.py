"""The tensors of a plan of routed experts that depend on the experts' ids alone.

``kernels.expert_routing`` explains them, and makes them in torch or by ``kernels.triton_routing``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RoutingTables(NamedTuple):
    """The fields of ``expert_routing.Routing`` with these names."""

    order: Tensor
    starts: Tensor
    tile_starts: Tensor
    tile_experts: Tensor
