"""The part of ``expert_routing.Routing`` that depends on the experts' ids alone.

``kernels.expert_routing``, whose docstring has an example, makes these tensors in torch or calls
``kernels.triton_routing``; both import this module.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RoutingTables(NamedTuple):
    """Where each expert's rows and tiles are. A row is a token and one of its experts; a tile is up to
    ``Routing.tile_rows`` rows of one expert."""

    order: Tensor
    """int32 [num_rows]: the rows, ``token * top_k + choice``, sorted by expert."""
    starts: Tensor
    """int32 [num_experts + 1]: where each expert's rows begin in ``order``, and the end."""
    tile_starts: Tensor
    """int32 [num_experts + 1]: each expert's first tile, and the number of tiles."""
    tile_experts: Tensor
    """int32 [the most tiles that the rows can make, ``expert_routing.most_tiles``]: each tile's expert;
    ``num_experts`` behind the last tile."""
